"""Writing one rank's file: one `write` per line, so that whatever ends the process, every line written before is whole.

The recorder owns one writer. A forked child never writes (its pid differs). A write that fails costs the trace, never the training: the
torn piece is cut off again, one warning goes to `warn`, and what could not be written is counted. The descriptor is not inherited by
programs that the training starts, and the file's permissions follow the umask. Nothing is imported at exit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from msprobe.codec import encode
from msprobe.schema import Record


class TraceWriter:
    """An append-only file of records; one that exists already is a `FileExistsError`, any other trouble a warning.

    Attributes:
        path: the file.
        dropped: how many records could not be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self.dropped = 0
        self._warn = warn
        self._warned = False
        self._pid = os.getpid()
        self._size = 0
        self._descriptor: int | None = self._open()

    def _open(self) -> int | None:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            self._complain(error)
            return None

    def write(self, record: Record) -> bool:
        """Append a record as one line, and tell whether it is on disk; failures are counted and reported once, never raised."""
        if os.getpid() != self._pid:
            return False
        if self._descriptor is None:
            self.dropped += 1
            return False
        line = encode(record)
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # a full disk takes what fits; the next write says why it was full
                written += os.write(self._descriptor, line[written:])
            self._size += written
        except OSError as error:
            self.dropped += 1
            self._complain(error)
            self._cut_torn_line()
            return False
        return True

    def close(self) -> None:
        """Close the file; later records are counted as dropped."""
        if self._descriptor is not None and os.getpid() == self._pid:
            os.close(self._descriptor)
            self._descriptor = None

    def _cut_torn_line(self) -> None:
        """Take back a partly written line: nothing may ever be appended to a torn one."""
        assert self._descriptor is not None
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self.path}: {error.strerror or error}; records are being dropped, the training goes on")


def open_rank_file(folder: Path, rank: int, warn: Callable[[str], None]) -> TraceWriter:
    """Return a writer for `rank00000.jsonl`; a second process of the same rank gets `rank00000-<pid>.jsonl`, its next file a number too."""
    pid = os.getpid()
    names = itertools.chain(
        (f"rank{rank:05d}", f"rank{rank:05d}-{pid}"), (f"rank{rank:05d}-{pid}-{number}" for number in itertools.count(2))
    )
    for name in names:
        with contextlib.suppress(FileExistsError):
            return TraceWriter(folder / f"{name}.jsonl", warn)
    raise AssertionError("names never end")
