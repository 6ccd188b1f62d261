"""The spans of one step: which phase encloses which, opened and closed as the training runs.

The session opens and closes spans; at the end of the step they become the `phases` of its record. Closing a span closes what is still
open inside it (an exception that the script caught leaves such spans behind). A span also keeps the host time that msprobe itself took
while the span was the innermost open one, so that our own cost can be told apart from the training's.
"""

from __future__ import annotations

from typing import Any

from msprobe.capture.clock import Clock, Mark
from msprobe.schema import Phase


class Span:
    """One phase from `start` to `end`; `index` is its place in the step's list, `parent` the index of the enclosing one."""

    __slots__ = ("attributes", "call", "end", "has_children", "index", "name", "parent", "probe_ns", "start")

    def __init__(self, index: int, name: str, start: Mark, parent: int | None, call: int, attributes: dict[str, Any]) -> None:
        self.index = index
        self.name = name
        self.start = start
        self.end: Mark | None = None
        self.parent = parent
        self.call = call
        self.attributes = attributes
        self.has_children = False
        self.probe_ns = 0


class Spans:
    """The spans of a step in the order in which they began, and the stack of those still open."""

    def __init__(self) -> None:
        self.all: list[Span] = []
        self.open: list[Span] = []
        self._calls: dict[str, int] = {}

    @property
    def innermost(self) -> Span | None:
        """The span that encloses this moment most closely."""
        return self.open[-1] if self.open else None

    def begin(self, name: str, start: Mark, **attributes: Any) -> Span:
        """Open a span inside the innermost one."""
        parent = self.innermost
        if parent is not None:
            parent.has_children = True
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        span = Span(len(self.all), name, start, parent.index if parent else None, call, attributes)
        self.all.append(span)
        self.open.append(span)
        return span

    def finish(self, span: Span, end: Mark) -> None:
        """Close a span and whatever is still open inside it; a span closed before stays as it was."""
        if span.end is not None:
            return
        while self.open:
            top = self.open.pop()
            top.end = end
            if top is span:
                return

    def finish_all(self, end: Mark) -> None:
        """Close everything: the step was broken off."""
        while self.open:
            self.open.pop().end = end

    def is_within(self, name: str) -> bool:
        """Tell whether a span of that name is open."""
        return any(span.name == name for span in self.open)

    def probe_outside_leaves(self) -> int:
        """Return our host time in nanoseconds spent in spans that have children: it lies between the leaves."""
        return sum(span.probe_ns for span in self.all if span.has_children)

    def probe_inside_leaves(self) -> int:
        """Return our host time in nanoseconds spent inside leaf spans (module hooks in forward, for example)."""
        return sum(span.probe_ns for span in self.all if not span.has_children)

    def phases(self, origin_ns: int, clock: Clock) -> list[Phase]:
        """Return the closed spans as the record's phases, with times from `origin_ns`; device times are read now."""
        return [_phase(span, span.end, origin_ns, clock) for span in self.all if span.end is not None]


def _phase(span: Span, end: Mark, origin_ns: int, clock: Clock) -> Phase:
    return Phase(
        name=span.name,
        start_ns=span.start.host_ns - origin_ns,
        host_ns=end.host_ns - span.start.host_ns,
        device_ns=clock.device_ns(span.start, end),
        call=span.call,
        parent=span.parent,
        **span.attributes,
    )
