"""Where a bad value came from: the first module output of a step, in execution order, that was not finite.

`analysis.summary` feeds it every tensor record. Module outputs are recorded on request and at few steps, so it keeps one finding for each
step, up to a bound. A module inside another one returns first, so the first finding is the innermost. An output of nothing but -inf
beside finite numbers is not a finding: attention masks are full of them on purpose.
"""

from __future__ import annotations

from msprobe.schema import TensorRecord

_MOST_STEPS = 4096


class Origins:
    """Remembers, for each step with recorded module outputs, the first that was not finite."""

    def __init__(self) -> None:
        self._first: dict[int, TensorRecord | None] = {}

    def add(self, record: TensorRecord) -> None:
        """Look at a tensor record."""
        if record.role != "module.output" or (record.step not in self._first and len(self._first) >= _MOST_STEPS):
            return
        known = self._first.setdefault(record.step, None)
        is_bad = bool(record.nan or record.posinf)
        if is_bad and (known is None or (record.seq or 0) < (known.seq or 0)):
            self._first[record.step] = record

    def told(self) -> dict[int, TensorRecord | None]:
        """Return the finding of each step that has module outputs, None where all of them were finite."""
        return self._first
