"""What `--tensors` and `--dump` select in a model: modules, parameters, optimizer states; and what of it selects nothing.

The session asks once per `train()`, when the model is final. Nothing here hooks or measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from msprobe.capture.modules import is_compiled
from msprobe.capture.parameters import ParameterTable, plain_name
from msprobe.config import MODULE_ROLES, PARAMETER_ROLES, Config, TensorPattern

LEAF = "@leaf"
# Entry points that are methods: hooks on such a module never fire (ModelScope's Stable Diffusion calls `vae.encode`).
ENTRY_METHODS = ("encode", "decode")
# About what one line of the trace takes, for the sentence at the start.
_TENSOR_BYTES, _MODULE_BYTES, _NORM_BYTES = 380, 170, 20


class WatchedModule:
    """A selected module.

    Attributes:
        name: its path; with the method's name behind it where a method is the entry point.
        method: that method's name, or None.
        roles: which of its values are recorded.
        dumped: which of its values are kept whole.
    """

    def __init__(self, name: str, module: nn.Module, roles: frozenset[str], dumped: frozenset[str], method: str | None = None) -> None:
        self.name = name
        self.module = module
        self.method = method
        self.roles = roles
        self.dumped = dumped


class Selection:
    """Everything that a configuration selects in one model."""

    def __init__(self, model: nn.Module, table: ParameterTable, config: Config) -> None:
        self._config = config
        self._table = table
        self._both = (*config.tensors, *config.dump)
        self.modules = [] if is_compiled(model) else list(_select_modules(model, config))
        self._known_modules = [plain_name(name) for name, _ in model.named_modules() if name]
        self._is_compiled = is_compiled(model)

    def parameters(self, role: str) -> list[int]:
        """Return the numbers of the parameters of which a role is wanted; for an optimizer's state, `optim.<state>`."""
        return self._table.selected(pattern for pattern in self._both if _is_same_role(pattern.role, role))

    def dumped_parameters(self, role: str) -> set[int]:
        """Return the numbers of the parameters of which a role is kept whole."""
        return set(self._table.selected(pattern for pattern in self._config.dump if _is_same_role(pattern.role, role)))

    def wants_state(self) -> bool:
        """Tell whether any optimizer state is wanted."""
        return any(pattern.role.startswith("optim.") for pattern in self._both)

    def wants(self, role: str, name: str) -> bool:
        """Tell whether a value of the batch or a loss is wanted."""
        return any(pattern.role == role and pattern.matches(name) for pattern in self._both)

    def is_dumped(self, role: str, name: str) -> bool:
        """Tell whether a value of the batch or a loss is kept whole."""
        return any(pattern.role == role and pattern.matches(name) for pattern in self._config.dump)

    def idle_patterns(self) -> Iterator[tuple[TensorPattern, list[str]]]:
        """Yield the patterns that select nothing in this model, with the names that come near.

        What a batch, a loss or an optimizer's state will hold is not known before the first step.
        """
        for pattern in self._both:
            if pattern.role in MODULE_ROLES and not self._is_compiled:
                names, found = self._known_modules, any(_selects(pattern, watched.name, watched.module) for watched in self.modules)
            elif pattern.role in PARAMETER_ROLES or pattern.role.startswith("optim."):
                names, found = self._table.first_names(), bool(self._table.selected([pattern]))
            else:
                continue
            if not found and pattern.glob != "*":
                yield pattern, get_close_matches(pattern.glob.rstrip("*."), names, cutoff=0.4)

    def summary(self) -> str | None:
        """Return one line on what is selected, or None where that is the default alone."""
        if set(self._both) == {TensorPattern("param.grad")} and self._config.level == "norm":
            return None
        tensors = sum(len(watched.roles) for watched in self.modules)
        parameters = sum(len(self.parameters(role)) for role in PARAMETER_ROLES)
        each = _TENSOR_BYTES if self._config.level == "full" else _NORM_BYTES
        expected = tensors * _TENSOR_BYTES + 2 * len(self.modules) * _MODULE_BYTES + parameters * each
        return (
            f"selected: {len(self.modules)} module(s), about {tensors + parameters} tensors and {_readable(expected)} a step"
            f"{self._cost_of_updates()}"
        )

    def _cost_of_updates(self) -> str:
        numbers = self.parameters("param.update")
        copied = sum(self._table.parameters[number].nbytes for number in numbers)
        return f"; param.update keeps a copy of {len(numbers)} weights, {_readable(copied)}, in every step" if numbers else ""


def _readable(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _is_same_role(wanted: str, role: str) -> bool:
    return fnmatchcase(role, wanted) if wanted.startswith("optim.") else wanted == role


def _select_modules(model: nn.Module, config: Config) -> Iterator[WatchedModule]:
    both = [pattern for pattern in (*config.tensors, *config.dump) if pattern.role in MODULE_ROLES]
    dumped = [pattern for pattern in config.dump if pattern.role in MODULE_ROLES]
    for path, module in model.named_modules() if both else ():
        if not path or is_compiled(module):
            continue
        for method in (None, *(method for method in ENTRY_METHODS if _is_entered_by(module, method))):
            name = plain_name(path) if method is None else f"{plain_name(path)}.{method}"
            roles = _roles(both, name, module)
            if roles:
                yield WatchedModule(name, module, roles, _roles(dumped, name, module), method)


def _roles(patterns: Sequence[TensorPattern], name: str, module: nn.Module) -> frozenset[str]:
    return frozenset(pattern.role for pattern in patterns if _selects(pattern, name, module))


def _selects(pattern: TensorPattern, name: str, module: nn.Module) -> bool:
    if pattern.glob == LEAF:
        return next(module.children(), None) is None
    return pattern.matches(name)


def _is_entered_by(module: nn.Module, method: str) -> bool:
    """Tell whether one of diffusers' autoencoders is entered by a method of that name."""
    return callable(getattr(type(module), method, None)) and any(
        cls.__module__.startswith("diffusers.models.autoencoders") for cls in type(module).__mro__
    )
