"""ModelScope's hooks at each stage: in which order they are called, how often they were, and how long they took.

`msprobe hooks` asks for it. The order and the priorities come from the model records, the times from the steps' phases and the stage
records. A hook that stands in the list and was never timed has no times, which is not the same as taking none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import UNSET

from msprobe.schema import HookInfo, ModelRecord, StageRecord, StepRecord
from msprobe.trace.reader import RankFile

# The order of a run; a stage of any other name follows.
STAGES = (
    "after_init",
    "before_run",
    "before_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "after_train_epoch",
    "before_val",
    "before_val_epoch",
    "before_val_iter",
    "after_val_iter",
    "after_val_epoch",
    "after_val",
    "after_run",
)


@dataclass(slots=True)
class HookCalls:
    """A hook at a stage. `priority` is None where no list named the hook; the times are None where it was never timed."""

    index: int
    hook: str
    priority: int | None
    listed: bool
    calls: int = 0
    total_ns: int | None = None
    max_ns: int | None = None
    mean_ns: int | None = None

    def add(self, host_ns: int) -> None:
        """Add a call."""
        self.calls += 1
        self.total_ns = (self.total_ns or 0) + host_ns
        self.max_ns = max(self.max_ns or 0, host_ns)
        self.mean_ns = round(self.total_ns / self.calls)


@dataclass(slots=True)
class Stage:
    """A stage with its hooks in the order of their calls."""

    stage: str
    hooks: list[HookCalls] = field(default_factory=list)


@dataclass(slots=True)
class HookTable:
    """The hooks of those `train()` calls that have the same list of them."""

    trains: list[int]
    trainer: str | None
    stages: list[Stage]


_Signature = tuple[tuple[int, str, int, tuple[str, ...]], ...]


class _Table:
    """The hooks of one list of them, by stage and index."""

    def __init__(self, model: ModelRecord | None) -> None:
        self.trains: list[int] = []
        self.trainer = model.trainer if model is not None else None
        self.calls: dict[str, dict[tuple[int, str], HookCalls]] = {}
        self._infos: dict[int, HookInfo] = {}
        for info in model.hooks if model is not None else []:
            self._infos[info.index] = info
            for stage in info.stages:
                self.calls.setdefault(stage, {})[info.index, info.hook] = HookCalls(info.index, info.hook, info.priority, listed=True)

    def add(self, stage: str, index: int, hook: str, priority: int | None, host_ns: int) -> None:
        calls = self.calls.setdefault(stage, {})
        key = (index, hook)
        if key not in calls:
            info = self._infos.get(index)
            known = info.priority if info is not None and info.hook == hook else priority
            calls[key] = HookCalls(index, hook, known, listed=False)
        calls[key].add(host_ns)

    def told(self) -> HookTable:
        return HookTable(self.trains, self.trainer, [Stage(stage, list(_ordered(self.calls[stage]))) for stage in self._stages()])

    def _stages(self) -> list[str]:
        known = [stage for stage in STAGES if stage in self.calls]
        return known + [stage for stage in self.calls if stage not in STAGES]


def hook_tables(file: RankFile) -> list[HookTable]:
    """Return the hooks of one process, one table for each list of hooks that trained there."""
    tables: dict[_Signature, _Table] = {}
    by_train: dict[int, _Table] = {}
    for record in file.records():
        if isinstance(record, ModelRecord):
            table = tables.setdefault(_signature(record), _Table(record))
            table.trains.append(record.train)
            by_train[record.train] = table
        elif isinstance(record, (StepRecord, StageRecord)):
            if record.train not in by_train:  # its model record could not be read
                by_train[record.train] = tables.setdefault((), _Table(None))
                by_train[record.train].trains.append(record.train)
            for call in _calls(record):
                by_train[record.train].add(*call)
    return [table.told() for table in tables.values()]


def _signature(model: ModelRecord) -> _Signature:
    return tuple((hook.index, hook.hook, hook.priority, tuple(hook.stages)) for hook in model.hooks)


def _calls(record: StepRecord | StageRecord) -> Iterator[tuple[str, int, str, int | None, int]]:
    """Yield stage, index, hook, priority and duration of each call of a hook."""
    if isinstance(record, StageRecord):
        for time in record.hooks:
            yield record.stage, time.index, time.hook, time.priority, time.host_ns
        return
    for phase in record.phases:
        if phase.name == "hook" and phase.hook is not UNSET:
            stage = "?" if phase.stage is UNSET else phase.stage
            yield stage, -1 if phase.hook_index is UNSET else phase.hook_index, phase.hook, None, phase.host_ns


def _ordered(calls: dict[tuple[int, str], HookCalls]) -> Iterator[HookCalls]:
    for key in sorted(calls):
        yield calls[key]
