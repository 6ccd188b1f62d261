"""The first bad value of a run: where a loss, a gradient norm, a parameter or its gradient first was not finite.

`analysis.summary` feeds it every step and tensor record once. A loss scaler probes for the largest usable scale by overflowing now and
then: non-finite gradients that end in a skipped update while the loss is finite are its ordinary work, counted as skips and not as
faults. With gradient accumulation that verdict on a micro-step is only known at the next update, so findings wait for it. Module outputs
are not judged: attention masks are full of -inf on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from msprobe.analysis.norms import norms_of
from msprobe.codec import spell
from msprobe.schema import StepRecord, TensorRecord

_JUDGED_ROLES = ("param.grad", "param", "param.update")
# Findings of more steps than any accumulation spans are not kept: the first ones decide.
_WAITING_STEPS = 4096


@dataclass(frozen=True, slots=True)
class BadValue:
    """A value that was not finite. `what` says which in words; `value` is its spelling, or None where `nan` and so on count elements.

    kind: `loss`, `loss_term`, `gradient_norm`, or the role of the tensor.
    """

    step: int
    kind: str
    name: str
    what: str
    value: str | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    numel: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """`first_bad` is the first fault, the loss before the gradient of the same step; `bad_steps` counts the steps with one.

    `overflow_skips` counts updates that a loss scaler skipped while the loss was finite.
    """

    first_bad: BadValue | None
    also_bad: list[BadValue]
    bad_steps: int
    overflow_skips: int


class HealthCheck:
    """Judges steps and tensors that are fed to it in order."""

    def __init__(self) -> None:
        self._first: list[BadValue] = []
        self._bad_steps = 0
        self._last_bad_step: int | None = None
        self._overflow_skips = 0
        self._waiting: dict[int, list[BadValue]] = {}
        self._judged_step: int | None = None
        self._judged_ordinary = False

    def add_tensor(self, record: TensorRecord) -> None:
        """Note a parameter or gradient that holds non-finite elements."""
        if record.role not in _JUDGED_ROLES or not (record.nan or record.posinf or record.neginf):
            return
        bad = BadValue(
            step=record.step,
            kind=record.role,
            name=record.name,
            what=f"{_ROLE_WORDS[record.role]} {record.name}",
            nan=record.nan,
            posinf=record.posinf,
            neginf=record.neginf,
            numel=record.numel,
        )
        if record.step != self._judged_step:
            self._wait(bad)
        elif not self._judged_ordinary:  # tensor records may follow their step's record
            self._condemn(record.step, [bad])

    def add_step(self, step: StepRecord) -> None:
        """Judge a step and what waits for its outcome."""
        losses = list(_bad_losses(step))
        norms = list(_bad_norms(step))
        skipped = _was_skipped(step)
        self._judged_step, self._judged_ordinary = step.step, False
        if losses:
            self._condemn(step.step, losses + self._waiting.pop(step.step, []) + norms)
            self._settle(ordinary=skipped)
        elif skipped:
            self._overflow_skips += 1
            self._judged_ordinary = True
            self._settle(ordinary=True)
        elif step.optimizer_step == "none" and step.complete:
            self._judged_step = None
        else:
            self._settle(ordinary=False)
            if norms:
                self._condemn(step.step, norms)

    def told(self) -> Health:
        """Return the verdict so far; what still waits for an outcome that never came is a fault."""
        self._settle(ordinary=False)
        return Health(
            first_bad=self._first[0] if self._first else None,
            also_bad=self._first[1:],
            bad_steps=self._bad_steps,
            overflow_skips=self._overflow_skips,
        )

    def _wait(self, bad: BadValue) -> None:
        if bad.step in self._waiting or len(self._waiting) < _WAITING_STEPS:
            self._waiting.setdefault(bad.step, []).append(bad)

    def _settle(self, ordinary: bool) -> None:
        for step, found in sorted(self._waiting.items()):
            if not ordinary:
                self._condemn(step, found)
        self._waiting.clear()

    def _condemn(self, step: int, found: list[BadValue]) -> None:
        """Count a step as bad; keep what is known of the first one."""
        if step != self._last_bad_step:
            self._bad_steps += 1
            self._last_bad_step = step
        if not self._first or self._first[0].step == step:
            self._first.extend(found)


_ROLE_WORDS = {"param.grad": "the gradient of", "param": "the parameter", "param.update": "the update of"}


def _bad_losses(step: StepRecord) -> Iterator[BadValue]:
    for key, value in step.loss.items():
        if value is not None and not math.isfinite(value):
            yield BadValue(step.step, "loss", key, f"the loss {key!r}" if key != "loss" else "the loss", spell(value))
    for term in step.loss_terms:
        if term.value is not None and not math.isfinite(term.value):
            yield BadValue(step.step, "loss_term", term.name, f"the loss term {term.name!r}", spell(term.value))


def _bad_norms(step: StepRecord) -> Iterator[BadValue]:
    for _, norm in norms_of(step):
        if norm.before_clip is not None and not math.isfinite(norm.before_clip):
            when = "before clipping" if norm.max_norm is not None else "(nothing clips)"
            yield BadValue(step.step, "gradient_norm", "before_clip", f"the gradient norm {when}", spell(norm.before_clip))


def _was_skipped(step: StepRecord) -> bool:
    return step.optimizer_step == "skipped" or any(update.outcome == "skipped" for update in step.updates)
