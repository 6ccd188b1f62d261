"""Tensors that belong to parameters, measured many at once: weights, what an optimizer changed, what it keeps.

A reading is taken when the session says so and becomes records when its values have arrived: one compact `norms` record at level `norm`,
one `tensor` record each at level `full`. Gradients have their own measurement (`capture.gradients`), since totals are composed from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from msprobe.capture import reduce
from msprobe.capture.measured import fill_norm, put_many_statistics
from msprobe.capture.parameters import ParameterTable, dtype_name, shape_of
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.reduce import Norms
from msprobe.capture.statistics import fill, why_no_statistics
from msprobe.schema import NormsRecord, TensorRecord


class Reading:
    """One role of some parameters at one moment.

    Args:
        role: `param`, `param.update` or `optim.<state>`.
        found: the parameters' numbers with the tensors to measure; they are not kept.
        full: all statistics, or the l2.
        readback: the step's results.
    """

    def __init__(self, role: str, found: Sequence[tuple[int, torch.Tensor]], full: bool, readback: Readback) -> None:
        self.role = role
        self.dumps: dict[int, str] = {}
        self._full = full
        self._described = {number: _describe(tensor) for number, tensor in found}
        self._skipped: dict[int, str] = {}
        self._statistics: dict[int, Slot] = {}
        self._norms: list[tuple[list[int], Norms]] = []
        why_not = why_no_statistics if full else reduce.why_not_measurable
        measurable: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in found:
            reason = why_not(tensor)
            if reason is not None:
                self._skipped[number] = reason
            else:
                measurable.setdefault(tensor.device, []).append((number, tensor))
        for pairs in measurable.values():
            self._measure([number for number, _ in pairs], [tensor for _, tensor in pairs], readback)

    def _measure(self, numbers: list[int], tensors: list[torch.Tensor], readback: Readback) -> None:
        if self._full:
            self._statistics.update(zip(numbers, put_many_statistics(tensors, readback), strict=True))
        else:
            dense = [reduce.as_dense_real(tensor) for tensor in tensors]
            self._norms.append((numbers, reduce.put_norms(dense, readback)))

    def norm_values(self) -> dict[int, float]:
        """Return the l2 of each parameter that was measured, by number; NaN or infinite at level `norm` where an element is."""
        l2 = {number: slot.values()[_L2] for number, slot in self._statistics.items()}
        for numbers, norms in self._norms:
            l2.update(zip(numbers, norms.values(), strict=True))
        return l2

    def records(self, train: int, step: int, table: ParameterTable, file: str | None) -> Iterator[TensorRecord | NormsRecord]:
        """Yield the records; the values have arrived."""
        values = self.norm_values()
        for number in self._described:
            if self._full or number in self.dumps or number in self._skipped or not math.isfinite(values[number]):
                yield self._record(train, step, number, table, file)
        if not self._full:
            numbers = list(self._described)
            ids = None if len(numbers) == len(table.names) else numbers
            l2 = [values.get(number) for number in numbers]
            yield NormsRecord(train=train, step=step, role=self.role, point=None, ids=ids, l2=l2)

    def _record(self, train: int, step: int, number: int, table: ParameterTable, file: str | None) -> TensorRecord:
        shape, dtype, device = self._described[number]
        record = TensorRecord(
            train=train,
            step=step,
            role=self.role,
            name=table.names[number][0],
            shape=shape,
            dtype=dtype,
            device=device,
            numel=math.prod(shape),
            skipped=self._skipped.get(number),
        )
        if number in self._statistics:
            fill(record, self._statistics[number].values())
        for numbers, norms in self._norms:
            if number in numbers:
                fill_norm(record, norms, numbers.index(number))
        if number in self.dumps:
            record.file, record.key = file, self.dumps[number]
        return record


_L2 = 8


def _describe(tensor: torch.Tensor) -> tuple[list[int], str, str]:
    return shape_of(tensor), dtype_name(tensor.dtype), str(tensor.device)
