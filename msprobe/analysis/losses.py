"""The losses of a run: one series for each key that the trainer put out, and one for each addend that could be seen.

`analysis.summary` feeds it every step once, broken-off ones too: the loss of a step that then failed is often the one that matters.
Whether a value is bad is not judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

from msprobe.analysis.series import Series, Told
from msprobe.schema import StepRecord


@dataclass(frozen=True, slots=True)
class LossSeries:
    """The losses by key, the main one first, and their addends by name."""

    loss: dict[str, Told]
    loss_terms: dict[str, Told]


class Losses:
    """Collects the losses of steps that are fed to it in order."""

    def __init__(self) -> None:
        self._loss: dict[str, Series] = {}
        self._terms: dict[str, Series] = {}

    def add(self, step: StepRecord) -> None:
        """Add the losses of a step."""
        for key, value in step.loss.items():
            self._series(self._loss, key).add(step.step, value)
        for term in step.loss_terms:
            self._series(self._terms, term.name).add(step.step, term.value)

    @staticmethod
    def _series(of: dict[str, Series], key: str) -> Series:
        if key not in of:
            of[key] = Series()
        return of[key]

    def told(self) -> LossSeries:
        """Return the series so far."""
        return LossSeries(_told(self._loss), _told(self._terms))


def _told(series: dict[str, Series]) -> dict[str, Told]:
    return {key: series[key].told() for key in sorted(series, key=lambda key: key != "loss")}
