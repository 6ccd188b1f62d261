"""What modules produced: the l2 of selected modules' outputs, or all their statistics, at selected steps only.

The session arms an `OutputRecorder` when a selected step begins and disarms it when the step ends, so that other steps carry no hook.
Every tensor of an output is measured when the hook runs (a later module may change it in place), and none is kept. The order of
execution is numbered along with the module calls, so the first bad value can be found by reading on. Nothing here changes an output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from msprobe.capture import reduce
from msprobe.capture.modules import Call, StowawayHook, is_compiled
from msprobe.capture.parameters import dtype_name, plain_name
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.reduce import Counts
from msprobe.capture.statistics import fill, statistics, why_no_statistics
from msprobe.config import TensorPattern
from msprobe.schema import TensorRecord

DEEPEST_NESTING = 4
UNCOUNTED = "not finite; the counts would have needed a wait for the device"


class Output:
    """One tensor of one module call, until its values have arrived."""

    __slots__ = ("call", "counts", "device", "dtype", "full", "name", "path", "seq", "shape", "skipped", "slot")

    def __init__(self, seq: int, call: Call, path: str, tensor: torch.Tensor) -> None:
        self.seq = seq
        self.name = call.name
        self.call = call.number
        self.path = path
        self.shape = list(tensor.shape)
        self.dtype = dtype_name(tensor.dtype)
        self.device = str(tensor.device)
        self.skipped: str | None = None
        self.slot: Slot | None = None
        self.counts: Counts | None = None
        self.full = False

    def measure(self, tensor: torch.Tensor, readback: Readback) -> None:
        """Reduce the tensor to its l2 where it is."""
        self.skipped = reduce.why_not_measurable(tensor)
        if self.skipped is not None:
            return
        dense = reduce.as_dense_real(tensor)
        self.slot = readback.put(reduce.norms([dense]))
        if self.slot.is_known and not math.isfinite(self.slot.value()):
            self.counts = reduce.count_nonfinite(dense)

    def measure_fully(self, tensor: torch.Tensor, readback: Readback) -> None:
        """Reduce the tensor to all its statistics where it is."""
        self.full = True
        self.skipped = why_no_statistics(tensor)
        if self.skipped is None:
            self.slot = readback.put(statistics(tensor))

    def record(self, train: int, step: int) -> TensorRecord:
        """Return the record; its values have arrived."""
        record = TensorRecord(
            train=train,
            step=step,
            seq=self.seq,
            role="module.output",
            name=self.name,
            call=self.call,
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            device=self.device,
            numel=math.prod(self.shape),
            skipped=self.skipped,
        )
        if self.slot is not None:
            self._fill(record, self.slot)
        return record

    def _fill(self, record: TensorRecord, slot: Slot) -> None:
        if self.full:
            fill(record, slot.values())
        elif self.counts is not None:
            record.nan, record.posinf, record.neginf = self.counts.nan, self.counts.posinf, self.counts.neginf
            record.l2 = self.counts.finite_l2
        elif math.isfinite(slot.value()):
            record.l2 = slot.value()
        else:
            record.skipped = UNCOUNTED


class OutputRecorder:
    """Hooks the selected modules while a selected step runs.

    Args:
        modules: the selected modules by path.
        begin: called when a selected module is entered; returns the call, or None when this call does not count.
        finish: called with that call and the output when it returned.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        begin: Callable[[str, nn.Module], Call | None],
        finish: Callable[[Call, Any], None],
    ) -> None:
        self._modules = modules
        self._begin = begin
        self._finish = finish
        self._handles: list[Any] = []
        self._open: list[tuple[nn.Module, Call]] = []

    def arm(self) -> None:
        """Hook the modules: the step that begins is selected."""
        for name, module in self._modules:
            entered = StowawayHook(functools.partial(self._entered, name))
            self._handles += [module.register_forward_pre_hook(entered), module.register_forward_hook(StowawayHook(self._left))]

    def disarm(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def _entered(self, name: str, module: nn.Module, arguments: Any) -> None:
        call = self._begin(name, module)
        if call is not None:
            self._open.append((module, call))

    def _left(self, module: nn.Module, arguments: Any, output: Any) -> None:
        while self._open:  # what an exception left behind lies on top
            entered, call = self._open.pop()
            if entered is module:
                self._finish(call, output)
                return


def selected_modules(model: nn.Module, patterns: Sequence[TensorPattern]) -> list[tuple[str, nn.Module]]:
    """Return the modules whose outputs are wanted, by path; compiled ones cannot be hooked and are left out."""
    wanted = [pattern for pattern in patterns if pattern.role == "module.output"]
    if is_compiled(model):
        return []
    return [
        (plain_name(name), module)
        for name, module in model.named_modules()
        if name and not is_compiled(module) and any(_selects(pattern, plain_name(name), module) for pattern in wanted)
    ]


def _selects(pattern: TensorPattern, name: str, module: nn.Module) -> bool:
    if pattern.glob == "@leaf":
        return next(module.children(), None) is None
    return pattern.matches(name)


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an output with their paths: `[0]`, `.sample`, `[0].hidden`; empty for the output itself."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == DEEPEST_NESTING:
        return
    for key, item in _items(value):
        yield from tensors_in(item, path + key, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # a ModelOutput is one, and its keys are its fields
        yield from ((f".{key}" if str(key).isidentifier() else f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{entry.name}", getattr(value, entry.name)) for entry in dataclasses.fields(value))
