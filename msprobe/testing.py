"""For people's own tests: record a block, and look at its records.

Not imported by the rest of msprobe.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msprobe.errors import TraceError
from msprobe.schema import AnyRecord
from msprobe.trace.reader import read


@contextlib.contextmanager
def capture(**settings: Any) -> Iterator[list[AnyRecord]]:
    """Record every `train()` inside the block; the list holds the records when the block is left.

    Args:
        **settings: those of `msprobe.enable()`; failures inside msprobe are raised unless `strict=False` is given.

    Yields:
        A list that is empty inside the block and filled, in the order of the file, when it ends.
    """
    from msprobe.host import attach

    records: list[AnyRecord] = []
    before = attach.current_config()
    with tempfile.TemporaryDirectory(prefix="msprobe-") as folder:
        run = Path(folder) / "capture"
        attach.enable(**{"strict": True, "quiet": True, **settings, "run_dir": run})
        try:
            yield records
        finally:
            attach.disable()
            records.extend(_read_all(run))
            if before is not None:
                attach.enable_with(before)


def _read_all(run: Path) -> list[AnyRecord]:
    """Return the records of a run folder, of which each line must be readable; a block that trained nothing has none."""
    if not any(run.glob("rank*.jsonl")):
        return []
    trace = read(run)
    found = list(trace.records())
    if trace.damage:
        raise TraceError(f"{trace.damage[0].file}: line {trace.damage[0].line} cannot be read: {trace.damage[0].reason}")
    return found
