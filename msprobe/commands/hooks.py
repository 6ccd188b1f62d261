"""`msprobe hooks`: ModelScope's hooks in the order they ran at each stage, with priority and time."""

from __future__ import annotations

import argparse
from typing import Any

from msprobe.analysis.hook_times import hook_tables
from msprobe.commands.output import add_rank_option, add_run_options, files_of_rank, report_damage
from msprobe.trace.reader import read
from msprobe.views.hook_table import hook_page
from msprobe.views.strict_json import show_json
from msprobe.views.terminal import show

HELP = "ModelScope's hooks in the order they ran, with priority and time"


def add_parser(subparsers: Any) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("hooks", help=HELP, description=f"Shows {HELP}, for each stage.")
    add_run_options(parser)
    add_rank_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the hooks of a run."""
    trace = read(arguments.run)
    file = files_of_rank(trace, arguments.rank)[0]
    tables = hook_tables(file)
    report_damage(trace)
    if arguments.json:
        show_json({"run": str(trace.path), "file": file.name, "tables": tables})
    else:
        show(hook_page(str(trace.path), file.name, tables))
    return 0
