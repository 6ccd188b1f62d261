"""What one process records over all its `train()` calls: the step counter, the run's clock, and the rank's file.

`host.attach` owns the recorder; sessions number their steps and write their records through it. The rank's file is made with the first
record, when the rank is certain (a process group starts after the trainer is built), and begins with the header. A failure inside
msprobe is noted here: one warning, an event, and the training goes on (with `strict` it is raised).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msprobe.capture.clock import now_ns
from msprobe.config import Config
from msprobe.notice import say
from msprobe.schema import EventRecord, Level, Record, RunRecord, StepRecord
from msprobe.trace.writer import TraceWriter, open_rank_file

MOST_FAILURES_REPORTED = 20


class Recorder:
    """Numbers, times and writes the records of one process.

    Args:
        config: the settings.
        folder: the run folder, which exists.
        header: makes the header when the file is opened; it gets the recorder.
    """

    def __init__(self, config: Config, folder: Path, header: Callable[[Recorder], RunRecord]) -> None:
        self.config = config
        self.folder = folder
        self.origin_ns = now_ns()
        self.started_unix_ns = time.time_ns()
        self.next_step = 0
        self.written_steps = 0
        self.trains = 0
        self.rank = 0
        self.run_id = ""
        self._header = header
        self._writer: TraceWriter | None = None
        self._pid = os.getpid()
        self._has_lost = False
        self._failures: dict[tuple[str, str], int] = {}

    @property
    def dropped(self) -> int:
        """How many records could not be written."""
        return self._writer.dropped if self._writer is not None else 0

    @property
    def wrote_anything(self) -> bool:
        """Whether this process has opened its file."""
        return self._writer is not None

    def belongs_here(self) -> bool:
        """Tell whether this process made the recorder: a forked child has a copy, with which it must not write."""
        return os.getpid() == self._pid

    def write(self, record: Record) -> None:
        """Write one record; a forked child writes nothing."""
        if not self.belongs_here():
            return
        if self._writer is None:
            header = self._header(self)
            self.rank = header.rank
            self.run_id = header.run_id
            self._writer = open_rank_file(self.folder, header.rank, say)
            self._writer.write(header)
        if self._writer.write(record) and isinstance(record, StepRecord) and record.complete:
            self.written_steps += 1

    def event(self, code: str, level: Level, message: str, train: int | None = None, step: int | None = None, **data: Any) -> None:
        """Write an event that happened now."""
        self.write(EventRecord(code=code, level=level, message=message, train=train, step=step, at_ns=now_ns() - self.origin_ns, data=data))

    def failed(self, where: str, error: Exception, train: int | None = None, step: int | None = None) -> None:
        """Note a failure inside msprobe: warn once, record it, and let the training go on.

        Raises:
            Exception: the error itself, when the run is strict.
        """
        if self.config.strict:
            raise error
        kind = (where, type(error).__name__)
        seen = self._failures.get(kind, 0)
        self._failures[kind] = seen + 1
        if not seen and len(self._failures) == 1:
            say(f"recording failed in {where} ({type(error).__name__}: {error}); the training goes on, the trace may lack some values")
        if not seen and len(self._failures) <= MOST_FAILURES_REPORTED:
            message = f"msprobe failed in {where}: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # what failed may be the writing
                self.event("probe_error", "error", message, train, step, where=where, error=type(error).__name__)

    @property
    def stem(self) -> str:
        """The name of the rank's file without its ending; files that belong to it begin with it."""
        return self._writer.path.stem if self._writer is not None else f"rank{self.rank:05d}"

    def lost(self, message: str) -> None:
        """Say, once in a run, that something could not be written beside the trace; may be called from another thread."""
        if not self._has_lost:
            self._has_lost = True
            say(message)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
