"""How much memory the process holds: the accelerator's allocator where there is one, the resident set on CPU. Never resets a peak."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from msprobe.capture.clock import device_module
from msprobe.schema import Memory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_reader(device: torch.device) -> Callable[[], Memory]:
    """Return what reads the memory of a run on `device`: a few counters, no wait."""
    module = None if device.type in ("cpu", "meta") else device_module(device)
    if module is None or not hasattr(module, "memory_allocated"):
        return _read_resident

    def read_allocator() -> Memory:
        return Memory(
            allocated_bytes=module.memory_allocated(device),
            reserved_bytes=module.memory_reserved(device),
            peak_bytes=module.max_memory_allocated(device),
            rss_bytes=resident_bytes(),
        )

    return read_allocator


def _read_resident() -> Memory:
    return Memory(rss_bytes=resident_bytes())


def resident_bytes() -> int | None:
    """Return the process's resident set in bytes, or None where the system does not say (no /proc)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
