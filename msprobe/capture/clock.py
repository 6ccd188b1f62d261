"""When: marks on the host's clock and, where the model is on an accelerator, on the device's.

The session takes a `Mark` at every boundary; neighbouring spans share one. Reading the host clock costs nothing worth mentioning; on a
device a mark also records an event on the current stream, and the time between two events is read a step later, when both have
completed, so that no mark ever waits for the device. Devices are reached through their torch module (`torch.get_device_module`), never
by name. This module knows neither steps nor phases.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

now_ns = time.perf_counter_ns


class Mark:
    """A moment: host nanoseconds (monotonic, no fixed origin) and, on a device, the event that was recorded then."""

    __slots__ = ("event", "host_ns")

    def __init__(self, host_ns: int, event: Any = None) -> None:
        self.host_ns = host_ns
        self.event = event


class Clock(Protocol):
    """What takes marks, and later tells the device time between two of them."""

    def mark(self) -> Mark:
        """Return this moment."""

    def device_ns(self, start: Mark, end: Mark) -> int | None:
        """Return the device time between two completed marks in nanoseconds, or None where the device has no clock."""

    def has_reached(self, mark: Mark) -> bool:
        """Tell whether the device has got to a mark; never waits."""

    def wait_for(self, mark: Mark) -> None:
        """Wait until the device has got to a mark."""

    def release(self, marks: list[Mark]) -> None:
        """Give the marks' events back for reuse; the marks may not be read afterwards."""


class HostClock:
    """The clock of a run on CPU: there is no device time."""

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(now_ns())

    def device_ns(self, start: Mark, end: Mark) -> int | None:
        """Return None: the host has no device clock."""
        return None

    def has_reached(self, mark: Mark) -> bool:
        """Return True: the host is where it is."""
        return True

    def wait_for(self, mark: Mark) -> None:
        """Do nothing: there is nothing to wait for."""

    def release(self, marks: list[Mark]) -> None:
        """Do nothing: host marks hold no events."""


class DeviceClock:
    """The clock of a run on an accelerator, with a pool of timing events.

    An event is created lazily by the driver when it is first recorded, so events are reused: `release` puts them back after their last
    reading. During graph capture a recorded event would become part of the graph, so marks then carry host time alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = device_module(device)
        self._free: list[Any] = []

    def mark(self) -> Mark:
        """Return this moment, recording an event on the current stream of the model's device.

        That need not be the current device: ModelScope's `device='gpu:1'` moves the model there and leaves the current one at 0.
        """
        if _is_capturing(self._module):
            return Mark(now_ns())
        event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return Mark(now_ns(), event)

    def device_ns(self, start: Mark, end: Mark) -> int | None:
        """Return the device time between two marks, or None if either carries no completed event."""
        if start.event is None or end.event is None or not end.event.query():
            return None
        return int(start.event.elapsed_time(end.event) * 1e6)

    def has_reached(self, mark: Mark) -> bool:
        """Tell whether a mark's event has completed."""
        return mark.event is None or bool(mark.event.query())

    def wait_for(self, mark: Mark) -> None:
        """Wait for a mark's event."""
        if mark.event is not None:
            mark.event.synchronize()

    def release(self, marks: list[Mark]) -> None:
        """Take the marks' events back into the pool, each once though neighbours share marks."""
        for mark in marks:
            if mark.event is not None:
                self._free.append(mark.event)
                mark.event = None


def device_module(device: torch.device) -> Any:
    """Return the torch module of an accelerator (`torch.<type>`), the way `torch.get_device_module` of later versions does."""
    return getattr(torch, device.type)


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a model on `device`: a device clock where its module has timing events, else the host's."""
    if device.type in ("cpu", "meta") or not hasattr(device_module(device), "Event"):
        return HostClock()
    return DeviceClock(device)


def _is_capturing(module: Any) -> bool:
    asks = getattr(module, "is_current_stream_capturing", None)
    return bool(asks()) if asks is not None else False
