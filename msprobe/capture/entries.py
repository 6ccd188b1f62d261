"""How the training enters msprobe: every call from a hook or a seam is timed as ours, and its failure stops here.

`Entries` is the base of the session: what every entry needs, and what it costs. Our own time is charged so that it never counts twice: to
the innermost span that was open both before and after the entry, else to the step, else to the step that comes next.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from msprobe.capture.clock import Clock, HostClock, now_ns
from msprobe.capture.ledger import Ledger
from msprobe.capture.parameters import ParameterTable
from msprobe.capture.recorder import Recorder
from msprobe.capture.spans import Span
from msprobe.capture.step import StepDraft
from msprobe.errors import AnomalyStop, NothingSelected

_P = ParamSpec("_P")
_R = TypeVar("_R")
_E = TypeVar("_E", bound="Entries")


def entry(method: Callable[Concatenate[_E, _P], _R]) -> Callable[Concatenate[_E, _P], _R | None]:
    """Make a method an entry from the training: timed as ours, and safe to call (it returns None when it failed)."""

    @functools.wraps(method)
    def guarded(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        began = now_ns()
        depth = self.depth()
        try:
            return method(self, *args, **kwargs)
        except (NothingSelected, AnomalyStop):
            raise  # meant for the user, not a failure of ours
        except Exception as error:
            self.recorder.failed(method.__name__, error, self.train, self.draft.index if self.draft else None)
            return None
        finally:
            self.charge(depth, now_ns() - began)

    return guarded


# The sessions that are open, outermost first: a trainer that trains another one inside a hook has the inner one's events left to that.
_running: list[Entries] = []


class Entries:
    """What the entries of a session share.

    Attributes:
        recorder: the process's recorder.
        train: the number of this `train()` call.
        draft: the step that is running, or None between steps.
        table: the model's parameters, once the model is ready.
        clock: what takes the marks.
        ended: nothing is recorded any more.
        carried_ns: our own time since the last step ended; the next step takes it over.
        probe_ns: all our own time.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.train = recorder.trains
        recorder.trains += 1
        self.ledger = Ledger(recorder, self.train)
        self.draft: StepDraft | None = None
        self.table: ParameterTable | None = None
        self.clock: Clock = HostClock()
        self.ended = False
        self.carried_ns = 0
        self.probe_ns = 0
        self._thread = threading.get_ident()

    def depth(self) -> int:
        """Return how many spans enclose this moment."""
        return len(self.draft.spans.open) if self.draft is not None else 0

    def charge(self, depth: int, spent_ns: int) -> None:
        """Charge the time of an entry before which `depth` spans were open."""
        self.probe_ns += spent_ns
        if self.draft is None:
            self.carried_ns += spent_ns
            return
        shared = min(depth, len(self.draft.spans.open))
        if shared:
            self.draft.spans.open[shared - 1].probe_ns += spent_ns
        else:
            self.draft.probe_ns += spent_ns

    def opens(self) -> None:
        """Begin to listen."""
        _running.append(self)

    def closes(self) -> None:
        """Listen no more."""
        self.ended = True
        if self in _running:
            _running.remove(self)

    def is_of_this_thread(self) -> bool:
        """Tell whether the training that is traced runs on this thread."""
        return threading.get_ident() == self._thread

    def listens(self) -> bool:
        """Tell whether what happens now belongs to this session: it is the innermost open one of this thread."""
        if self.ended or not self.is_of_this_thread():
            return False
        return self is next((session for session in reversed(_running) if session._thread == self._thread), None)

    def is_within(self, *names: str) -> bool:
        """Tell whether a span of one of these names encloses this moment."""
        return self.draft is not None and any(self.draft.spans.is_within(name) for name in names)

    @entry
    def span_begins(self, name: str, /, **attributes: Any) -> Span | None:
        """A phase begins."""
        return None if self.draft is None else self.draft.spans.begin(name, self.clock.mark(), **attributes)

    @entry
    def span_ends(self, span: Span | None) -> None:
        """A phase ends."""
        if span is not None and self.draft is not None:
            self.draft.spans.finish(span, self.clock.mark())
