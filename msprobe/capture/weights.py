"""The entries that look at weights and at what an optimizer keeps: before forward, before an optimizer's step, and after it.

`param` is a weight as forward uses it; `param.update` what the optimizer's step really changed, which takes a copy of the selected
weights for the time of that step; `optim.<state>` what the optimizer keeps of a parameter afterwards. Any optimizer will do: whatever
tensors or numbers stand in its state are measured, the bytes of an 8-bit one as the integers that they are.
"""

from __future__ import annotations

from typing import Any

import torch

from msprobe.capture.readings import Reading
from msprobe.capture.selection import Selection
from msprobe.capture.step import StepDraft

MOST_STATES = 50


class WeightWatch:
    """Reads weights and optimizer states of one `train()` at selected steps."""

    def __init__(self, selection: Selection, parameters: list[torch.Tensor], names: list[list[str]]) -> None:
        self._selection = selection
        self._parameters = parameters
        self._names = names
        self._weights = selection.parameters("param")
        self._updated = selection.parameters("param.update")
        self._wants_state = selection.wants_state()

    def forward_begins(self, draft: StepDraft) -> None:
        """Read the weights that forward will use."""
        if self._weights and draft.is_selected:
            self._read(draft, "param", [(number, self._parameters[number]) for number in self._weights])

    def step_begins(self, draft: StepDraft, keys: set[int]) -> dict[int, torch.Tensor]:
        """Copy the selected weights that an optimizer owns; it is about to change them."""
        if not self._updated or not draft.is_selected:
            return {}
        owned = [number for number in self._updated if id(self._parameters[number]) in keys]
        return {number: self._parameters[number].detach().clone() for number in owned if not self._parameters[number].is_meta}

    def step_ends(self, draft: StepDraft, optimizer: Any, before: dict[int, torch.Tensor]) -> None:
        """Read what changed, and what the optimizer keeps now."""
        if before:
            changes = [(number, self._parameters[number].detach() - weight) for number, weight in before.items()]
            self._read(draft, "param.update", changes)
        if self._wants_state and draft.is_selected:
            for role, found in self._states(optimizer).items():
                self._read(draft, role, found)

    def _states(self, optimizer: Any) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """Return the selected states of an optimizer by role."""
        states: dict[str, list[tuple[int, torch.Tensor]]] = {}
        wanted: dict[str, set[int]] = {}
        kept = getattr(optimizer, "state", {})
        for number, parameter in enumerate(self._parameters):
            state = kept.get(parameter)  # a defaultdict, which `[]` would fill
            for key, value in list(state.items())[:MOST_STATES] if isinstance(state, dict) else ():
                role = f"optim.{key}"
                if role not in wanted:
                    wanted[role] = set(self._selection.parameters(role))
                if number in wanted[role] and _is_measurable(value):
                    states.setdefault(role, []).append(
                        (
                            number,
                            value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu"),
                        )
                    )
        return states

    def _read(self, draft: StepDraft, role: str, found: list[tuple[int, torch.Tensor]]) -> None:
        reading = Reading(role, found, draft.full, draft.readback)
        dumped = self._selection.dumped_parameters(role)
        for number, tensor in found:
            key = f"{role}|{self._names[number][0]}"
            if number in dumped and draft.plan.keep(key, tensor, role=role, name=self._names[number][0]):
                reading.dumps[number] = key
        draft.readings.append(reading)


def _is_measurable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
