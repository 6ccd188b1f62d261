"""How much: the norms of many tensors at once, exact to 1e-6 relative to float64, and counts where a norm is not finite.

`capture.gradients` calls this with all of a model's gradients, `capture.measured` with single tensors; nothing here knows steps, names or
records, and nothing here reads a value from an accelerator.

On CPU the native reductions (`capture.kernel`) take one pass in double. Where they are missing, or the order is not 2, torch does it: a
float32 norm over a whole tensor drifts (1e-5 at 10^6 elements, 1e-2 at 10^8: each vector lane adds thousands of squares), and float64
throughout costs three times as much where bandwidth counts. So tensors of at most `LONG` elements, most of a model, are reduced in
float64 by one foreach call; a longer one in float32 over rows of `ROW` elements, which are combined in float64 (the worst case, all
elements equal, stays below 7e-7), and again in float64 if that overflowed or underflowed. On an accelerator the accumulation is float64
where the device has it, in one foreach call, and nothing is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from msprobe.capture import kernel
from msprobe.capture.readback import Readback, Slot, accumulation_dtype, is_host

ROW = 1024
LONG = 32_768
# Outside this range a float32 sum of squares has lost digits to overflow or underflow.
_TRUSTED = (1e-15, 1e18)
# The norm, the l2 of the finite elements, and the counts of NaN, +inf and -inf: a row of the native norms.
_COUNTED = 5
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_MEASURED = (*_NARROW, torch.float64, torch.complex32, torch.complex64, torch.complex128)


# Before torch 2.1 the question has no such name, and no such tensors reach a hook.
_is_functorch_wrapped: Callable[[torch.Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)


def why_not_readable(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor are not to be had here, or None if they are."""
    if tensor.is_meta:
        return "meta tensor: it has no data"
    if type(tensor).__name__ == "DTensor":
        return "DTensor: only a shard is here"
    if _is_functorch_wrapped(tensor):
        return "inside a torch.func transform: its elements are not to be had"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"layout {tensor.layout} is not measured"
    return None


def why_not_measurable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no norm here, or None if it has one."""
    reason = why_not_readable(tensor)
    if reason is None and tensor.dtype not in _MEASURED:
        return f"dtype {tensor.dtype} has no norm"
    return reason


def as_dense_real(tensor: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return what stands for a measurable tensor in a norm of that order: dense, real, with the same norm.

    Of a sparse tensor these are the coalesced values, of a complex one its parts, or its magnitudes where the order is not 2. The given
    tensor is not changed (`coalesce` returns a new one where it has work to do).
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_sparse:
        plain = plain.coalesce().values()
    if not plain.is_complex():
        return plain
    return torch.view_as_real(plain.resolve_conj()) if order == 2.0 else plain.abs()


class Norms:
    """The norms of many tensors of one device and, on CPU, what was counted; valid once the step's readback is ready."""

    __slots__ = ("_slot", "_width")

    def __init__(self, slot: Slot, width: int) -> None:
        self._slot = slot
        self._width = width

    def values(self) -> list[float]:
        """Return the norm of each tensor; NaN or infinite where an element is."""
        return self._slot.values()[:: self._width]

    def counts(self, index: int) -> Counts | None:
        """Return what was counted in the tensor of that index, or None where nothing was (on an accelerator)."""
        if self._width == 1:
            return None
        _, finite_l2, nan, posinf, neginf = self._slot.values()[index * self._width : (index + 1) * self._width]
        return Counts(int(nan), int(posinf), int(neginf), finite_l2)


def put_norms(tensors: Sequence[torch.Tensor], readback: Readback, order: float = 2.0) -> Norms:
    """Measure the norm of each tensor now, for reading when the step is over.

    Args:
        tensors: dense real floating-point tensors (see `as_dense_real`) of one device.
        readback: the step's results.
        order: any vector norm's order, `math.inf` included.
    """
    if order == 2.0 and tensors and all(kernel.takes(tensor) for tensor in tensors):
        slot, address = readback.reserve(len(tensors) * _COUNTED)
        kernel.norms(tensors, address)
        return Norms(slot, _COUNTED)
    found = norms(tensors, order)
    if not is_host(found.device):
        return Norms(readback.put(found), 1)
    return Norms(readback.put(torch.stack([found, *_counted(tensors, found)], dim=1)), _COUNTED)


def _counted(tensors: Sequence[torch.Tensor], norms: torch.Tensor) -> list[torch.Tensor]:
    """Return the l2 of the finite elements and the counts of the others as columns; looks at values, which on CPU waits for nothing."""
    columns = [norms.clone(), *(torch.zeros_like(norms) for _ in range(3))]
    for index in torch.nonzero(~torch.isfinite(norms)).flatten().tolist():
        counts = count_nonfinite(tensors[index])
        for column, value in zip(columns, (counts.finite_l2, counts.nan, counts.posinf, counts.neginf), strict=True):
            column[index] = value
    return columns


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the vector norm of each tensor, reduced by torch.

    Args:
        tensors: dense real floating-point tensors (see `as_dense_real`) of one device; empty ones have norm 0.
        order: any vector norm's order, `math.inf` included.

    Returns:
        shape `(len(tensors),)`, float64 (float32 where the device has no float64), on the tensors' device.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    if tensors[0].device.type == "cpu":
        return _norms_on_cpu(tensors, order)
    return _norms_on_device(tensors, order)


def _norms_on_cpu(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    result = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
    short: list[int] = []
    long: list[int] = []
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            result[index] = 0.0
        elif order == math.inf:
            short.append(index)
        elif order != 2.0 or tensor.dtype not in _NARROW:
            result[index] = _norm_in_float64(tensor, order)
        else:
            (long if tensor.numel() > LONG else short).append(index)
    if short:
        result[short] = torch.stack(_foreach_norms([tensors[index] for index in short], order, torch.float64))
    if long:
        result[long] = _l2_of_long([tensors[index] for index in long])
    return result


def _foreach_norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Reduce many tensors in one call, accumulating in `dtype`; torch before 2.4 has no such argument and takes them one by one.

    The largest magnitude is exact in any dtype.
    """
    if order == math.inf:
        return [found.to(dtype) for found in torch._foreach_norm(tensors, order)]
    try:
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    except TypeError:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _l2_of_long(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the l2 of narrow tensors by rows; what float32 could not hold is reduced again in float64.

    Looks at the values, which on CPU waits for nothing.
    """
    result = torch.stack([_l2_by_rows(tensor) for tensor in tensors])
    low, high = _TRUSTED
    for index, value in enumerate(result.tolist()):
        if not low < value < high:
            result[index] = _norm_in_float64(tensors[index], 2.0)
    return result


def _l2_by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the l2 of a narrow tensor: float32 within rows of `ROW` elements, float64 across them."""
    flat = _flat(tensor)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64)
    return torch.sqrt(torch.dot(rows, rows) + rest.square())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one dimension, without a copy where the memory is dense in any order (channels_last, transposed)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if kernel.is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


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
        found = _foreach_norms(members, order, accumulate)
        result[torch.tensor(group, device="cpu").to(result.device, non_blocking=True)] = torch.stack(found)
    return result


def _by_dtype(tensors: Sequence[torch.Tensor], indexes: list[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index in indexes:
        groups.setdefault(tensors[index].dtype, []).append(index)
    return list(groups.values())


def compose(parts: Sequence[float], order: float) -> float:
    """Return the norm of a whole from the norms of its parts, as `get_total_norm` does, in float64.

    NaN in any part makes the whole NaN; the whole of nothing is 0.
    """
    largest = math.nan if any(math.isnan(part) for part in parts) else max(parts, default=0.0)
    if order == math.inf or largest == 0.0 or not math.isfinite(largest):
        return largest if order > 0 else _norm_in_float64(torch.tensor(parts, dtype=torch.float64, device="cpu"), order)
    if order == 2.0:
        return largest * math.sqrt(math.fsum((part / largest) ** 2 for part in parts))
    return _norm_in_float64(torch.tensor(parts, dtype=torch.float64, device="cpu"), order)


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
