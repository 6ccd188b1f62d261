"""The total gradient norms of a run, before and after clipping, and how often clipping took hold.

`analysis.summary` feeds it every step once. A step with several optimizers has a norm for each of its updates; they are kept apart by
optimizer. A micro-step without an update has no norm and adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msprobe.analysis.series import Series, Told
from msprobe.schema import GradNorm, StepRecord


@dataclass(frozen=True, slots=True)
class NormSeries:
    """The gradient norms of one optimizer's updates, over the parameters that clipping takes (without clipping: all with a gradient).

    `clipped` of `clip_calls` updates were scaled down. `max_norms` and `norm_types` are all values that were in force.
    `optimizer_params` is the norm before clipping over the parameters that the optimizer owns.
    """

    optimizer: int | None
    updates: int
    clip_calls: int
    clipped: int
    max_norms: list[float]
    norm_types: list[float]
    before_clip: Told
    after_clip: Told
    optimizer_params: Told
    optimizer_params_after: Told


class _Norms:
    def __init__(self) -> None:
        self.updates = 0
        self.clip_calls = 0
        self.clipped = 0
        # Dictionaries as ordered sets.
        self.max_norms: dict[float, None] = {}
        self.norm_types: dict[float, None] = {}
        self.before_clip = Series()
        self.after_clip = Series()
        self.optimizer_params = Series()
        self.optimizer_params_after = Series()

    def add(self, step: int, norm: GradNorm) -> None:
        self.updates += 1
        self.norm_types[norm.norm_type] = None
        self.before_clip.add(step, norm.before_clip)
        self.optimizer_params.add(step, norm.optimizer_params)
        if norm.max_norm is not None:
            self.max_norms[norm.max_norm] = None
        if norm.max_norm is not None or norm.clip_returned is not None:
            self.clip_calls += 1
            self.clipped += bool(norm.clipped)
            self.after_clip.add(step, norm.after_clip)
            self.optimizer_params_after.add(step, norm.optimizer_params_after)

    def told(self, optimizer: int | None) -> NormSeries:
        return NormSeries(
            optimizer=optimizer,
            updates=self.updates,
            clip_calls=self.clip_calls,
            clipped=self.clipped,
            max_norms=list(self.max_norms),
            norm_types=list(self.norm_types),
            before_clip=self.before_clip.told(),
            after_clip=self.after_clip.told(),
            optimizer_params=self.optimizer_params.told(),
            optimizer_params_after=self.optimizer_params_after.told(),
        )


class Norms:
    """Collects the gradient norms of steps that are fed to it in order."""

    def __init__(self) -> None:
        self._by_optimizer: dict[int | None, _Norms] = {}

    def add(self, step: StepRecord) -> None:
        """Add the gradient norms of a step."""
        for optimizer, norm in norms_of(step):
            if optimizer not in self._by_optimizer:
                self._by_optimizer[optimizer] = _Norms()
            self._by_optimizer[optimizer].add(step.step, norm)

    def told(self) -> list[NormSeries]:
        """Return the series of each optimizer so far."""
        return [norms.told(optimizer) for optimizer, norms in self._by_optimizer.items()]


def norms_of(step: StepRecord) -> Iterator[tuple[int | None, GradNorm]]:
    """Yield the gradient norms of a step with their optimizer: one for each update, or the step's own where updates are not listed."""
    listed = False
    for update in step.updates:
        if update.grad_norm is not None:
            listed = True
            yield update.optimizer, update.grad_norm
    if not listed and step.grad_norm is not None:
        yield step.grad_norm.optimizer, step.grad_norm
