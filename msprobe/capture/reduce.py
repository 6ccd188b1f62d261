"""How much: the norms of many tensors at once, exact to 1e-6 relative to float64, and counts where a norm is not finite.

Gradient measurement (`capture.gradients`) calls this with all of a model's gradients; nothing here knows steps, names or records, and
nothing here reads a value from an accelerator.

How a norm stays both cheap and exact. A float32 norm over a whole tensor drifts (1e-5 at 10^6 elements, 1e-2 at 10^8: each vector lane
adds thousands of squares), and float64 throughout costs three times as much. So on CPU a tensor is reduced in float32 over rows of
`ROW` elements, and the rows are combined in float64; the worst case, all elements equal, stays below 5e-7. Tensors of at most a row
take part in one foreach call for the whole model. A total that overflowed, underflowed or is not a number is reduced again in float64,
scaled by its largest element. On an accelerator the accumulation is float64 where the device has it, in one foreach call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

ROW = 1024
# Outside this range a float32 sum of squares has lost digits to overflow or underflow.
_TRUSTED = (1e-15, 1e18)
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_MEASURED = (*_NARROW, torch.float64, torch.complex32, torch.complex64, torch.complex128)


def why_not_measurable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no norm here, or None if it has one."""
    if tensor.is_meta:
        return "meta tensor: it has no data"
    if type(tensor).__name__ == "DTensor":
        return "DTensor: only a shard is here"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"layout {tensor.layout} is not measured"
    if tensor.dtype not in _MEASURED:
        return f"dtype {tensor.dtype} has no norm"
    return None


def as_dense_real(tensor: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return what stands for a measurable tensor in a norm of that order: dense, real, with the same norm.

    Of a sparse tensor these are the coalesced values, of a complex one its parts, or its magnitudes where the order is not 2. The given
    tensor is not changed (`coalesce` returns a new one where it has work to do).
    """
    plain = tensor.detach()
    if plain.is_sparse:
        plain = plain.coalesce().values()
    if not plain.is_complex():
        return plain
    return torch.view_as_real(plain.resolve_conj()) if order == 2.0 else plain.abs()


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the vector norm of each tensor.

    Args:
        tensors: dense real floating-point tensors (see `as_dense_real`) of one device; empty ones have norm 0.
        order: any vector norm's order, `math.inf` included.

    Returns:
        shape `(len(tensors),)`, float64 (float32 where the device has no float64), on the tensors' device.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    if tensors[0].device.type == "cpu":
        return _norms_on_cpu(tensors, order)
    return _norms_on_device(tensors, order)


def _norms_on_cpu(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    quick = [index for index, tensor in enumerate(tensors) if order == 2.0 and tensor.dtype in _NARROW and tensor.numel()]
    if len(quick) == len(tensors):
        return _mend(_l2_by_rows(tensors), tensors)
    result = torch.empty(len(tensors), dtype=torch.float64)
    if quick:
        members = [tensors[index] for index in quick]
        result[quick] = _mend(_l2_by_rows(members), members)
    for index in set(range(len(tensors))).difference(quick):
        result[index] = _norm_in_float64(tensors[index], order)
    return result


def _l2_by_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the l2 of non-empty narrow tensors: float32 within rows of `ROW` elements, float64 across them."""
    rows: list[torch.Tensor] = []
    short: list[torch.Tensor] = []
    for tensor in tensors:
        whole = tensor.numel() // ROW * ROW
        if not whole:
            short.append(tensor)
            continue
        flat = _flat(tensor)
        rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32))
        if whole < flat.numel():
            short.append(flat[whole:])
    if short:
        rows.append(torch.stack(torch._foreach_norm(short, 2, dtype=torch.float32)))
    squares = torch.cat(rows).double().square_()
    owners = _owners(tuple(tensor.numel() for tensor in tensors))
    return torch.zeros(len(tensors), dtype=torch.float64).index_add_(0, owners, squares).sqrt_()


@functools.lru_cache(maxsize=16)
def _owners(sizes: tuple[int, ...]) -> torch.Tensor:
    """Return, for each norm that `_l2_by_rows` takes, the index of its tensor: whole rows first, then the short pieces."""
    whole = [index for index, size in enumerate(sizes) for _ in range(size // ROW)]
    short = [index for index, size in enumerate(sizes) if size % ROW]
    return torch.tensor(whole + short)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one dimension, without a copy where the memory is dense in any order (channels_last, transposed)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _mend(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce again in float64 what float32 could not hold. Reads values, which on CPU waits for nothing."""
    low, high = _TRUSTED
    for index, value in enumerate(result.tolist()):
        if not low < value < high:
            result[index] = _norm_in_float64(tensors[index], 2.0)
    return result


def _norm_in_float64(tensor: torch.Tensor, order: float) -> float:
    """Return a CPU tensor's norm in float64, scaled by its largest element so that no power overflows or vanishes."""
    if tensor.numel() == 0:
        return 0.0
    largest = float(torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float64))
    if order == math.inf or largest == 0.0 or not math.isfinite(largest):
        return largest
    if 1e-100 < largest < 1e100 or order == 0.0:
        return float(torch.linalg.vector_norm(tensor, order, dtype=torch.float64))
    return largest * float(torch.linalg.vector_norm(tensor.double() / largest, order))


def _norms_on_device(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    accumulate = accumulation_dtype(tensors[0].device)
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    result = torch.zeros(len(tensors), dtype=accumulate, device=tensors[0].device)
    for group in _by_dtype(tensors, filled):
        members = [tensors[index] for index in group]
        found = torch._foreach_norm(members, order, dtype=accumulate)
        result[torch.tensor(group).to(result.device, non_blocking=True)] = torch.stack(found)
    return result


def _by_dtype(tensors: Sequence[torch.Tensor], indexes: list[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index in indexes:
        groups.setdefault(tensors[index].dtype, []).append(index)
    return list(groups.values())


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which a device accumulates: float64, but for Apple's."""
    return torch.float32 if device.type == "mps" else torch.float64


def compose(parts: Sequence[float], order: float) -> float:
    """Return the norm of a whole from the norms of its parts, as `get_total_norm` does, in float64.

    NaN in any part makes the whole NaN; the whole of nothing is 0.
    """
    return _norm_in_float64(torch.tensor(parts, dtype=torch.float64), order)


class Counts:
    """How many elements of a tensor are not finite, and the l2 of those that are."""

    __slots__ = ("finite_l2", "nan", "neginf", "posinf")

    def __init__(self, nan: int, posinf: int, neginf: int, finite_l2: float) -> None:
        self.nan = nan
        self.posinf = posinf
        self.neginf = neginf
        self.finite_l2 = finite_l2


def count_nonfinite(tensor: torch.Tensor) -> Counts:
    """Count the non-finite elements of a dense real CPU tensor (reading the counts of a device tensor would wait for it)."""
    finite = torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)
    return Counts(
        nan=int(torch.isnan(tensor).sum()),
        posinf=int(torch.isposinf(tensor).sum()),
        neginf=int(torch.isneginf(tensor).sum()),
        finite_l2=_norm_in_float64(finite, 2.0),
    )
