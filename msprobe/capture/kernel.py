"""The native reductions for tensors in host memory: one pass where torch needs five, found if installing msprobe could compile them.

`capture.reduce` and `capture.statistics` ask `takes` and then have the library write its rows straight into the step's results; where
there is no library (no compiler when msprobe was installed, `MSPROBE_KERNEL=0`) they do the same with torch, more slowly. Nothing here
looks at a value, and no pointer outlives its call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import Parameter

_VERSION = 1
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_PLAIN_CLASSES = (torch.Tensor, Parameter)
LIBRARY = Path(__file__).parent / "native" / "libmsprobe_reduce.so"


def _load() -> Any:
    """Return the library, or None where there is none, it cannot be loaded, or it belongs to another version of this package."""
    if os.environ.get("MSPROBE_KERNEL") == "0" or not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version = library.msprobe_kernel_version()
    except (OSError, AttributeError):
        return None
    if version != _VERSION:
        return None
    for function in (library.msprobe_statistics_of_one, library.msprobe_norms_of_one):
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
        function.restype = None
    for function in (library.msprobe_statistics, library.msprobe_norms):
        function.argtypes = (ctypes.c_size_t, *[ctypes.c_void_p] * 4)
        function.restype = None
    return library


_library = _load()


def is_there() -> bool:
    """Tell whether this install has the native reductions."""
    return _library is not None


def takes(tensor: torch.Tensor) -> bool:
    """Tell whether the native reductions take a readable tensor: dense floating-point elements in host memory, in any dense order."""
    return (
        _library is not None
        and tensor.device.type == "cpu"
        and tensor.dtype in _DTYPES
        and type(tensor) in _PLAIN_CLASSES
        and tensor.layout is torch.strided
        and (tensor.is_contiguous() or is_dense(tensor))
        and not tensor.is_neg()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory in some order of its dimensions (channels_last, transposed)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def statistics_of_one(tensor: torch.Tensor, address: int) -> None:
    """Write the statistics of a tensor that `takes` accepts as one row of doubles at `address`."""
    _library.msprobe_statistics_of_one(tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype], address)


def norms_of_one(tensor: torch.Tensor, address: int) -> None:
    """Write the norm and the counts of a tensor that `takes` accepts as one row of doubles at `address`."""
    _library.msprobe_norms_of_one(tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype], address)


def statistics(tensors: Sequence[torch.Tensor], address: int) -> None:
    """Write one row of statistics for each of many tensors that `takes` accepts."""
    _library.msprobe_statistics(len(tensors), *_arrays(tensors), address)


def norms(tensors: Sequence[torch.Tensor], address: int) -> None:
    """Write one row of norm and counts for each of many tensors that `takes` accepts."""
    _library.msprobe_norms(len(tensors), *_arrays(tensors), address)


def _arrays(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
    count = len(tensors)
    return (
        (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors]),
        (ctypes.c_int64 * count)(*[tensor.numel() for tensor in tensors]),
        (ctypes.c_int32 * count)(*[_DTYPES[tensor.dtype] for tensor in tensors]),
    )
