"""One tensor measured: what it is, where its values will be, and how they fill a record.

`measure` reduces a tensor where it lives, at the moment of the call; the tensor itself is not kept. The values are valid once the step's
readback is ready. Module values, batches, losses and optimizer states all go through here; gradients, which are many at once, through
`capture.gradients`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from msprobe.capture import kernel, reduce
from msprobe.capture.parameters import dtype_name
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.reduce import Norms
from msprobe.capture.statistics import COLUMNS, fill, statistics, why_no_statistics
from msprobe.schema import TensorRecord

UNCOUNTED = "not finite; the counts would have needed a wait for the device"


class Measured:
    """What was measured of one tensor.

    Attributes:
        shape, dtype, device: of the tensor; a sparse one's values are its coalesced ones.
        skipped: why there are no values.
    """

    __slots__ = ("_norms", "_statistics", "device", "dtype", "shape", "skipped")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.skipped: str | None = None
        self._norms: Norms | None = None
        self._statistics: Slot | None = None

    def take_norm(self, tensor: torch.Tensor, readback: Readback) -> None:
        """Reduce the tensor to its l2, with counts on CPU."""
        self.skipped = reduce.why_not_measurable(tensor)
        if self.skipped is None:
            self._norms = reduce.put_norms([reduce.as_dense_real(tensor)], readback)

    def take_statistics(self, tensor: torch.Tensor, readback: Readback) -> None:
        """Reduce the tensor to all its statistics."""
        self.skipped = why_no_statistics(tensor)
        if self.skipped is None:
            self._statistics = put_statistics(tensor, readback)

    def is_finite(self) -> bool | None:
        """Tell whether every element is finite (integers are), or None where that was not measured."""
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return True
        if self._statistics is not None:
            return not any(self._statistics.values()[:3])
        return None if self._norms is None else math.isfinite(self._norms.values()[0])

    def fill(self, record: TensorRecord) -> None:
        """Write what the tensor is and what was measured into its record."""
        record.shape, record.dtype, record.device = list(self.shape), dtype_name(self.dtype), _device_name(self.device)
        record.numel = math.prod(self.shape)
        record.skipped = self.skipped
        if self._statistics is not None:
            fill(record, self._statistics.values())
        elif self._norms is not None:
            fill_norm(record, self._norms, 0)


def fill_norm(record: TensorRecord, norms: Norms, index: int) -> None:
    """Write one tensor's l2 into its record; where it is not finite, the counts and the l2 of the finite elements."""
    value, counts = norms.values()[index], norms.counts(index)
    if math.isfinite(value):
        record.l2 = value
    elif counts is None:
        record.skipped = UNCOUNTED
    else:
        record.nan, record.posinf, record.neginf, record.l2 = counts.nan, counts.posinf, counts.neginf, counts.finite_l2


@functools.lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


def measure(tensor: torch.Tensor, full: bool, readback: Readback) -> Measured:
    """Measure a tensor now: all statistics, or the l2."""
    measured = Measured(tensor)
    if full:
        measured.take_statistics(tensor, readback)
    else:
        measured.take_norm(tensor, readback)
    return measured


def put_statistics(tensor: torch.Tensor, readback: Readback) -> Slot:
    """Reduce a tensor that has statistics to `COLUMNS`, natively where that can be."""
    if not kernel.takes(tensor):
        return readback.put(statistics(tensor))
    slot, address = readback.reserve(len(COLUMNS))
    kernel.statistics_of_one(tensor, address)
    return slot


def put_many_statistics(tensors: Sequence[torch.Tensor], readback: Readback) -> list[Slot]:
    """Reduce many tensors that have statistics, in one native call where that can be."""
    if not tensors or not all(kernel.takes(tensor) for tensor in tensors):
        return [put_statistics(tensor, readback) for tensor in tensors]
    slot, address = readback.reserve(len(tensors) * len(COLUMNS))
    kernel.statistics(tensors, address)
    return slot.split(len(COLUMNS))
