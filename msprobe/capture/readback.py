"""How measured values reach the host: one buffer and one copy per step and device, read when the step is over and the copy has arrived.

During a step, `put` takes scalars that were reduced where the tensor lives, and `reserve` hands out room in host memory for reductions
that write there themselves. Nothing is read before `launch`, which on an accelerator stacks the values in one buffer and copies that
into pinned memory without waiting; `ready` asks the event behind the copy. Reading earlier would return whatever the memory held (a
device-to-host copy that does not block is only complete when its event is). This module knows nothing of what the values mean.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from msprobe.capture.clock import device_module

CHUNK = 4096


def is_host(device: torch.device) -> bool:
    """Tell whether a device's memory is the host's."""
    return device.type == "cpu"


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which a device accumulates: float64, but for Apple's."""
    return torch.float32 if device.type == "mps" else torch.float64


def pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory that a device copies into without waiting; torch's allocator reuses its blocks."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


class _Buffer(Protocol):
    """The values of one step on one device."""

    def add(self, flat: torch.Tensor) -> int:
        """Keep a copy of a flat tensor's elements; return the place of the first."""

    def launch(self) -> None:
        """Start the way to the host."""

    def ready(self) -> bool:
        """Tell whether the values have arrived; never waits."""

    def wait(self) -> None:
        """Wait for them."""

    def read(self, start: int, size: int) -> list[float]:
        """Return values that have arrived."""


class Slot:
    """The place of one `put` in the step's results; `values()` is valid once the readback is ready."""

    __slots__ = ("_size", "_source", "_start")

    def __init__(self, source: _Buffer, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self._size = size

    def values(self) -> list[float]:
        """Return the values as Python floats."""
        return self._source.read(self._start, self._size)

    def value(self) -> float:
        """Return the only value of a slot that holds one."""
        return self.values()[0]

    def split(self, size: int) -> list[Slot]:
        """Return the slots of its parts of that size."""
        return [Slot(self._source, self._start + offset, size) for offset in range(0, self._size, size)]


class Readback:
    """All values of one step, on whichever devices they were measured."""

    def __init__(self) -> None:
        self._host = _HostBuffer()
        self._buffers: dict[torch.device, _Buffer] = {torch.device("cpu"): self._host}

    def put(self, tensor: torch.Tensor) -> Slot:
        """Keep the elements of a tensor (any shape, any real dtype) for reading; later changes to the tensor do not matter."""
        flat = tensor.detach().reshape(-1)
        buffer = self._buffers.get(flat.device)
        if buffer is None:
            buffer = self._buffers[flat.device] = self._host if is_host(flat.device) else _DeviceBuffer(flat.device)
        return Slot(buffer, buffer.add(flat), flat.numel())

    def reserve(self, size: int) -> tuple[Slot, int]:
        """Hand out room for `size` doubles in host memory: the slot, and the address to write them to before the step ends."""
        start, address = self._host.reserve(size)
        return Slot(self._host, start, size), address

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


class _HostBuffer:
    """The values of one step in host memory: chunks of doubles that stay where they are, so that an address remains good."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used: list[int] = []
        self._filled = 0  # elements in all chunks but the last
        self._room = 0
        self._values: list[float] | None = None

    def reserve(self, size: int) -> tuple[int, int]:
        if size > self._room:
            self._add_chunk(size)
        offset = self._used[-1]
        self._used[-1] += size
        self._room -= size
        return self._filled + offset, self._chunks[-1].data_ptr() + 8 * offset

    def _add_chunk(self, size: int) -> None:
        self._filled += self._used[-1] if self._used else 0
        self._chunks.append(torch.empty(max(CHUNK, size), dtype=torch.float64, device="cpu"))
        self._used.append(0)
        self._room = len(self._chunks[-1])

    def add(self, flat: torch.Tensor) -> int:
        size = flat.numel()
        start, _ = self.reserve(size)
        self._chunks[-1].narrow(0, start - self._filled, size).copy_(flat)
        return start

    def launch(self) -> None:
        """Do nothing: the values are where they will be read."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def read(self, start: int, size: int) -> list[float]:
        if self._values is None:
            parts = [chunk.narrow(0, 0, used).tolist() for chunk, used in zip(self._chunks, self._used, strict=True)]
            self._values = [value for part in parts for value in part]
        return self._values[start : start + size]


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
