"""Running the command line in tests: in this process for content, in a real one for what only a process shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from msprobe.commands.cli import main

ROOT = Path(__file__).resolve().parent.parent


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


def invoke(capsys, *arguments) -> Outcome:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)


def spawn(*arguments, env=None, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False, **options)


def strict(text: str):
    """Parse JSON as a strict parser does: bare NaN and Infinity are refused."""

    def refuse(name):
        raise AssertionError(f"bare {name}")

    return json.loads(text, parse_constant=refuse)


def cells(out: str, first: str) -> list[str]:
    """Return the words of the first line that begins with a text, without that text."""
    line = next(line.strip() for line in out.splitlines() if line.strip().startswith(first))
    return line[len(first) :].split()
