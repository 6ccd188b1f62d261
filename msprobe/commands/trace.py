"""`msprobe trace`: record a run of somebody's script, untouched."""

from __future__ import annotations

import argparse
import os
from typing import Any

from msprobe import launch
from msprobe.config import ROLES, from_environment
from msprobe.errors import UsageError

HELP = "record a run, e.g. msprobe trace finetune.py --lr 1e-5, or msprobe trace torchrun --nproc-per-node 2 finetune.py"


OPTIONS = ("out", "name", "tensors", "level", "steps", "dump", "dump_limit", "keep_last", "on_anomaly", "strict", "quiet")


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "trace", help=HELP, description=HELP, usage="msprobe trace [OPTIONS] (SCRIPT.py | -m MODULE | COMMAND) [ARGS...]"
    )
    add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the target is a module, as in python -m")
    parser.add_argument("target", nargs=argparse.REMAINDER, help="what to run, with its own arguments")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what is recorded; they are those of `msprobe.enable()`."""
    parser.add_argument("--out", metavar="DIR", help="parent of run folders (default ./msprobe-runs)")
    parser.add_argument("--name", metavar="NAME", help="name of this run's folder (default: time and script)")
    parser.add_argument(
        "--tensors",
        metavar="ROLE[:GLOB]",
        action="append",
        help=f"which tensors get statistics; roles are {', '.join(ROLES)}, e.g. 'module.output:unet.*' (default param.grad; repeatable)",
    )
    parser.add_argument(
        "--level",
        metavar="norm|full",
        help="norm: l2, and NaN and inf counts where it is not finite (default); full: all statistics",
    )
    parser.add_argument(
        "--steps",
        metavar="STEPS",
        help="steps that get tensor statistics: a comma list of indexes and slices, e.g. 0,10,100:110,::10 (default all)",
    )
    parser.add_argument(
        "--dump", metavar="ROLE[:GLOB]", action="append", help="which tensors are kept whole at those steps, as safetensors (repeatable)"
    )
    parser.add_argument("--dump-limit", metavar="BYTES", help="bound on the bytes that wait for being written, e.g. 512MB (default 1GiB)")
    parser.add_argument(
        "--keep-last", metavar="N", help="keep full statistics of the last N steps in memory, and write them when something goes wrong"
    )
    parser.add_argument(
        "--on-anomaly",
        metavar="record|dump|stop",
        help="when something goes wrong: an event (default); batch, random states and parameters too; or the end of the training",
    )
    parser.add_argument("--strict", action="store_true", default=None, help="a failure inside msprobe is an error")
    parser.add_argument("-q", "--quiet", action="store_true", default=None, help="nothing on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Become the target; returns only by an exception.

    Raises:
        UsageError: nothing to run, an option that makes no sense, or a folder that cannot be written.
    """
    target = list(arguments.target)
    if target and target[0] == "--":
        target = target[1:]
    if arguments.module:
        target = ["-m", *target]
    if not target or target == ["-m"]:
        raise UsageError("trace: nothing to run; name a script, -m MODULE or a command, e.g. msprobe trace finetune.py")
    given = {key: getattr(arguments, key) for key in OPTIONS}
    launch.launch(from_environment(os.environ).with_arguments(given), target)
    return 0
