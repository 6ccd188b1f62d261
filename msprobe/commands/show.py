"""`msprobe show`: one step as a tree, with its numbers, tensors and events."""

from __future__ import annotations

import argparse
from typing import Any

from msprobe.analysis.step import find_step
from msprobe.commands.output import add_rank_option, add_run_options, files_of_rank, report_damage
from msprobe.errors import UsageError
from msprobe.trace.reader import read
from msprobe.views.step_tree import step_page
from msprobe.views.strict_json import show_json
from msprobe.views.terminal import show

HELP = "one step as a tree: phases, modules, tensors, in the order they ran"


def add_parser(subparsers: Any) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("show", help=HELP, description=f"Shows {HELP}.")
    add_run_options(parser)
    parser.add_argument("--step", required=True, metavar="N", help="the step, counted from 0")
    add_rank_option(parser)
    parser.add_argument("--all", action="store_true", help="all modules and tensors, not only the first and the largest")


def run(arguments: argparse.Namespace) -> int:
    """Print one step of a run."""
    wanted = _step_number(arguments.step)
    trace = read(arguments.run)
    try:
        found = find_step(files_of_rank(trace, arguments.rank), wanted)
    finally:
        report_damage(trace)
    if arguments.json:
        show_json(found)
    else:
        show(step_page(str(trace.path), found, everything=arguments.all))
    return 0


def _step_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"--step {text!r} is no step: steps are whole numbers, counted from 0")
    return int(text)
