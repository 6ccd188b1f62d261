"""The time of a training outside its steps: the stages between epochs, before the first and after the last.

`analysis.summary` feeds it every stage record once.
"""

from __future__ import annotations

from dataclasses import dataclass

from msprobe.schema import StageRecord


@dataclass(slots=True)
class StageTime:
    """All runs of one stage: how often, how long together, and the hook that took most of it."""

    stage: str
    count: int
    total_ns: int
    slowest_hook: str | None
    slowest_hook_ns: int


class OutsideTimes:
    """Adds up stages that are fed to it."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._total_ns: dict[str, int] = {}
        self._hooks_ns: dict[str, dict[str, int]] = {}

    def add(self, record: StageRecord) -> None:
        """Count a stage."""
        self._count[record.stage] = self._count.get(record.stage, 0) + 1
        self._total_ns[record.stage] = self._total_ns.get(record.stage, 0) + record.host_ns
        hooks = self._hooks_ns.setdefault(record.stage, {})
        for hook in record.hooks:
            hooks[hook.hook] = hooks.get(hook.hook, 0) + hook.host_ns

    def told(self) -> list[StageTime]:
        """Return the stages, the longest first."""
        return sorted((self._tell(stage) for stage in self._count), key=lambda row: -row.total_ns)

    def _tell(self, stage: str) -> StageTime:
        hook, spent_ns = max(self._hooks_ns[stage].items(), key=lambda item: item[1], default=(None, 0))
        return StageTime(stage, self._count[stage], self._total_ns[stage], hook, spent_ns)
