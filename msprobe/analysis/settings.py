"""The numbers that steer training besides the loss: learning rates, the loss scale, and the memory in use.

`analysis.summary` feeds it every step once. Learning rates are those that the updates used, one series for each parameter group.
"""

from __future__ import annotations

from dataclasses import dataclass

from msprobe.analysis.series import Series, Told
from msprobe.schema import Memory, StepRecord


@dataclass(frozen=True, slots=True)
class SettingSeries:
    """Learning rate by group, the loss scale before each update, and the greatest memory figures in bytes.

    `final_loss_scale` is the scale after the last update; None where no scaler worked.
    """

    lr: list[Told]
    loss_scale: Told
    final_loss_scale: float | None
    memory_max: Memory


class Settings:
    """Collects settings of steps that are fed to it in order."""

    def __init__(self) -> None:
        self._lr: list[Series] = []
        self._scale = Series()
        self._final_scale: float | None = None
        self._memory = Memory()

    def add(self, step: StepRecord) -> None:
        """Add the settings of a step."""
        while len(self._lr) < len(step.lr):
            self._lr.append(Series())
        for series, lr in zip(self._lr, step.lr, strict=False):
            series.add(step.step, lr)
        if step.loss_scale is not None:
            self._scale.add(step.step, step.loss_scale.before)
            self._final_scale = step.loss_scale.before if step.loss_scale.after is None else step.loss_scale.after
        for name in Memory.__struct_fields__:
            now, most = getattr(step.memory, name), getattr(self._memory, name)
            if now is not None and (most is None or now > most):
                setattr(self._memory, name, now)

    def told(self) -> SettingSeries:
        """Return the series so far."""
        return SettingSeries([series.told() for series in self._lr], self._scale.told(), self._final_scale, self._memory)
