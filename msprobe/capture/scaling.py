"""What a gradient scaler is doing right now, read from the scaler itself and never remembered by us.

`torch.amp.GradScaler` keeps a stage per optimizer: until `unscale_` ran, the gradients that this optimizer owns hold the loss scale as a
factor; gradients that no unscaled optimizer owns hold it still (torch/amp/grad_scaler.py, `_per_optimizer_states`). The session asks
here at the moment it measures. Nothing here changes a scaler, and nothing reads a value from a device (`get_scale()` would wait for it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_scaling(scaler: Any) -> bool:
    """Tell whether a scaler is enabled and has scaled a loss (its scale tensor is made by the first `scale`)."""
    return scaler is not None and bool(getattr(scaler, "_enabled", False)) and getattr(scaler, "_scale", None) is not None


def scale_tensor(scaler: Any) -> torch.Tensor:
    """Return the scaler's own scale: shape (), float32, on its device. It is changed in place by `update`: do not keep it."""
    scale: torch.Tensor = scaler._scale
    return scale


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Tell whether the gradients of an optimizer have been unscaled since the scaler's last update."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    stage = None if state is None else state.get("stage")
    return getattr(stage, "name", "READY") != "READY"


def found_inf(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return the overflow flags of an optimizer's last step, one per device: shape (), above 0 where a gradient was not finite.

    Valid between `scaler.step` and `scaler.update`, which forgets them.
    """
    state = scaler._per_optimizer_states.get(id(optimizer)) or {}
    return list(state.get("found_inf_per_device", {}).values())


def unscaled_parameters(scaler: Any, optimizers: Iterable[Any]) -> set[int]:
    """Return the `id` of every parameter whose optimizer has been unscaled."""
    return {
        id(parameter)
        for optimizer in optimizers
        if has_unscaled(scaler, optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
