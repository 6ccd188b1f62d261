"""One call of a module within a step, forward and, where its gradients are watched, backward; and the record that it becomes.

`capture.modules` and `capture.watch` make the calls. A call keeps no tensor: what went in and came out is kept as measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from msprobe.capture.clock import Clock, Mark
from msprobe.capture.measured import Measured
from msprobe.schema import Direction, ModuleRecord


class Call:
    """One call of a module.

    Attributes:
        seq: its place in the order of execution within the step.
        number: counts the calls of this module in the step.
        start, end: when it ran; `end` is None when it was broken off.
        recompute: it ran again for a backward pass (gradient checkpointing), and is not counted.
        parent: the watched call inside which it ran.
        backward: the same call in the backward pass, once a gradient of its output has arrived.
        inputs: what was measured of its inputs: its own judgement of whether a bad output was born here.
        output_gradients: what was measured of the gradients of its outputs.
    """

    __slots__ = (
        "backward",
        "direction",
        "end",
        "has_gradient_hooks",
        "inputs",
        "name",
        "number",
        "output_gradients",
        "parent",
        "recompute",
        "seq",
        "start",
    )

    def __init__(self, seq: int, name: str, number: int, start: Mark, direction: Direction = "forward", recompute: bool = False) -> None:
        self.seq = seq
        self.name = name
        self.number = number
        self.start = start
        self.end: Mark | None = None
        self.direction: Direction = direction
        self.recompute = recompute
        self.parent: Call | None = None
        self.backward: Call | None = None
        self.has_gradient_hooks = False
        self.inputs: list[tuple[str, Measured]] = []
        self.output_gradients: list[Measured] = []

    def marks(self) -> Iterator[Mark]:
        """Yield the marks that this call took."""
        yield self.start
        if self.end is not None:
            yield self.end

    def ends_backward(self, mark: Mark) -> None:
        """The gradients of an input are there: the backward pass of this call, and of those around it, has come at least this far."""
        call: Call | None = self
        while call is not None and call.backward is not None:
            call.backward.end = mark
            call = call.parent

    def record(self, train: int, step: int, origin_ns: int, clock: Clock) -> ModuleRecord | None:
        """Return the record of a finished call."""
        if self.end is None:
            return None
        return ModuleRecord(
            train=train,
            step=step,
            seq=self.seq,
            name=self.name,
            call=self.number,
            direction=self.direction,
            recompute=self.recompute,
            start_ns=self.start.host_ns - origin_ns,
            host_ns=self.end.host_ns - self.start.host_ns,
            device_ns=clock.device_ns(self.start, self.end),
        )
