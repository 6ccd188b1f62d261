"""One line on stderr from msprobe to the person at the terminal; nothing ever goes to stdout.

Written straight to the descriptor, without rich and without imports: it may run while the interpreter ends, where an import in an
`atexit` handler turns Ctrl-C's exit status 130 into 1.
"""

from __future__ import annotations

import contextlib
import os


def say(message: str) -> None:
    """Write `msprobe: <message>` to stderr; a closed or full stderr is not an error."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    with contextlib.suppress(OSError):
        os.write(2, f"msprobe: {line}\n".encode("utf-8", "backslashreplace"))
