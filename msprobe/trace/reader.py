"""Reads a run folder back: every rank, as a stream of the very structs that were written.

`msprobe.read` and all reading commands come here. Each iterator walks the files from disk anew, so memory stays flat however long the
run was. Reading is tolerant: a line that cannot be read is skipped and remembered in `damage`, and never stops the rest. It is strict
about what a line may do: it is JSON that fits the schema, or it is not used.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from msprobe import schema
from msprobe.errors import TraceError
from msprobe.steps import StepSelection
from msprobe.trace.damage import Damage, DamageReport
from msprobe.trace.lines import UnknownKind, Unreadable, decoded, numbered
from msprobe.trace.tensors import TensorStream

RUNS_FOLDER = Path("msprobe-runs")
_RANK_FILE = re.compile(r"rank([0-9]{1,9})(?:-([0-9]{1,18})(?:-[0-9]{1,9})?)?\.jsonl")
_HEADER_BYTES = 4 * 1024 * 1024

_Kind = TypeVar("_Kind", bound=schema.Record)


class Records(ABC):
    """Iterators of typed records, each of which reads the files anew."""

    @abstractmethod
    def records(self) -> Iterator[schema.AnyRecord]:
        """Yield every readable record in the order of the file."""

    @abstractmethod
    def tensors(
        self, role: str | None = None, name: str | None = None, steps: StepSelection | str | None = None
    ) -> Iterator[schema.TensorRecord]:
        """Yield tensor records, and one for each parameter that a `norms` record holds.

        Args:
            role: only this role, such as `param.grad`.
            name: only names that match this glob, such as `unet.down_blocks.*`.
            steps: only these steps; a text is in the STEPS grammar.
        """

    def headers(self) -> Iterator[schema.RunRecord]:
        """Yield the first line of each file."""
        return self._of(schema.RunRecord)

    def models(self) -> Iterator[schema.ModelRecord]:
        """Yield what was trained, one record for each `train()`."""
        return self._of(schema.ModelRecord)

    def steps(self) -> Iterator[schema.StepRecord]:
        """Yield the training steps."""
        return self._of(schema.StepRecord)

    def stages(self) -> Iterator[schema.StageRecord]:
        """Yield the hook stages that ran in no step."""
        return self._of(schema.StageRecord)

    def modules(self, step: int | None = None) -> Iterator[schema.ModuleRecord]:
        """Yield the module calls of all steps, or of one."""
        return (record for record in self._of(schema.ModuleRecord) if step is None or record.step == step)

    def norms(self) -> Iterator[schema.NormsRecord]:
        """Yield the l2 norms of many parameters at once, in the compact form in which they were written."""
        return self._of(schema.NormsRecord)

    def events(self) -> Iterator[schema.EventRecord]:
        """Yield the events."""
        return self._of(schema.EventRecord)

    def ends(self) -> Iterator[schema.EndRecord]:
        """Yield the last line of each `train()`; a run that was cut has none."""
        return self._of(schema.EndRecord)

    def _of(self, kind: type[_Kind]) -> Iterator[_Kind]:
        return (record for record in self.records() if isinstance(record, kind))


class RankFile(Records):
    """The trace of one process. `rank` is that of the file's name, or 0 where the name holds none."""

    def __init__(self, path: Path) -> None:
        match = _RANK_FILE.fullmatch(path.name)
        self.path = path
        self.rank = int(match[1]) if match else 0
        self.report = DamageReport(path.name)

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name

    def records(self) -> Iterator[schema.AnyRecord]:
        """Yield every readable record; `report` then says what was skipped."""
        report = DamageReport(self.name)
        try:
            with self.path.open("rb") as file:
                yield from _readable(numbered(file), report)
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror}") from error
        finally:
            if report.lines >= self.report.lines:
                self.report = report

    def tensors(
        self, role: str | None = None, name: str | None = None, steps: StepSelection | str | None = None
    ) -> Iterator[schema.TensorRecord]:
        """Yield tensor records, expanding `norms` records through the parameters of the model."""
        stream = TensorStream(role, name, StepSelection.parse(steps) if isinstance(steps, str) else steps)
        for record in self.records():
            yield from stream.feed(record)
        yield from stream.flush()


class Run(Records):
    """A run: the files of all its ranks, by rank. Its iterators walk one file after the other.

    Attributes:
        path: the run folder, or the single file that was asked for.
        files: one `RankFile` per process that trained.
    """

    def __init__(self, path: Path, files: tuple[RankFile, ...]) -> None:
        self.path = path
        self.files = files

    @property
    def damage(self) -> list[Damage]:
        """The lines that could not be read, as far as the files were read; in detail up to a thousand a file."""
        return [damage for file in self.files for damage in file.report.damage]

    @property
    def unknown_kinds(self) -> Counter[str]:
        """How many records there were of kinds that this version does not know."""
        return sum((file.report.unknown_kinds for file in self.files), Counter())

    def records(self) -> Iterator[schema.AnyRecord]:
        """Yield every readable record, rank after rank."""
        for file in self.files:
            yield from file.records()

    def tensors(
        self, role: str | None = None, name: str | None = None, steps: StepSelection | str | None = None
    ) -> Iterator[schema.TensorRecord]:
        """Yield tensor records, rank after rank; each rank's `norms` are expanded through its own model."""
        for file in self.files:
            yield from file.tensors(role, name, steps)


def read(path: str | os.PathLike[str] | None = None) -> Run:
    """Open a run for reading.

    Args:
        path: a run folder, or the file of one rank; by default the run under `./msprobe-runs` that was started last.

    Raises:
        TraceError: there is no run there, or it cannot be opened.
    """
    where = _newest(RUNS_FOLDER) if path is None else Path(path)
    try:
        files = [where] if where.is_file() else _rank_files(where)
    except OSError as error:
        raise TraceError(f"cannot read {where}: {error.strerror}") from error
    if not files:
        raise TraceError(_not_a_run(where))
    return Run(where, tuple(RankFile(file) for file in files))


def _readable(lines: Iterator[tuple[int, bytes | None]], report: DamageReport) -> Iterator[schema.AnyRecord]:
    """Yield the records of the lines. A malformed line is held back until it is known whether another one follows it."""
    suspect: tuple[int, str] | None = None
    for number, line in lines:
        report.lines = number
        if suspect is not None:
            report.add(*suspect, at_tail=False)
            suspect = None
        found = Unreadable("longer than 64 MiB", malformed=True) if line is None else decoded(line)
        if isinstance(found, UnknownKind):
            report.unknown_kinds[found.kind] += 1
        elif not isinstance(found, Unreadable):
            report.records += 1
            yield found
        elif found.malformed:
            suspect = (number, found.reason)
        else:
            report.add(number, found.reason, at_tail=False)
    if suspect is not None:
        report.add(*suspect, at_tail=True)


def _rank_files(folder: Path) -> list[Path]:
    """Return the rank files of a folder by rank, the first process of a rank before later ones."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name)) and path.is_file()]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 0), item[1].name))]


def _not_a_run(where: Path) -> str:
    if not where.exists():
        return f"there is no {where}; name a run folder, or the rank*.jsonl file of one rank"
    inner = _runs_in(where)
    if inner:
        return f"{where} is no run folder (no rank*.jsonl in it) but holds {len(inner)} of them; name one, such as {_last_started(inner)}"
    return f"{where} is no run folder: there is no rank*.jsonl in it; a run is what `msprobe trace SCRIPT.py` makes under msprobe-runs"


def _newest(parent: Path) -> Path:
    """Return the run folder under `parent` that was started last."""
    runs = _runs_in(parent)
    if not runs:
        raise TraceError(
            f"there is no run folder under ./{parent} (looked for */rank*.jsonl); name a run, or record one: msprobe trace SCRIPT.py"
        )
    return _last_started(runs)


def _runs_in(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [folder for folder in parent.iterdir() if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and _rank_files(folder)]


def _last_started(runs: list[Path]) -> Path:
    return max(runs, key=lambda run: (_started_unix_ns(_rank_files(run)[0]), run.name))


def _started_unix_ns(file: Path) -> int:
    """Return when a process started to record: its header says so, and where that is damaged the file's own time does."""
    try:
        with file.open("rb") as stream:
            header = decoded(stream.readline(_HEADER_BYTES))
        return header.started_unix_ns if isinstance(header, schema.RunRecord) else file.stat().st_mtime_ns
    except OSError:
        return 0
