"""Everything that is said of one tensor at level `full`: counts of special values, and the distribution of the finite ones.

One function from a tensor to a small vector on the tensor's own device; the native one (`capture.kernel`) stands beside it for host memory.
Nothing is read back here. Accumulation is float64 (float32 where the device has none); the deviation is taken around the mean in a
second pass, so it does not cancel. Large tensors go through in pieces of `PIECE` elements, which bounds the memory that is used besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from msprobe.capture.readback import accumulation_dtype
from msprobe.capture.reduce import why_not_readable
from msprobe.schema import TensorRecord

PIECE = 1 << 20
_COUNTS = ("nan", "posinf", "neginf", "zeros")
_VALUES = ("min", "max", "mean", "std", "l2", "absmax")
COLUMNS = (*_COUNTS, *_VALUES)


def why_no_statistics(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no statistics here, or None if it has: integers and bools have them, complex numbers do not."""
    reason = why_not_readable(tensor)
    if reason is None and (tensor.is_complex() or tensor.is_quantized):
        return f"dtype {tensor.dtype} is not measured"
    return reason


def statistics(tensor: torch.Tensor) -> torch.Tensor:
    """Return the statistics of a measurable tensor.

    Args:
        tensor: any shape, any real dtype; a sparse one counts by its coalesced values.

    Returns:
        shape `(len(COLUMNS),)` in the order of `COLUMNS`, on the tensor's device: the four counts over all elements; minimum, maximum,
        mean, population standard deviation, l2 and largest magnitude over the finite ones, NaN where there are none.
    """
    plain = tensor.detach()
    flat = (plain.coalesce().values() if plain.is_sparse else plain).reshape(-1)
    if flat.numel() == 0:
        return torch.tensor([0.0] * len(_COUNTS) + [math.nan] * len(_VALUES), dtype=accumulation_dtype(flat.device), device=flat.device)
    first = [_first_pass(piece) for piece in _pieces(flat)]
    counts, count, total = (torch.stack(parts).sum(0) for parts in list(zip(*first, strict=True))[:3])
    low, high = torch.stack([part[3] for part in first]).amin(), torch.stack([part[4] for part in first]).amax()
    mean = total / count
    absmax = torch.maximum(low.abs(), high.abs())
    scale = torch.where(absmax > 0, absmax, torch.ones_like(absmax))
    second = torch.stack([_second_pass(piece, mean, scale) for piece in _pieces(flat)]).sum(0)
    std, l2 = scale * (second[0] / count).sqrt(), scale * second[1].sqrt()
    values = torch.stack([low, high, mean, std, l2, absmax])
    return torch.cat([counts, torch.where(count > 0, values, torch.full_like(values, math.nan))])


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in pieces, in the accumulation's dtype."""
    dtype = accumulation_dtype(flat.device)
    for piece in torch.split(flat, PIECE):
        yield piece.to(dtype)


def _first_pass(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counts of special values, the number of finite ones, and their sum, minimum and maximum."""
    finite = torch.isfinite(piece)
    special = [torch.isnan(piece), torch.isposinf(piece), torch.isneginf(piece), piece == 0]
    counts = torch.stack([mask.sum() for mask in special]).to(piece.dtype)
    low = torch.where(finite, piece, math.inf).amin()
    high = torch.where(finite, piece, -math.inf).amax()
    return counts, finite.sum().to(piece.dtype), torch.where(finite, piece, 0.0).sum(), low, high


def _second_pass(piece: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares around the mean and around zero, of the finite elements in units of `scale`."""
    finite = torch.isfinite(piece)
    around_mean = torch.where(finite, (piece - mean) / scale, 0.0)
    around_zero = torch.where(finite, piece / scale, 0.0)
    return torch.stack([around_mean.square().sum(), around_zero.square().sum()])


def fill(record: TensorRecord, values: Sequence[float], scale: float = 1.0) -> None:
    """Write statistics that have arrived into a record; what there is none of stays null.

    Args:
        record: what to fill.
        values: in the order of `COLUMNS`.
        scale: a factor that the tensor held (a loss scale); the values are given without it.
    """
    for name, value in zip(_COUNTS, values, strict=False):
        setattr(record, name, int(value))
    for name, value in zip(_VALUES, values[len(_COUNTS) :], strict=True):
        setattr(record, name, None if math.isnan(value) or not scale else value / scale)
