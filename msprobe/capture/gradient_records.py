"""The records of single gradients: what was measured at a step's updates, by parameter.

`capture.step` asks once per selected step. At level `norm` that is one compact record, with a full one for each gradient that is not
finite or was not measured; at level `full` one for each parameter that is trained, at each point where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msprobe.capture.measured import UNCOUNTED
from msprobe.capture.parameters import ParameterTable, dtype_name, shape_of
from msprobe.capture.statistics import fill
from msprobe.capture.updates import Moment, PendingUpdate, StepUpdates
from msprobe.schema import NO_GRADIENT, NormsRecord, Record, TensorRecord


class GradientRecords:
    """Makes the records of the selected gradients of one `train()`.

    Args:
        train: the number of the `train()` call.
        table: the model's parameters.
        wanted: the numbers of the selected ones.
    """

    def __init__(self, train: int, table: ParameterTable, wanted: Sequence[int]) -> None:
        self._train = train
        self._table = table
        self._wanted = wanted
        self._ids = None if len(wanted) == len(table.names) else list(wanted)

    def records(self, step: int, updates: StepUpdates, full: bool, file: str | None) -> Iterator[Record]:
        """Yield the records of one step; the values have arrived."""
        found = _by_parameter(updates.all, PendingUpdate.moment)
        if not found or not self._wanted:
            return
        if not full:
            yield from self._compact(step, found, file)
            return
        for moment in updates.scaled:
            yield from self._each(step, dict.fromkeys(moment.full, moment), file, is_first=False)
        yield from self._each(step, found, file, is_first=True)
        yield from self._each(step, _by_parameter(updates.all, PendingUpdate.moment_after), file, is_first=False)

    def _compact(self, step: int, found: dict[int, Moment], file: str | None) -> Iterator[Record]:
        values = [self._value(number, found) for number in self._wanted]
        point = next(iter(found.values())).point
        for number, value in zip(self._wanted, values, strict=True):
            moment = found.get(self._key(number))
            if moment is not None and (value is None or not math.isfinite(value) or self._key(number) in moment.dumps):
                yield self._record(step, number, moment, file)
        yield NormsRecord(train=self._train, step=step, role="param.grad", point=point, ids=self._ids, l2=values)

    def _each(self, step: int, found: dict[int, Moment], file: str | None, is_first: bool) -> Iterator[Record]:
        """Yield one record for each gradient; at the first point also for each trained parameter that has none."""
        for number in self._wanted:
            moment = found.get(self._key(number))
            if moment is not None or (is_first and self._table.parameters[number].requires_grad):
                yield self._record(step, number, moment, file)

    def _key(self, number: int) -> int:
        return id(self._table.parameters[number])

    def _value(self, number: int, found: dict[int, Moment]) -> float | None:
        moment = found.get(self._key(number))
        return None if moment is None else moment.l2.values.get(self._key(number))

    def _record(self, step: int, number: int, moment: Moment | None, file: str | None) -> TensorRecord:
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
            _fill(record, self._key(number), moment, file)
        return record


def _by_parameter(updates: Sequence[PendingUpdate], moment_of: Callable[[PendingUpdate], Moment | None]) -> dict[int, Moment]:
    """Return when each gradient was measured: for its own optimizer's update; where no updating optimizer owns it, for the step's first."""
    moments = [(moment_of(update), update.keys) for update in updates]
    found: dict[int, Moment] = {}
    for moment, _ in reversed(moments):
        if moment is not None:
            found.update(dict.fromkeys(moment.l2.keys, moment))
    for moment, owned in moments:
        if moment is not None:
            found.update(dict.fromkeys(moment.l2.keys & owned, moment))
    return found


def _fill(record: TensorRecord, key: int, moment: Moment, file: str | None) -> None:
    """Write what was measured of a gradient into its record, without the loss scale that it may have held."""
    value, counts = moment.l2.values.get(key), moment.l2.counts(key)
    if key in moment.full:
        fill(record, moment.full[key].values(), moment.scale_of(key))
    elif value is not None and math.isfinite(value):
        record.l2 = value
    elif counts is not None:
        record.nan, record.posinf, record.neginf = counts.nan, counts.posinf, counts.neginf
        record.l2 = moment.l2.unscaled(key, counts.finite_l2)
    else:
        record.skipped = moment.l2.skipped.get(key, UNCOUNTED)
    if key in moment.dumps:
        record.file, record.key = file, moment.dumps[key]
