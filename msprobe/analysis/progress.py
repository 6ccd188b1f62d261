"""How far a run came and how it ended: steps, updates, skipped and unapplied ones, and the `end` records.

`analysis.summary` feeds it the step, model and end records of one process. The counts come from the steps themselves, so a run that was
cut has them too; what the `end` records counted stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from msprobe.schema import EndRecord, ModelRecord, StepRecord


@dataclass(frozen=True, slots=True)
class Ending:
    """How one `train()` ended, and the counts of its `end` record."""

    train: int | None
    reason: str
    steps: int
    dropped_records: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done.

    `steps` counts the finished ones, from `first_step` to `last_step`, `broken_off` the others (`broken_step` is the last). `updates`
    counts steps in which an optimizer changed weights, `skipped` those whose update a loss scaler skipped, `unknown` the finished ones
    whose outcome was not recorded. `unapplied_micro_steps` are the micro-steps since the last update of each `train()`: their gradients
    were never used. `cut`: a `train()` has no `end` record. `missing_steps`: how many of the steps that the `end` records count are not
    in the trace.
    """

    steps: int
    broken_off: int
    broken_step: int | None
    first_step: int | None
    last_step: int | None
    first_epoch: int | None
    last_epoch: int | None
    updates: int
    skipped: int
    unknown: int
    unapplied_micro_steps: int
    accumulation_sizes: list[int]
    endings: list[Ending]
    cut: bool
    missing_steps: int
    dropped_records: int


class ProgressCount:
    """Counts records that are fed to it in order."""

    def __init__(self) -> None:
        self._steps = 0
        self._broken_off = 0
        self._broken_step: int | None = None
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None
        self._updates = 0
        self._skipped = 0
        self._unknown = 0
        self._unapplied = 0
        self._unapplied_before = 0
        self._sizes: set[int] = set()
        self._trains = 0
        self._endings: list[Ending] = []

    def add_model(self, _: ModelRecord) -> None:
        """Count a `train()`."""
        self._trains += 1
        self._unapplied_before += self._unapplied
        self._unapplied = 0

    def add_step(self, step: StepRecord) -> None:
        """Count a step."""
        self._count_outcome(step)
        if not step.complete:
            self._broken_off += 1
            self._broken_step = step.step
            return
        self._first = self._first or step
        self._last = step
        self._steps += 1
        if step.accumulation is not None:
            self._sizes.add(step.accumulation.size)

    def _count_outcome(self, step: StepRecord) -> None:
        # An update is a fact even where the step was broken off after it; that there was none is only known at the end of a step.
        if step.optimizer_step == "done":
            self._updates += 1
        elif step.optimizer_step == "skipped":
            self._skipped += 1
        elif step.complete and step.optimizer_step == "none":
            self._unapplied += 1
            return
        elif step.complete:
            self._unknown += 1
        else:
            return
        self._unapplied = 0

    def add_end(self, end: EndRecord) -> None:
        """Note how a `train()` ended."""
        self._endings.append(Ending(end.train, end.reason, end.steps, end.dropped_records))

    def told(self) -> Progress:
        """Return the counts so far."""
        first, last = self._first, self._last
        cut = len(self._endings) < max(self._trains, 1)
        counted = sum(ending.steps for ending in self._endings)
        return Progress(
            steps=self._steps,
            broken_off=self._broken_off,
            broken_step=self._broken_step,
            first_step=first.step if first else None,
            last_step=last.step if last else None,
            first_epoch=first.epoch if first else None,
            last_epoch=last.epoch if last else None,
            updates=self._updates,
            skipped=self._skipped,
            unknown=self._unknown,
            unapplied_micro_steps=self._unapplied_before + self._unapplied,
            accumulation_sizes=sorted(self._sizes),
            endings=self._endings,
            cut=cut,
            missing_steps=0 if cut else max(counted - self._steps, 0),
            dropped_records=sum(ending.dropped_records for ending in self._endings),
        )
