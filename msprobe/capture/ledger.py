"""The counts of one `train()` and the events that follow from its steps: skipped updates, the first non-finite numbers.

The session hands every published step over, in order; the ledger counts it, and says what deserves an event. What it says once per
`train()` it does not repeat.
"""

from __future__ import annotations

import math

import msgspec

from msprobe.capture.recorder import Recorder
from msprobe.capture.selection import Selection
from msprobe.codec import spell
from msprobe.errors import NothingSelected
from msprobe.notice import say
from msprobe.schema import EndReason, EndRecord, OptimizerInfo, StepRecord


class Ledger:
    """Counts steps, updates, skips and unapplied micro-steps."""

    def __init__(self, recorder: Recorder, train: int) -> None:
        self._recorder = recorder
        self._train = train
        self._said: set[str] = set()
        self.steps = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.unapplied_micro_steps = 0

    def count(self, record: StepRecord) -> None:
        """Take a step into account; one that was broken off counts nowhere."""
        if not record.complete:
            return
        self.steps += 1
        self.optimizer_steps += sum(update.outcome == "done" for update in record.updates)
        self.skipped_steps += sum(update.outcome == "skipped" for update in record.updates)
        self.unapplied_micro_steps = self.unapplied_micro_steps + 1 if record.optimizer_step == "none" else 0
        if record.optimizer_step == "skipped":
            self._step_skipped(record)
        self._look_for_nonfinite(record)

    def end_record(self, reason: EndReason, dropped: int, probe_ns: int) -> EndRecord:
        """Return the last record of this `train()`."""
        return EndRecord(
            train=self._train,
            reason=reason,
            steps=self.steps,
            optimizer_steps=self.optimizer_steps,
            skipped_steps=self.skipped_steps,
            unapplied_micro_steps=self.unapplied_micro_steps,
            dropped_records=dropped,
            probe_ns=probe_ns,
        )

    def clip_saw_scaled(self, step: int, names: list[str]) -> None:
        """Say once that clipping counted gradients that still hold the loss scale."""
        if self._first("clip_saw_scaled"):
            message = (
                f"clipping counted {len(names)} gradient(s) that still hold the loss scale ({names[0]}, …): `unscale_` touches only the "
                "optimizer's parameters, clipping takes every trainable one, so the clip coefficient is too small"
            )
            self._recorder.event("clip_saw_scaled", "warning", message, self._train, step, parameters=names[:100], count=len(names))

    def selected(self, selection: Selection) -> None:
        """Say what is selected, and what of the settings selects nothing.

        Raises:
            NothingSelected: a pattern selects nothing in the first model that this process trains: a typing error would cost the whole
                training's record. A model that is trained later need not have what the first one has.
        """
        for pattern, near in selection.idle_patterns():
            hint = f"; near it are {', '.join(near)}" if near else ""
            message = f"{pattern} selects nothing in this model{hint}"
            self._recorder.event("pattern_selects_nothing", "error", message, self._train, pattern=str(pattern), near=near)
            say(message)
            if self._train == 0:
                raise NothingSelected(message)
        line = selection.summary()
        if line is not None:
            self._recorder.event("selected", "info", line, self._train)
            if not self._recorder.config.quiet:
                say(line)

    def compiled(self) -> None:
        """Say once that torch.compile is in use, so that modules cannot be looked into."""
        if not self._first("compiled"):
            return
        message = "torch.compile is in use: a hook would change what is compiled, so modules are neither timed nor measured"
        self._recorder.event("compiled_model", "info", message, self._train)

    def new_optimizer(self, step: int | None, info: OptimizerInfo) -> None:
        """Say that an optimizer appeared which was not there at the start."""
        message = f"optimizer {info.id} ({info.class_}) appeared in mid-run"
        self._recorder.event("new_optimizer", "info", message, self._train, step, **msgspec.to_builtins(info))

    def _step_skipped(self, record: StepRecord) -> None:
        scale = record.loss_scale
        change = "" if scale is None else f"; loss scale {scale.before} -> {scale.after}"
        message = f"the scaler found a non-finite gradient and skipped the update of step {record.step}{change}"
        data = {} if scale is None else {"before": scale.before, "after": scale.after}
        self._recorder.event("step_skipped", "info", message, self._train, record.step, **data)

    def _look_for_nonfinite(self, record: StepRecord) -> None:
        for key, value in record.loss.items():
            if value is not None and not math.isfinite(value) and self._first(f"nonfinite loss {key}"):
                self._nonfinite(record.step, "loss", key, value)
        norm = record.grad_norm.before_clip if record.grad_norm is not None else None
        if norm is None or math.isfinite(norm) or record.optimizer_step == "skipped":
            return
        if self._first("nonfinite gradient"):
            self._nonfinite(record.step, "gradient norm", "before_clip", norm)

    def _nonfinite(self, step: int, what: str, name: str, value: float) -> None:
        message = f"the {what} ({name}) of step {step} is {spell(value)}: the first that is not finite"
        self._recorder.event("nonfinite", "warning", message, self._train, step, what=what, name=name, value=value)

    def _first(self, what: str) -> bool:
        if what in self._said:
            return False
        self._said.add(what)
        return True
