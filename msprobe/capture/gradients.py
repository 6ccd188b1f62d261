"""Gradient norms: measured for all parameters at one moment, composed into totals when the values have arrived.

`capture.updates` asks for a measurement when clipping or an optimizer's step begins, and again when clipping is done. One measurement
reduces every gradient once; all totals of that moment (over the clipped set, over an optimizer's) are composed from it on the host, in
float64, after dividing what was still scaled by the loss scale. Gradients are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

from msprobe.capture import reduce
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.reduce import Counts, Norms


class Measurement:
    """The gradient norms of many parameters at one moment, keyed by the `id` of the parameter.

    Attributes:
        order: the norm's order.
        scaled: the parameters whose gradients held the loss scale as a factor.
        keys: the parameters that had a gradient.
        skipped: why a gradient has no norm here.
    """

    def __init__(self, order: float, scaled: Collection[int], scale: Slot | None) -> None:
        self.order = order
        self.scaled = set(scaled)
        self.keys: set[int] = set()
        self.skipped: dict[int, str] = {}
        self._scale = scale
        self._measured: list[tuple[list[int], Norms]] = []
        self._values: dict[int, float] | None = None

    def add(self, keys: list[int], norms: Norms) -> None:
        """Add the norms of gradients that live on one device."""
        self._measured.append((keys, norms))

    @property
    def values(self) -> dict[int, float]:
        """The unscaled norm of each gradient; valid once the step's readback is ready."""
        if self._values is None:
            self._values = {
                key: self.unscaled(key, value) for keys, norms in self._measured for key, value in zip(keys, norms.values(), strict=True)
            }
        return self._values

    def counts(self, key: int) -> Counts | None:
        """Return what was counted in a gradient (its l2 unscaled), or None where nothing was counted: on an accelerator."""
        for keys, norms in self._measured:
            if key in keys:
                return norms.counts(keys.index(key))
        return None

    def unscaled(self, key: int, value: float) -> float:
        """Return what a value measured on a parameter's gradient is without the loss scale; NaN where the scale has sunk to 0."""
        scale = self.scale_of(key)
        return value / scale if scale else math.nan

    def scale_of(self, key: int) -> float:
        """Return the factor that a parameter's gradient held: the loss scale, or 1."""
        return self._scale.value() if self._scale is not None and key in self.scaled else 1.0

    def total(self, keys: Iterable[int]) -> float | None:
        """Return the total norm over some parameters, or None where none has a gradient or one of them could not be measured."""
        wanted = [key for key in keys if key in self.keys]
        if not wanted or any(key in self.skipped for key in wanted):
            return None
        return reduce.compose([self.values[key] for key in wanted], self.order)


def with_gradient(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those parameters that have a gradient, each once.

    Only tensors that keep their gradient are asked: reading `.grad` of another one makes torch warn.
    """
    unique = {id(parameter): parameter for parameter in parameters}.values()
    return [parameter for parameter in unique if (parameter.is_leaf or parameter.retains_grad) and parameter.grad is not None]


class Gradients:
    """The gradients of many parameters, gathered once and measured as often as they stay the same tensors.

    Clipping changes gradients in place, so what was gathered before it serves after it as well.

    Args:
        parameters: parameters with a gradient, of any devices and dtypes.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.keys = {id(parameter) for parameter in parameters}
        self.skipped: dict[int, str] = {}
        self._sources = [(parameter, parameter.grad) for parameter in parameters]
        self._by_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for parameter, gradient in self._sources:
            assert gradient is not None
            self._add(id(parameter), gradient)

    def _add(self, key: int, gradient: torch.Tensor) -> None:
        reason = reduce.why_not_measurable(gradient)
        if reason is not None:
            self.skipped[key] = reason
            return
        keys, tensors = self._by_device.setdefault(gradient.device, ([], []))
        keys.append(key)
        tensors.append(gradient.detach())

    def are_current(self) -> bool:
        """Tell whether the parameters still have these very gradients."""
        return all(parameter.grad is gradient for parameter, gradient in self._sources)

    def measure(self, readback: Readback, order: float, scaled: Collection[int] = (), scale: torch.Tensor | None = None) -> Measurement:
        """Measure the norm of each gradient, now.

        Args:
            readback: where the values travel to the host.
            order: the norm's order, `math.inf` included.
            scaled: the `id` of each parameter whose gradient still holds the loss scale as a factor.
            scale: that factor, shape ().
        """
        result = Measurement(order, scaled, None if scale is None else readback.put(scale))
        result.keys, result.skipped = self.keys, self.skipped
        for keys, tensors in self._by_device.values():
            result.add(keys, reduce.put_norms([reduce.as_dense_real(tensor, order) for tensor in tensors], readback, order))
        return result
