"""`msprobe summary`: what happened in a run, on one page."""

from __future__ import annotations

import argparse
from typing import Any

from msprobe.analysis.summary import RankSummary, summarise
from msprobe.commands.output import add_rank_option, add_run_options, files_of_rank, report_damage
from msprobe.trace.reader import read
from msprobe.views.strict_json import show_json
from msprobe.views.summary_page import next_commands, summary_page
from msprobe.views.terminal import show

HELP = "what happened: phases, losses, norms, skipped steps, first bad value, cost"


def add_parser(subparsers: Any) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("summary", help=HELP, description=f"Shows {HELP}, and what to run next.")
    add_run_options(parser)
    add_rank_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary of a run."""
    trace = read(arguments.run)
    shown_file = files_of_rank(trace, arguments.rank)[0]
    ranks = summarise(trace.files)
    shown = next(rank for rank in ranks if rank.file == shown_file.name)
    report_damage(trace)
    if arguments.json:
        show_json(_answer(str(trace.path), ranks, shown))
    else:
        show(summary_page(str(trace.path), ranks, shown))
    return 0


def _answer(path: str, ranks: list[RankSummary], shown: RankSummary) -> dict[str, Any]:
    commands = [command for command, _ in next_commands(path, ranks, shown)]
    return {"run": path, "shown": shown.file, "ranks": ranks, "next": commands}
