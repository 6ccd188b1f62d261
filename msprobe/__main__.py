"""`python -m msprobe`: the same as the command `msprobe`, in the interpreter at hand."""

from __future__ import annotations

import sys

from msprobe.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
