"""Tensor records out of a stream of records: those that were written, and those that a `norms` record stands for.

`trace.reader` makes one `TensorStream` per file and pass. It knows the parameters from the `model` records that it saw, and holds no
more than one step's non-finite tensors. It never invents a statistic: a parameter from a `norms` record has a name, a shape, a dtype
and an l2, and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import translate

from msprobe.schema import NO_GRADIENT, AnyRecord, GradientPoint, ModelRecord, NormsRecord, ParameterInfo, TensorRecord
from msprobe.steps import StepSelection

FROZEN = "frozen: requires_grad is false"

_Key = tuple[int, int, str, "GradientPoint | None", str]


class TensorStream:
    """Picks the tensors of a role, a name pattern and some steps out of records that are fed to it in file order.

    A parameter whose l2 is not finite, or of which the whole tensor is kept, has a record of its own besides its place in `norms`; only
    that is handed out. It stands before the `norms`; where it comes after, as earlier releases wrote it, that is seen as well.
    """

    def __init__(self, role: str | None, name: str | None, steps: StepSelection | None) -> None:
        self._role = role
        self._name = None if name is None else re.compile(translate(name))
        self._steps = steps
        self._parameters: dict[int, list[ParameterInfo]] = {}
        self._at: tuple[int, int] | None = None
        self._full: set[_Key] = set()
        self._held: dict[_Key, TensorRecord] = {}

    def feed(self, record: AnyRecord) -> Iterator[TensorRecord]:
        """Yield the wanted tensors that a record brings."""
        if isinstance(record, ModelRecord):
            self._parameters[record.train] = record.parameters
        elif isinstance(record, (TensorRecord, NormsRecord)) and self._wants(record):
            if self._at != (record.train, record.step):
                yield from self.flush()
                self._at = (record.train, record.step)
            if isinstance(record, TensorRecord):
                yield from self._full_record(record)
            else:
                yield from self._expanded(record)

    def flush(self) -> Iterator[TensorRecord]:
        """Yield the non-finite tensors of the step for which no full record came, and forget the step."""
        yield from self._held.values()
        self._held.clear()
        self._full.clear()

    def _wants(self, record: TensorRecord | NormsRecord) -> bool:
        if self._role is not None and record.role != self._role:
            return False
        return self._steps is None or record.step in self._steps

    def _wants_name(self, name: str) -> bool:
        return self._name is None or self._name.match(name) is not None

    def _full_record(self, record: TensorRecord) -> Iterator[TensorRecord]:
        if self._wants_name(record.name):
            key = _key(record)
            if record.nan or record.posinf or record.neginf or record.file is not None:
                self._full.add(key)
            self._held.pop(key, None)
            yield record

    def _expanded(self, record: NormsRecord) -> Iterator[TensorRecord]:
        for parameter, l2 in zip(self._parameters_of(record), record.l2, strict=False):
            if parameter is None or not self._wants_name(parameter.name):
                continue
            tensor = _tensor_of(record, parameter, l2)
            if _key(tensor) in self._full:
                continue
            if l2 is None or math.isfinite(l2):
                yield tensor
            else:
                self._held[_key(tensor)] = tensor

    def _parameters_of(self, record: NormsRecord) -> list[ParameterInfo] | list[ParameterInfo | None]:
        parameters = self._parameters.get(record.train, [])
        if record.ids is None:
            return parameters
        by_id = {parameter.id: parameter for parameter in parameters}
        return [by_id.get(identity) for identity in record.ids]


def _key(record: TensorRecord) -> _Key:
    return record.train, record.step, record.role, record.point, record.name


def _tensor_of(record: NormsRecord, parameter: ParameterInfo, l2: float | None) -> TensorRecord:
    skipped = None
    if l2 is None and record.role == "param.grad":
        skipped = NO_GRADIENT if parameter.requires_grad else FROZEN
    return TensorRecord(
        train=record.train,
        step=record.step,
        role=record.role,
        name=parameter.name,
        point=record.point,
        shape=parameter.shape,
        dtype=parameter.dtype,
        numel=math.prod(parameter.shape),
        l2=l2,
        skipped=skipped,
    )
