"""The parameters of the traced model and the optimizers that own them, each with the number by which records refer to it.

The session builds one table per `train()`. A tied parameter stands once, under its first name. An optimizer that appears later (scripts
replace it in mid-run) gets the next number. Nothing here reads a tensor's values.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from msprobe.config import TensorPattern
from msprobe.schema import GroupInfo, OptimizerInfo, ParameterInfo


class ParameterTable:
    """Parameters by number, in the order of `named_parameters`; `number` maps the `id` of a parameter to its number."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[torch.Tensor] = []
        self.names: list[list[str]] = []
        self.number: dict[int, int] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(plain_name(name), parameter)
        # Weak, so that an optimizer that the script replaced is not kept alive; its number stays its own.
        self._optimizers: list[Callable[[], Any]] = []

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        known = self.number.get(id(parameter))
        if known is not None:
            self.names[known].append(name)
            return
        self.number[id(parameter)] = len(self.parameters)
        self.parameters.append(parameter)
        self.names.append([name])

    def selected(self, patterns: Iterable[TensorPattern]) -> list[int]:
        """Return the numbers of the parameters that any of the patterns matches, whatever their roles."""
        wanted = list(patterns)
        return [number for number, names in enumerate(self.names) if any(pattern.matches(name) for pattern in wanted for name in names)]

    def first_names(self) -> list[str]:
        """Return every parameter's first name, in order."""
        return [names[0] for names in self.names]

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return a parameter's first name, or None if it is not the model's."""
        number = self.number.get(id(parameter))
        return None if number is None else self.names[number][0]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are still in use, in the order of their numbers."""
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]

    @property
    def optimizers_seen(self) -> int:
        """How many optimizers there ever were: the next one's number."""
        return len(self._optimizers)

    def optimizer_number(self, optimizer: Any) -> int:
        """Return an optimizer's number, giving it the next one if it was never seen."""
        for number, reference in enumerate(self._optimizers):
            if reference() is optimizer:
                return number
        self._optimizers.append(_reference(optimizer))
        return len(self._optimizers) - 1

    def describe_parameters(self) -> list[ParameterInfo]:
        """Return the model record's `parameters`."""
        owners = self._owners()
        return [self._describe(number, owners) for number in range(len(self.parameters))]

    def describe_optimizers(self) -> list[OptimizerInfo]:
        """Return the model record's `optimizers`."""
        return [describe_optimizer(number, optimizer) for number, optimizer in enumerate(self.optimizers)]

    def _owners(self) -> dict[int, tuple[int, int]]:
        return {
            id(parameter): (number, group_index)
            for number, optimizer in enumerate(self.optimizers)
            for group_index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def _describe(self, number: int, owners: dict[int, tuple[int, int]]) -> ParameterInfo:
        parameter = self.parameters[number]
        optimizer, group = owners.get(id(parameter), (None, None))
        first, *tied = self.names[number]
        return ParameterInfo(
            id=number,
            name=first,
            shape=shape_of(parameter),
            dtype=dtype_name(parameter.dtype),
            requires_grad=parameter.requires_grad,
            optimizer=optimizer,
            group=group,
            tied=tied,
        )


def describe_optimizer(number: int, optimizer: Any) -> OptimizerInfo:
    """Return what a record says of an optimizer: its class and, of each group, the plain options."""
    return OptimizerInfo(id=number, class_=type(optimizer).__name__, groups=[_describe_group(group) for group in optimizer.param_groups])


def _describe_group(group: dict[str, Any]) -> GroupInfo:
    options = {key: _plain(value) for key, value in group.items() if key not in ("params", "lr")}
    rate = _plain(group.get("lr"))
    return GroupInfo(
        lr=float(rate) if isinstance(rate, (int, float)) else None,
        parameters=len(group["params"]),
        options={key: value for key, value in options.items() if value is not _NOT_PLAIN},
    )


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it (numpy's float64 is a float that no encoder takes), or `_NOT_PLAIN`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _NOT_PLAIN


def _reference(target: Any) -> Callable[[], Any]:
    """Return a weak reference, or where the class allows none a strong one."""
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


def shape_of(parameter: torch.Tensor) -> list[int]:
    """Return a parameter's shape; a lazy one has none yet."""
    return [] if is_lazy(parameter) else list(parameter.shape)


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: `float32`."""
    return str(dtype).removeprefix("torch.")


def plain_name(name: str) -> str:
    """Return a module or parameter name without the parts that wrappers put in (DDP's `module.`, compile's `_orig_mod.`)."""
    for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace("." + wrapper, ".") if wrapper != "module." else name
    return name
