"""The command line: finds the verb, hands over, and turns errors into one line and an exit status.

Only the module of the verb that was asked for is imported, so that `msprobe --help` is quick and one verb's imports cannot break another.
Each module under `commands` that stands in `_VERBS` has `add_parser(subparsers)` and `run(arguments) -> int`.

Exit status: 0 done, 1 the answer is "no", 2 wrong usage or unreadable input, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from msprobe.errors import MsprobeError, TraceError, UsageError

_VERBS = {
    "trace": "record a run: msprobe trace torchrun --nproc-per-node 2 finetune.py",
    "summary": "what happened: phases, losses, norms, skipped steps, first bad value, cost",
    "show": "one step as a tree: phases, modules, tensors, in the order they ran",
    "hooks": "ModelScope's hooks in the order they ran, with priority and time",
    "doctor": "versions, devices, which trainers can be traced here, name clashes",
}
_INTERRUPTED = 130
_NOBODY_READS = 141


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: the arguments without the program's name; by default those of the process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()  # here, so that a closed pipe is noticed while it can still be told apart from a crash
    except MsprobeError as error:
        return _fail(error)
    except OverflowError as error:  # the schema bounds no integer, and a hostile trace may hold one of hundreds of digits
        return _fail(TraceError(f"the trace holds a number that is too large to be one that msprobe wrote: {error}"))
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, and must find something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        return _fail(TraceError(f"{error.filename or 'the output'}: {error.strerror or error}"))
    except RecursionError:
        return _fail(TraceError("the trace is nested too deeply to be shown"))
    return status


def _run(arguments: Sequence[str]) -> int:
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _parser(verb)
    try:
        parsed, unknown = parser.parse_known_args(arguments)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    if unknown:
        hint = "; the script's own options stand after the script" if verb == "trace" else ""
        raise UsageError(f"{verb or 'msprobe'}: unknown option {unknown[0]}{hint} (see: msprobe {verb or ''} --help)".replace("  ", " "))
    if parsed.verb is None:
        parser.print_help()
        return 0
    return int(importlib.import_module(f"msprobe.commands.{parsed.verb}").run(parsed))


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """Return the parser; all verbs are listed, but only the one that was asked for is imported and knows its options."""
    parser = _Parser(prog="msprobe", description="Records training inside ModelScope, and answers questions about it.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"msprobe {_version()}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, line in _VERBS.items():
        if name == verb:
            importlib.import_module(f"msprobe.commands.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("modelscope-probe")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _fail(error: MsprobeError) -> int:
    """Say what is wrong in one line; a stderr that takes nothing changes no exit status."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = sys.stderr.encoding or "utf-8"
        line = " ".join(str(error).split())
        print(f"msprobe: {line}".encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr, flush=True)
    return 2
