"""The way from a renderable to stdout, whatever stdout is.

Commands print every page through `show`. A terminal gets its width and its colours; a pipe or a file gets 80 columns (or COLUMNS) without
colour. No page is laid out for less than 72 columns: a narrower terminal wraps the lines, which loses nothing. Where the output's encoding
is not Unicode, the signs that msprobe draws with become ASCII, and any other character that it lacks is an escape instead of a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType

from msprobe.views.text import in_ascii

PIPE_COLUMNS = 80
_FEWEST_COLUMNS = 72


def show(renderables: Iterable[RenderableType]) -> None:
    """Print renderables to stdout, one below the other."""
    console = _console()
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, crop=False)
    write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def write(text: str) -> None:
    """Write text to stdout; characters that its encoding lacks become escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        text = in_ascii(text)
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def warn(lines: Iterable[str]) -> None:
    """Write lines to stderr, each marked as ours."""
    for line in lines:
        encoding = sys.stderr.encoding or "utf-8"
        print(f"msprobe: {line}".encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    columns = _asked_columns()
    if columns is None and not console.is_terminal:
        columns = PIPE_COLUMNS
    console.width = max(columns or console.width, _FEWEST_COLUMNS)
    return console


def _asked_columns() -> int | None:
    """Return the width that COLUMNS asks for, if it is a number."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 10_000 else None
