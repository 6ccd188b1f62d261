"""How measured values reach the host: one buffer and one copy per step and device, read when the copy has arrived.

During a step, `put` takes scalars that were reduced where the tensor lives. What is on CPU is read at once, which waits for nothing.
What is on an accelerator stays there until `launch` stacks it in one buffer and copies that into pinned memory without waiting; `ready`
asks the event behind the copy. Reading earlier would return whatever the memory held (a device-to-host copy that does not block is
only complete when its event is). This module knows nothing of what the values mean.
"""

from __future__ import annotations

from typing import Any

import torch

from msprobe.capture.clock import device_module
from msprobe.capture.reduce import accumulation_dtype


def is_host(device: torch.device) -> bool:
    """Tell whether values on a device can be read at once."""
    return device.type == "cpu"


def pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory that a device copies into without waiting; torch's allocator reuses its blocks."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


class Slot:
    """The place of one `put` in the step's results; `values()` is valid once the readback is ready."""

    __slots__ = ("_found", "_size", "_source", "_start")

    def __init__(self, source: _DeviceBuffer | None, start: int, size: int, found: list[float] | None) -> None:
        self._source = source
        self._start = start
        self._size = size
        self._found = found

    @property
    def is_known(self) -> bool:
        """Whether the values are here already, without waiting for a device."""
        return self._found is not None

    def values(self) -> list[float]:
        """Return the values as Python floats."""
        if self._found is not None:
            return self._found
        assert self._source is not None
        return self._source.read(self._start, self._size)

    def value(self) -> float:
        """Return the only value of a slot that holds one."""
        return self.values()[0]


class Readback:
    """All values of one step, on whichever devices they were measured."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, _DeviceBuffer] = {}

    def put(self, tensor: torch.Tensor) -> Slot:
        """Keep the elements of a tensor (any shape, any real dtype) for reading; later changes to the tensor do not matter."""
        flat = tensor.detach().reshape(-1)
        if is_host(flat.device):
            return Slot(None, 0, flat.numel(), flat.double().tolist())
        buffer = self._buffers.get(flat.device)
        if buffer is None:
            buffer = self._buffers[flat.device] = _DeviceBuffer(flat.device)
        return Slot(buffer, buffer.add(flat), flat.numel(), None)

    def launch(self) -> None:
        """Start the copies to the host: the step is over, nothing more is put."""
        for buffer in self._buffers.values():
            buffer.launch()

    def ready(self) -> bool:
        """Tell whether every copy has arrived; never waits."""
        return all(buffer.ready() for buffer in self._buffers.values())

    def wait(self) -> None:
        """Wait for the copies: only at the end of a run, or when a device is more than a step behind."""
        for buffer in self._buffers.values():
            buffer.wait()


class _DeviceBuffer:
    """The values of one step on one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[torch.Tensor] = []
        self._size = 0
        self._host: torch.Tensor | None = None
        self._arrived: Any = None

    def add(self, flat: torch.Tensor) -> int:
        # The conversion is also the copy that keeps the value: the loss, for one, is divided in place later.
        dtype = accumulation_dtype(self._device)
        self._parts.append(flat.to(dtype) if flat.dtype != dtype else flat.clone())
        start = self._size
        self._size += flat.numel()
        return start

    def launch(self) -> None:
        stacked = torch.cat(self._parts)
        self._parts = []
        self._host = pinned(self._size, stacked.dtype)
        self._host.copy_(stacked, non_blocking=True)
        module = device_module(self._device)
        self._arrived = module.Event()
        self._arrived.record(module.current_stream(self._device))

    def ready(self) -> bool:
        return self._arrived is not None and bool(self._arrived.query())

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self, start: int, size: int) -> list[float]:
        assert self._host is not None
        found: list[float] = self._host[start : start + size].tolist()
        return found
