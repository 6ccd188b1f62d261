"""Steps that are over but whose values have not arrived yet, and their way into the file.

On CPU a step is published when it ends. On a device its values are on their way for one step more. A device that is further behind is
waited for: what a killed run may lose is the newest `LAG_STEPS` steps and no more (ModelScope itself waits once a step, for the loss).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msprobe.capture.clock import Clock
from msprobe.capture.ledger import Ledger
from msprobe.capture.recorder import Recorder
from msprobe.capture.step import StepDraft, StepWriter
from msprobe.schema import StepRecord

LAG_STEPS = 1


class Publisher:
    """Writes steps in their order, each when its values have arrived, and has the ledger count them."""

    def __init__(
        self, recorder: Recorder, ledger: Ledger, writer: StepWriter, clock: Clock, on_step: Callable[[StepRecord], None] | None
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._writer = writer
        self._clock = clock
        self._on_step = on_step
        self._unread: deque[StepDraft] = deque()

    def add(self, draft: StepDraft) -> None:
        """Take a step that is over, and publish what has arrived."""
        self._unread.append(draft)
        while len(self._unread) > LAG_STEPS or (self._unread and self._has_arrived(self._unread[0])):
            self._publish(self._unread.popleft())

    def finish(self) -> None:
        """Publish everything, waiting for what has not arrived."""
        while self._unread:
            self._publish(self._unread.popleft())

    def _has_arrived(self, draft: StepDraft) -> bool:
        return draft.readback.ready() and (draft.end is None or self._clock.has_reached(draft.end))

    def _publish(self, draft: StepDraft) -> None:
        if not self._has_arrived(draft):
            draft.readback.wait()
            if draft.end is not None:
                self._clock.wait_for(draft.end)
        for record in self._writer.records_of(draft):
            self._recorder.write(record)
            if isinstance(record, StepRecord):
                self._ledger.count(record)
                if self._on_step is not None:
                    self._on_step(record)
        self._clock.release(draft.marks())
