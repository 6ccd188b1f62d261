"""The STEPS grammar: a comma list of step indexes and slices that says which steps are meant.

It is one grammar for every option that takes steps: which steps get tensor statistics while recording, and which steps a reading command
looks at. `StepSelection` is asked once a step on the training path, so asking it is a few comparisons, and this module needs nothing but
the standard library. It never sees a trace: negative indexes, which would need its length, are refused.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from msprobe.errors import UsageError

_INDEX = re.compile(r"[0-9]{1,18}", re.ASCII)
_SLICE = re.compile(r"([0-9]{0,18}):([0-9]{0,18})(?::([0-9]{0,18}))?", re.ASCII)
_NEGATIVE = re.compile(r"(^|:)\s*-\s*[0-9]")
_EXAMPLE = "steps are a comma list of indexes and slices, such as 0,10,100:110,::10"


@dataclass(frozen=True, slots=True)
class Span:
    """The steps `start`, `start + stride`, ... below `stop`."""

    start: int
    stop: int
    stride: int

    def __str__(self) -> str:
        start = str(self.start) if self.start else ""
        stop = "" if self.stop == sys.maxsize else str(self.stop)
        return f"{start}:{stop}" if self.stride == 1 else f"{start}:{stop}:{self.stride}"


@dataclass(frozen=True, slots=True)
class StepSelection:
    """A set of step indexes: single ones, and spans that may be open at the end."""

    indexes: frozenset[int]
    spans: tuple[Span, ...]

    @classmethod
    def all(cls) -> StepSelection:
        """Return the selection of every step."""
        return cls(frozenset(), (Span(0, sys.maxsize, 1),))

    @classmethod
    def parse(cls, text: str) -> StepSelection:
        """Return the selection that a text such as `0,10,100:110,::10` means.

        Slices are those of Python over the step indexes: the end is not included, an empty end is open.

        Raises:
            UsageError: the text is empty, or an item is negative, not a number, or a slice with a stride of zero.
        """
        indexes: set[int] = set()
        spans: list[Span] = []
        for item in text.split(","):
            parsed = _parse_item(item.strip(), text)
            if isinstance(parsed, int):
                indexes.add(parsed)
            else:
                spans.append(parsed)
        return cls(frozenset(indexes), tuple(spans))

    def __contains__(self, step: int) -> bool:
        # Written out, because `in range(...)` walks the whole range when the step is a subclass of int or a NumPy integer.
        if step in self.indexes:
            return True
        return any(span.start <= step < span.stop and (step - span.start) % span.stride == 0 for span in self.spans)

    def __str__(self) -> str:
        return ",".join([*map(str, sorted(self.indexes)), *map(str, self.spans)])


def _parse_item(item: str, text: str) -> int | Span:
    if _NEGATIVE.search(item):
        raise UsageError(f"steps {text!r}: {item!r} is negative, but steps are counted from 0 and the last one is not known in advance")
    if _INDEX.fullmatch(item):
        return int(item)
    match = _SLICE.fullmatch(item)
    if match is None:
        raise UsageError(f"steps {text!r}: {item!r} is neither an index nor a slice; {_EXAMPLE}")
    start, stop, stride = match.groups()
    if stride and int(stride) == 0:
        raise UsageError(f"steps {text!r}: the stride of {item!r} is zero")
    return Span(int(start or 0), int(stop) if stop else sys.maxsize, int(stride or 1))
