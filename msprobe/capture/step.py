"""One step while it runs, and the records that it becomes once its values have arrived.

The session fills a `StepDraft`; `records_of` turns it into the step's lines. On CPU that happens when the step ends; on a device one
step later, when the copy of the values has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from msprobe.capture.calls import Call
from msprobe.capture.clock import Clock, Mark
from msprobe.capture.gradient_records import GradientRecords
from msprobe.capture.loss_terms import LossTerms
from msprobe.capture.notes import Note
from msprobe.capture.parameters import ParameterTable
from msprobe.capture.plan import StepPlan
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.readings import Reading
from msprobe.capture.seen import Seen, SeenTensors
from msprobe.capture.selection import Selection, WatchedModule
from msprobe.capture.spans import Spans
from msprobe.capture.updates import PendingUpdate, StepUpdates
from msprobe.schema import Accumulation, Memory, Record, StepRecord


class StepDraft:
    """What is known of a step so far. `start` is where the step before ended."""

    def __init__(self, index: int, epoch: int, iteration: int, start: Mark, probe_ns: int, table: ParameterTable, plan: StepPlan) -> None:
        self.index = index
        self.epoch = epoch
        self.iteration = iteration
        self.start = start
        self.end: Mark | None = None
        self.complete = False
        self.probe_ns = probe_ns
        self.plan = plan
        self.is_selected = plan.is_selected
        self.full = plan.full
        self.spans = Spans()
        self.readback = Readback()
        self.updates = StepUpdates(table, self.readback, plan)
        self.losses: dict[str, Slot | float | None] = {}
        self.loss_terms = LossTerms(self.readback)
        self.learning_rates: list[Slot | float] = []
        self.accumulation: Accumulation | None = None
        self.calls: list[Call] = []
        self.watched_by_call: dict[Call, WatchedModule] = {}
        self.seen = SeenTensors()
        self.arrivals: list[tuple[int, Seen]] = []
        self.leaf_hooks: list[Any] = []
        self.notes: list[Note] = []
        self.readings: list[Reading] = []
        self.sequence = 0
        self.memory = Memory()
        self.engine_steps = False
        self._calls_begun: dict[str, int] = {}
        self._calls_repeated: dict[str, int] = {}

    def next_seq(self) -> int:
        """Return the next place in the order of execution."""
        self.sequence += 1
        return self.sequence - 1

    def number_of_call(self, name: str, is_again: bool) -> int:
        """Count a call of a module. Checkpointing repeats the calls of a step from the last to the first."""
        if is_again:
            repeated = self._calls_repeated[name] = self._calls_repeated.get(name, 0) + 1
            return max(self._calls_begun.get(name, 0) - repeated, 0)
        number = self._calls_begun.get(name, 0)
        self._calls_begun[name] = number + 1
        return number

    def keep_whole(self, note: Note, tensor: torch.Tensor) -> None:
        """Keep the tensor of a note whole, if there is room."""
        key = f"{note.role}|{note.name}|{note.call}|{note.path}"
        if self.plan.keep(key, tensor, role=note.role, name=note.name, call=note.call, path=note.path):
            note.dump = key

    def is_over(self, end: Mark, complete: bool) -> None:
        """Close what is open, take the hooks off tensors that live on, and send the values on their way."""
        self.spans.finish_all(end)
        self.end = end
        self.complete = complete
        for handle in self.leaf_hooks:
            handle.remove()
        self.leaf_hooks.clear()
        self.seen = SeenTensors()
        self.readback.launch()
        if self.plan.dumps is not None and self.plan.dump is not None:
            self.plan.dumps.finish(self.plan.dump)

    @property
    def file(self) -> str | None:
        """The file of its whole tensors, relative to the run folder."""
        return None if self.plan.dump is None else self.plan.dump.file

    def marks(self) -> list[Mark]:
        """Return every mark of the step but its last, which the next step starts from."""
        spans = [mark for span in self.spans.all for mark in (span.start, span.end) if mark is not None]
        calls = [mark for call in self.calls for mark in call.marks()]
        return [mark for mark in (self.start, *spans, *calls) if mark is not self.end]

    def main_update(self) -> PendingUpdate | None:
        """Return the update that the step's own fields describe: the trainer's optimizer's (number 0), else the first."""
        return next((update for update in self.updates.all if update.optimizer == 0), self.updates.all[0] if self.updates.all else None)


def loss_value(entry: Slot | float | None) -> float | None:
    """Return a captured number, wherever it was captured."""
    return entry.value() if isinstance(entry, Slot) else entry


class StepWriter:
    """Turns drafts whose values have arrived into records.

    Args:
        train: the number of the `train()` call.
        table: the model's parameters.
        selection: which tensors.
        clock: for the device times.
        origin_ns: the run's start on the host's clock.
    """

    def __init__(self, train: int, table: ParameterTable, selection: Selection, clock: Clock, origin_ns: int) -> None:
        self._train = train
        self._origin_ns = origin_ns
        self._table = table
        self._clock = clock
        self._gradients = GradientRecords(train, table, selection.parameters("param.grad"))
        self._model_keys = [id(parameter) for parameter in table.parameters]

    def records_of(self, draft: StepDraft) -> Iterator[Record]:
        """Return a finished step's lines: modules and tensors first, the step itself last (a step on disk is whole)."""
        yield from self.call_records(draft)
        if draft.is_selected:
            yield from self.tensor_records(draft)
        yield self.step_record(draft)

    def call_records(self, draft: StepDraft) -> Iterator[Record]:
        """Return the lines of the modules that ran."""
        for call in draft.calls:
            record = call.record(self._train, draft.index, draft.start.host_ns, self._clock)
            if record is not None:
                yield record

    def tensor_records(self, draft: StepDraft) -> Iterator[Record]:
        """Return the lines of the tensors that were measured."""
        yield from (note.record(self._train, draft.index, draft.file) for note in draft.notes)
        for reading in draft.readings:
            yield from reading.records(self._train, draft.index, self._table, draft.file)
        yield from self._gradients.records(draft.index, draft.updates, draft.full, draft.file)

    def step_record(self, draft: StepDraft) -> StepRecord:
        """Return the step's own line."""
        assert draft.end is not None
        update = draft.main_update()
        updates = [update.describe(self._model_keys) for update in draft.updates.all]
        main = None if update is None else updates[draft.updates.all.index(update)]
        outcome = main.outcome if main is not None else None if draft.engine_steps else "none"
        reason = "the engine steps inside the model, unseen" if outcome is None else None
        return StepRecord(
            train=self._train,
            step=draft.index,
            epoch=draft.epoch,
            iter=draft.iteration,
            complete=draft.complete,
            start_ns=draft.start.host_ns - self._origin_ns,
            wall_ns=draft.end.host_ns - draft.start.host_ns,
            probe_ns=draft.probe_ns + draft.spans.probe_outside_leaves(),
            probe_inside_ns=draft.spans.probe_inside_leaves(),
            phases=draft.spans.phases(draft.start.host_ns, self._clock),
            loss={key: loss_value(entry) for key, entry in draft.losses.items()},
            loss_terms=draft.loss_terms.describe(),
            lr=[loss_value(entry) for entry in draft.learning_rates],
            grad_norm=None if main is None else main.grad_norm,
            accumulation=draft.accumulation,
            optimizer_step=outcome,
            optimizer_step_reason=reason,
            loss_scale=None if main is None else main.loss_scale,
            updates=updates,
            memory=draft.memory,
        )
