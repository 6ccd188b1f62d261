"""The entries between a processor's `backward` and its end: clipping, `scaler.step`, the optimizer's own step, the scaler's update.

`host.seams` calls these; each opens or closes its span and has `capture.updates` measure at the right side of it: before the span opens,
after it has closed, so that no measuring counts as the training's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from msprobe.capture.entries import Entries, entry
from msprobe.capture.parameters import describe_optimizer
from msprobe.capture.spans import Span
from msprobe.capture.updates import Clipping, PendingUpdate
from msprobe.capture.weights import WeightWatch


class UpdateEntries(Entries):
    """The part of a session that follows what happens to the weights."""

    weights: WeightWatch | None = None

    @entry
    def update_begins(self, optimizers: Sequence[Any], engine: bool) -> None:
        """The processor's `backward` is about to run: note the learning rates, which a scheduler changes before the step ends."""
        if self.draft is None or self.table is None:
            return
        for optimizer in optimizers:
            self._know(optimizer)
        self.draft.engine_steps = engine
        rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
        put = self.draft.readback.put
        self.draft.learning_rates = [put(rate) if isinstance(rate, torch.Tensor) else float(rate) for rate in rates if rate is not None]

    @entry
    def clip_begins(self, parameters: Sequence[torch.Tensor], arguments: Mapping[str, Any], scaler: Any) -> tuple[Clipping, Span] | None:
        """Clipping is about to run on these parameters."""
        if self.draft is None or self.draft.spans.is_within("clip_grads"):
            return None
        clipping = self.draft.updates.clip_begins(parameters, dict(arguments), scaler)
        if self.draft.updates.saw_scaled:
            self.ledger.clip_saw_scaled(self.draft.index, self.draft.updates.saw_scaled)
        return clipping, self.draft.spans.begin("clip_grads", self.clock.mark())

    @entry
    def clip_ends(self, begun: tuple[Clipping, Span] | None, parameters: Sequence[torch.Tensor], returned: Any, scaler: Any) -> None:
        """Clipping has run and returned the total norm that it saw."""
        if begun is None or self.draft is None:
            return
        clipping, span = begun
        self.draft.spans.finish(span, self.clock.mark())
        self.draft.updates.clip_ends(clipping, parameters, returned, scaler)

    @entry
    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> tuple[PendingUpdate, Span] | None:
        """`scaler.step` is about to run for an optimizer."""
        if self.draft is None:
            return None
        number = self._know(optimizer)
        update = self.draft.updates.scaler_step_begins(scaler, optimizer)
        return update, self.draft.spans.begin("optimizer_step", self.clock.mark(), optimizer=number)

    @entry
    def scaler_step_ends(self, begun: tuple[PendingUpdate, Span] | None, scaler: Any, optimizer: Any) -> None:
        """`scaler.step` has returned; whether it updated stands in its overflow flags."""
        if begun is None or self.draft is None:
            return
        update, span = begun
        self.draft.spans.finish(span, self.clock.mark())
        self.draft.updates.scaler_step_ends(scaler, update, optimizer)

    @entry
    def scaler_updated(self, span: Span | None, scaler: Any) -> None:
        """`scaler.update` has returned."""
        if self.draft is not None:
            if span is not None:
                self.draft.spans.finish(span, self.clock.mark())
            self.draft.updates.scaler_updated(scaler)

    @entry
    def optimizer_step_begins(self, optimizer: Any, scaler: Any, within: PendingUpdate | None) -> tuple[PendingUpdate, Span | None] | None:
        """An optimizer's own step is about to run; within `scaler.step` it has no span of its own."""
        if self.draft is None:
            return None
        is_inner = self.draft.spans.is_within("optimizer_step")
        if is_inner and (within is None or within.begun):  # a step that calls its parent class's is one step
            return None
        number = self._know(optimizer)
        update = self.draft.updates.optimizer_step_begins(optimizer, scaler, within)
        if self.weights is not None:
            update.weights = self.weights.step_begins(self.draft, update.keys)
        return update, None if is_inner else self.draft.spans.begin("optimizer_step", self.clock.mark(), optimizer=number)

    @entry
    def optimizer_step_ends(self, begun: tuple[PendingUpdate, Span | None] | None, optimizer: Any) -> None:
        """An optimizer's own step has returned; one that raised has not updated."""
        if begun is None or self.draft is None:
            return
        update, span = begun
        if span is not None:
            self.draft.spans.finish(span, self.clock.mark())
        update.ran = True
        if self.weights is not None:
            self.weights.step_ends(self.draft, optimizer, update.weights)
            update.weights = {}

    def _know(self, optimizer: Any) -> int:
        """Return an optimizer's number; one that was not there at the start is announced."""
        assert self.table is not None
        known = self.table.optimizers_seen
        number = self.table.optimizer_number(optimizer)
        if number == known:
            info = describe_optimizer(number, optimizer)
            self.ledger.new_optimizer(self.draft.index if self.draft else None, info)
        return number

    @entry
    def optimizer_span_begins(self, name: str, optimizer: Any, /, **attributes: Any) -> Span | None:
        """A phase that concerns one optimizer begins (`unscale`, `zero_grad`)."""
        if self.draft is None:
            return None
        number = self._know(optimizer)
        return self.draft.spans.begin(name, self.clock.mark(), optimizer=number, **attributes)

    @entry
    def unscale_begins(self, optimizer: Any, scaler: Any) -> Span | None:
        """`scaler.unscale_` is about to divide an optimizer's gradients."""
        if self.draft is None:
            return None
        number = self._know(optimizer)
        self.draft.updates.unscale_begins(optimizer, scaler)
        return self.draft.spans.begin("unscale", self.clock.mark(), optimizer=number)
