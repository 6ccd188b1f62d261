"""For people's own tests: record a block, and look at its records.

Not imported by the rest of msprobe.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    from msprobe.host.attach import disable, enable

    records: list[AnyRecord] = []
    with tempfile.TemporaryDirectory(prefix="msprobe-") as folder:
        enable(**{"strict": True, "quiet": True, **settings, "out": folder, "name": "capture"})
        try:
            yield records
        finally:
            disable()
            for path in sorted(Path(folder).glob("capture*/rank*.jsonl")):
                records.extend(read(path).records())
