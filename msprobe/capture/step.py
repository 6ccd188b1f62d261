"""One step while it runs, and the records that it becomes once its values have arrived.

The session fills a `StepDraft`; `records_of` turns it into the step's lines. On CPU that happens when the step ends; on a device one
step later, when the copy of the values has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from msprobe.capture.clock import Clock, Mark
from msprobe.capture.loss_terms import LossTerms
from msprobe.capture.modules import Call
from msprobe.capture.outputs import UNCOUNTED, Output
from msprobe.capture.parameters import ParameterTable, dtype_name, shape_of
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.spans import Spans
from msprobe.capture.statistics import fill
from msprobe.capture.updates import Moment, PendingUpdate, StepUpdates
from msprobe.config import Config
from msprobe.schema import NO_GRADIENT, Accumulation, Memory, NormsRecord, Record, StepRecord, TensorRecord


class StepDraft:
    """What is known of a step so far. `start` is where the step before ended."""

    def __init__(
        self,
        index: int,
        epoch: int,
        iteration: int,
        start: Mark,
        probe_ns: int,
        table: ParameterTable,
        described: Sequence[torch.Tensor] = (),
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.iteration = iteration
        self.start = start
        self.end: Mark | None = None
        self.complete = False
        self.probe_ns = probe_ns
        self.spans = Spans()
        self.readback = Readback()
        self.updates = StepUpdates(table, self.readback, described)
        self.losses: dict[str, Slot | float | None] = {}
        self.loss_terms = LossTerms(self.readback)
        self.learning_rates: list[Slot | float] = []
        self.accumulation: Accumulation | None = None
        self.calls: list[Call] = []
        self.outputs: list[Output] = []
        self.call_counts: dict[str, int] = {}
        self.sequence = 0
        self.memory = Memory()
        self.engine_steps = False

    def marks(self) -> list[Mark]:
        """Return every mark of the step but its last, which the next step starts from."""
        spans = [mark for span in self.spans.all for mark in (span.start, span.end) if mark is not None]
        calls = [mark for call in self.calls for mark in (call.start, call.end) if mark is not None]
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
        config: which tensors, at which steps.
        clock: for the device times.
        origin_ns: the run's start on the host's clock.
    """

    def __init__(self, train: int, table: ParameterTable, config: Config, clock: Clock, origin_ns: int) -> None:
        self._train = train
        self._origin_ns = origin_ns
        self._table = table
        self._config = config
        self._clock = clock
        self._wanted = table.selected(config.tensors)
        self._ids = None if len(self._wanted) == len(table.names) else self._wanted
        self._model_keys = [id(parameter) for parameter in table.parameters]

    def records_of(self, draft: StepDraft) -> Iterator[Record]:
        """Return a finished step's lines: modules and tensors first, the step itself last (a step on disk is whole)."""
        for call in draft.calls:
            record = call.record(self._train, draft.index, draft.start.host_ns, self._clock)
            if record is not None:
                yield record
        yield from (output.record(self._train, draft.index) for output in draft.outputs)
        if self._wanted and draft.updates.all and draft.index in self._config.steps:
            yield from self._gradient_records(draft)
        yield self.step_record(draft)

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

    def _gradient_records(self, draft: StepDraft) -> Iterator[Record]:
        """Return what is recorded of the selected gradients.

        At level `norm` that is one compact record, with a full one for each gradient that is not finite or was not measured; at level
        `full` one for each parameter that is trained.
        """
        found = _moments_by_parameter(draft.updates.all)
        if not found:
            return
        if self._config.level == "full":
            for number in self._wanted:
                moment = found.get(self._model_keys[number])
                if moment is not None or self._table.parameters[number].requires_grad:
                    yield self._gradient_record(draft.index, number, moment)
            return
        values = [self._value(number, found) for number in self._wanted]
        point = next(iter(found.values())).point
        yield NormsRecord(train=self._train, step=draft.index, role="param.grad", point=point, ids=self._ids, l2=values)
        for number, value in zip(self._wanted, values, strict=True):
            moment = found.get(self._model_keys[number])
            if moment is not None and (value is None or not math.isfinite(value)):
                yield self._gradient_record(draft.index, number, moment)

    def _value(self, number: int, found: dict[int, Moment]) -> float | None:
        moment = found.get(self._model_keys[number])
        return None if moment is None else moment.l2.values.get(self._model_keys[number])

    def _gradient_record(self, step: int, number: int, moment: Moment | None) -> TensorRecord:
        parameter = self._table.parameters[number]
        record = TensorRecord(
            train=self._train,
            step=step,
            role="param.grad",
            name=self._table.names[number][0],
            point=None if moment is None else moment.point,
            shape=shape_of(parameter),
            dtype=dtype_name(parameter.dtype),
            device=str(parameter.device),
            numel=parameter.numel(),
        )
        if moment is None:
            record.skipped = NO_GRADIENT
        else:
            _fill_gradient(record, self._model_keys[number], moment)
        return record


def _moments_by_parameter(updates: Sequence[PendingUpdate]) -> dict[int, Moment]:
    """Return when each gradient was measured: for its own optimizer's update; where no updating optimizer owns it, for the step's first."""
    moments = [(update.moment(), update.keys) for update in updates]
    found: dict[int, Moment] = {}
    for moment, _ in reversed(moments):
        if moment is not None:
            found.update(dict.fromkeys(moment.l2.keys, moment))
    for moment, owned in moments:
        if moment is not None:
            found.update(dict.fromkeys(moment.l2.keys & owned, moment))
    return found


def _fill_gradient(record: TensorRecord, key: int, moment: Moment) -> None:
    """Write what was measured of a gradient into its record, without the loss scale that it may have held."""
    counts = moment.l2.counts.get(key)
    if key in moment.full:
        fill(record, moment.full[key].values(), moment.l2.scale_of(key))
    elif counts is not None:
        record.nan, record.posinf, record.neginf = counts.nan, counts.posinf, counts.neginf
        record.l2 = moment.l2.unscaled(key, counts.finite_l2)
    else:
        record.skipped = moment.l2.skipped.get(key, UNCOUNTED)
