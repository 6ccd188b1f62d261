"""What a diffusion model's loss is made of: for each call of the denoiser its timesteps, and the loss that its prediction led to.

Stable Diffusion's loss is dominated by the timestep; without it no loss curve can be read. And ModelScope's Dreambooth trainer adds the
prior loss to the instance loss in place and keeps only the sum (modelscope/trainers/multi_modal/dreambooth_diffusion). The session notes
the denoiser's calls, `host.seams` the results of torch's loss functions while forward runs; the first scalar loss after a call is that
call's. Nothing is read from a device here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from msprobe.capture.readback import Readback, Slot
from msprobe.schema import LossTerm

DENOISERS = ("unet", "transformer")
# The second positional argument of diffusers' denoisers, and its name (UNet2DConditionModel.forward).
_TIMESTEP_POSITION = 1
_TIMESTEP_NAME = "timestep"
MOST_TIMESTEPS = 256


class _Term:
    """One call of the denoiser, and the loss that followed it."""

    def __init__(self, call: int, timesteps: Slot | None) -> None:
        self.call = call
        self.timesteps = timesteps
        self.value: Slot | None = None


class LossTerms:
    """The addends of one step's loss, as far as they can be seen.

    Attributes:
        prior_weight: the weight of the second call's loss, where the trainer preserves a prior.
    """

    def __init__(self, readback: Readback) -> None:
        self.prior_weight: float | None = None
        self._readback = readback
        self._terms: list[_Term] = []

    def denoiser_called(self, call: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note a call of the denoiser and the timesteps that it was given."""
        found = keywords.get(_TIMESTEP_NAME, arguments[_TIMESTEP_POSITION] if len(arguments) > _TIMESTEP_POSITION else None)
        timesteps = self._readback.put(found) if isinstance(found, torch.Tensor) and 0 < found.numel() <= MOST_TIMESTEPS else None
        self._terms.append(_Term(call, timesteps))

    def loss_computed(self, value: Any) -> None:
        """Take a loss function's result: the first scalar after a call of the denoiser is that call's loss."""
        term = self._terms[-1] if self._terms else None
        if term is not None and term.value is None and isinstance(value, torch.Tensor) and value.numel() == 1:
            term.value = self._readback.put(value)

    def describe(self) -> list[LossTerm]:
        """Return the record's form; the values have arrived."""
        return [self._describe(index, term) for index, term in enumerate(self._terms)]

    def _describe(self, index: int, term: _Term) -> LossTerm:
        is_prior = index == 1 and self.prior_weight is not None
        return LossTerm(
            name="prior" if is_prior else "instance" if index == 0 else f"call {index}",
            value=None if term.value is None else term.value.value(),
            weight=self.prior_weight if is_prior else 1.0 if index == 0 else None,
            timesteps=None if term.timesteps is None else [int(step) for step in term.timesteps.values()],
            call=term.call,
        )


def is_denoiser(name: str, module: nn.Module) -> bool:
    """Tell whether a child of the root model is one of diffusers' models that predict the noise (other libraries use the names too)."""
    return name in DENOISERS and any(cls.__module__.startswith("diffusers.") for cls in type(module).__mro__)
