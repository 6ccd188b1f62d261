"""What all reading commands share: their common options, and the report of what could not be read.

Each verb's module calls `add_run_options` for its parser and `report_damage` when it has read the run, so that damage is told once, on
stderr, and never mixes with an answer on stdout.
"""

from __future__ import annotations

import argparse

from msprobe.errors import TraceError
from msprobe.trace.reader import RankFile, Run
from msprobe.views.terminal import warn


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add RUN and `--json`."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run folder, or one rank's .jsonl; default: the newest under ./msprobe-runs")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, alone on stdout")


def add_rank_option(parser: argparse.ArgumentParser) -> None:
    """Add `--rank`."""
    parser.add_argument("--rank", type=int, metavar="R", help="the rank to look at (default: the first)")


def files_of_rank(run: Run, rank: int | None) -> list[RankFile]:
    """Return the files of a rank, or all files where no rank is asked for.

    Raises:
        TraceError: the run has no such rank.
    """
    files = [file for file in run.files if rank is None or file.rank == rank]
    if not files:
        ranks = ", ".join(map(str, sorted({file.rank for file in run.files})))
        raise TraceError(f"there is no rank {rank} in {run.path}; it holds rank {ranks}")
    return files


def report_damage(run: Run) -> None:
    """Say on stderr which lines of the files that were read are no records, if there are any."""
    for file in run.files:
        warn(file.report.sentences())
