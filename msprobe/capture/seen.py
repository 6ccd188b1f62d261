"""The tensors that passed through watched modules in one step: each measured once, however many modules it enters and leaves.

A tensor is known by its identity and its version: torch counts every change in place, so a changed one is measured anew. Only weak
references are held, so nothing here keeps an activation or a graph alive. A seen tensor also gathers which calls made it and which took
it, so that its gradient, when it arrives, can be told to all of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from msprobe.capture.calls import Call
from msprobe.capture.measured import Measured, measure
from msprobe.capture.readback import Readback


class Seen:
    """One tensor in one state.

    Attributes:
        makers: the calls whose output it was, with its path in that, innermost first.
        takers: the calls whose input it was, with its path in that, outermost first.
        gradient: what was measured of its gradient, once that arrived.
        is_hooked: a hook waits for its gradient.
    """

    __slots__ = ("_full", "_norm", "gradient", "is_hooked", "makers", "reference", "takers", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None) -> None:
        self.reference = weakref.ref(tensor)
        self.version = version
        self.makers: list[tuple[Call, str]] = []
        self.takers: list[tuple[Call, str]] = []
        self.gradient: Measured | None = None
        self.is_hooked = False
        self._norm: Measured | None = None
        self._full: Measured | None = None

    def measured(self, tensor: torch.Tensor, full: bool, readback: Readback) -> Measured:
        """Return what was measured of the tensor, measuring it now if that was not done."""
        if full:
            if self._full is None:
                self._full = measure(tensor, True, readback)
            return self._full
        if self._norm is None:
            self._norm = measure(tensor, False, readback)
        return self._norm

    def judged(self, tensor: torch.Tensor, readback: Readback) -> Measured:
        """Return anything that tells whether the tensor is finite."""
        return self._full if self._full is not None else self.measured(tensor, False, readback)


class SeenTensors:
    """The tensors seen in one step, by identity."""

    def __init__(self) -> None:
        self._known: dict[int, Seen] = {}

    def find(self, tensor: torch.Tensor) -> Seen:
        """Return the entry of a tensor in its present state."""
        version = _version(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known.version == version is not None and known.reference() is tensor:
            return known
        fresh = self._known[id(tensor)] = Seen(tensor, version)
        return fresh


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was changed in place; an inference tensor does not know."""
    return None if tensor.is_inference() else tensor._version


class GradientHook:
    """A tensor hook that is left behind when its tensor is saved: torch warns of any other (torch/utils/hooks.py, `warn_if_has_hooks`)."""

    __torch_unserializable__ = True
    __slots__ = ("_arguments", "_arrives")

    def __init__(self, arrives: Any, *arguments: Any) -> None:
        self._arrives = arrives
        self._arguments = arguments

    def __call__(self, gradient: torch.Tensor) -> None:
        """Hand the gradient on; it is not changed."""
        self._arrives(*self._arguments, gradient)
