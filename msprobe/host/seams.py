"""Everything of torch and ModelScope that is ever touched while a traced `train()` runs, each put in and taken out by the same object.

| object | attribute | in | out |
| --- | --- | --- | --- |
| `EpochBasedTrainer` | `train` | `enable()` | `disable()` |
| the trainer | `invoke_hook` (instance) | `train()` begins | `train()` ends |
| the trainer | `_hooks` (one `TraceHook` more) | `train()` begins | `train()` ends |
| each `OptimizerHook` | `processor` (wrapped) | `before_run`, `register_processor` | `train()` ends |
| `torch.optim.Optimizer`, `torch.nn.Module` | `zero_grad` | `train()` begins | `train()` ends |
| the optimizer's classes that override it | `zero_grad` | the processor's `backward` begins | it ends |
| `torch.optim.optimizer` | global step pre- and post-hook | `train()` begins | `train()` ends |
| `torch.autograd` | `backward` | the processor's `backward` begins | it ends |
| `OptimizerProcessor` | `clip_grads` | the processor's `backward` begins | it ends |
| `torch.nn.utils`, `torch.nn.utils.clip_grad` | `clip_grad_norm_` | the processor's `backward` begins | it ends |
| the scaler's classes | `unscale_`, `step`, `update` | the processor's `backward` begins | it ends |
| `torch.nn.functional` | the loss functions | a diffusion model's forward begins | it ends |
| the model's children | forward hooks | forward begins | it ends |

The first four rows are `host.attach` and `host.hooks`, the last is `capture.modules`, the rest is here. Nothing here measures: it tells the
session what happens. A patch is taken out only where it is still in place; if somebody patched on top of it, it stays and passes
everything through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from msprobe.capture.session import Session
from msprobe.capture.updates import PendingUpdate

LOSS_FUNCTIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_MISSING = object()


class Patch:
    """One replaced attribute, and what stood there: an object's own attribute, or nothing (then it was inherited)."""

    def __init__(self, owner: Any, attribute: str, replacement: Any) -> None:
        self.owner = owner
        self.attribute = attribute
        self.replacement = replacement
        self._original = vars(owner).get(attribute, _MISSING)

    def install(self) -> None:
        """Put the replacement in."""
        setattr(self.owner, self.attribute, self.replacement)

    def remove(self) -> None:
        """Put the original back, unless the attribute is no longer ours."""
        if vars(self.owner).get(self.attribute) is not self.replacement:
            return
        if self._original is _MISSING:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self._original)


class RunSeams:
    """What is in place from `train()`'s begin to its end: every optimizer's step, and zero_grad of optimizers and models."""

    def __init__(self, session: Session, state: UpdateState) -> None:
        self._session = session
        self._state = state
        self._patches = [
            Patch(Optimizer, "zero_grad", _traced_zero_grad(session, Optimizer.zero_grad)),
            Patch(torch.nn.Module, "zero_grad", _traced_zero_grad(session, torch.nn.Module.zero_grad)),
        ]
        self._handles: list[Any] = []
        self._begun: list[Any] = []

    def install(self) -> None:
        """Hook every optimizer of the process; `optimizer.step` itself is never assigned, since schedulers wrap it."""
        self._handles = [
            optimizer_module.register_optimizer_step_pre_hook(self._step_begins),
            optimizer_module.register_optimizer_step_post_hook(self._step_ends),
        ]
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Take the hooks and the patch out again."""
        for patch in self._patches:
            patch.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _step_begins(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._session.listens():
            within = self._state.scaler_steps[-1] if self._state.scaler_steps else None
            self._begun.append((optimizer, self._session.optimizer_step_begins(optimizer, self._state.scaler, within)))

    def _step_ends(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        # A step that raised had no post-hook: its entry is dropped when an enclosing one ends.
        while self._begun and self._session.listens():
            owner, begun = self._begun.pop()
            if owner is optimizer:
                self._session.optimizer_step_ends(begun, optimizer)
                return


class ForwardSeams:
    """What is in place while forward runs: torch's loss functions, of which a diffusion trainer keeps only the sum."""

    def __init__(self, session: Session) -> None:
        functional = torch.nn.functional
        self._patches = [Patch(functional, name, _watched_loss(session, vars(functional)[name])) for name in LOSS_FUNCTIONS]

    def install(self) -> None:
        """Put the patches in."""
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Take the patches out."""
        for patch in self._patches:
            patch.remove()


class UpdateState:
    """What the seams of one session share: the scaler in use and the `scaler.step` calls that are running."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self.scaler_steps: list[PendingUpdate | None] = []


class BackwardSeams:
    """What is in place only while a processor's `backward` runs."""

    def __init__(
        self, session: Session, state: UpdateState, processor: Any, optimizers: Iterable[Any], loss_of: Callable[[Any], str | None]
    ) -> None:
        self._patches = [*_backward_patches(session, state, processor, loss_of), *_zero_grad_patches(session, optimizers)]

    def install(self) -> None:
        """Put the patches in."""
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Take the patches out, the last first."""
        for patch in reversed(self._patches):
            patch.remove()


def _backward_patches(session: Session, state: UpdateState, processor: Any, loss_of: Callable[[Any], str | None]) -> Iterator[Patch]:
    from modelscope.trainers.hooks.optimizer.base import OptimizerProcessor
    from torch.nn.utils import clip_grad

    yield Patch(torch.autograd, "backward", _traced_backward(session, torch.autograd.backward, loss_of))
    yield Patch(OptimizerProcessor, "clip_grads", staticmethod(_traced_clip(session, state, OptimizerProcessor.clip_grads, "params")))
    for module in (torch.nn.utils, clip_grad):
        yield Patch(module, "clip_grad_norm_", _traced_clip(session, state, vars(module)["clip_grad_norm_"], "parameters"))
    for scaler_class in scaler_classes(processor):
        for name, wrap in _SCALER_METHODS.items():
            if name in vars(scaler_class):
                yield Patch(scaler_class, name, wrap(session, state, vars(scaler_class)[name]))


def _zero_grad_patches(session: Session, optimizers: Iterable[Any]) -> Iterator[Patch]:
    classes = dict.fromkeys(cls for optimizer in optimizers for cls in type(optimizer).__mro__ if cls is not Optimizer)
    for optimizer_class in classes:
        if "zero_grad" in vars(optimizer_class):
            yield Patch(optimizer_class, "zero_grad", _traced_zero_grad(session, vars(optimizer_class)["zero_grad"]))


def scaler_of(processor: Any) -> Any:
    """Return the gradient scaler that a processor holds now, or None. Asked at every backward: scripts replace it."""
    scaler = getattr(processor, "scaler", None)
    return scaler if scaler is not None and hasattr(scaler, "_per_optimizer_states") else None


def scaler_classes(processor: Any) -> list[type]:
    """Return the classes whose scaler methods may run: torch's own, and those from which the processor's scaler inherits."""
    known = getattr(torch.amp, "GradScaler", None)  # since torch 2.3; before, the processor's scaler leads to it
    inherited = type(scaler_of(processor)).__mro__ if scaler_of(processor) is not None else ()
    return list(dict.fromkeys([*([known] if known is not None else []), *(cls for cls in inherited if cls is not object)]))


def _traced_zero_grad(session: Session, original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad(self: Any, *arguments: Any, **keywords: Any) -> Any:
        bound = original.__get__(self, type(self))  # a class may hold any descriptor there
        if not session.listens() or session.is_within("zero_grad"):
            return bound(*arguments, **keywords)
        set_to_none = bool(arguments[0] if arguments else keywords.get("set_to_none", True))
        if isinstance(self, torch.nn.Module):
            span = session.span_begins("zero_grad", optimizer=None, set_to_none=set_to_none)
        else:
            span = session.optimizer_span_begins("zero_grad", self, set_to_none=set_to_none)
        result = bound(*arguments, **keywords)
        session.span_ends(span)
        return result

    return zero_grad


def _watched_loss(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss_function(*arguments: Any, **keywords: Any) -> Any:
        value = original(*arguments, **keywords)
        session.loss_computed(value)
        return value

    return loss_function


def _traced_backward(session: Session, original: Callable[..., Any], loss_of: Callable[[Any], str | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*arguments: Any, **keywords: Any) -> Any:
        # A backward inside another (reentrant checkpointing) is part of the outer one.
        if not session.listens() or session.is_within("backward"):
            return original(*arguments, **keywords)
        key = loss_of(_argument(arguments, keywords, "tensors"))
        span = session.backward_begins(**({} if key is None else {"loss_key": key}))
        result = original(*arguments, **keywords)
        session.backward_ends(span)
        return result

    return backward


def _argument(arguments: tuple[Any, ...], keywords: Mapping[str, Any], name: str) -> Any:
    """Return the first argument of a call, however it was given; None where it is missing, which the original will say."""
    return arguments[0] if arguments else keywords.get(name)


def _traced_clip(session: Session, state: UpdateState, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Watch a clipping function, whose first parameter is called `name`: ModelScope's (`params`) takes only what is trained."""

    @functools.wraps(original)
    def clip_grads(*arguments: Any, **keywords: Any) -> Any:
        parameters = _argument(arguments, keywords, name)
        if not session.listens() or parameters is None:
            return original(*arguments, **keywords)
        # `model.parameters()` is a generator: whoever walks it first leaves nothing for the clipping itself. It gets another one, since
        # torch warns of an empty generator and of nothing else that is empty.
        taken = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        handed: Any = (item for item in taken) if isinstance(parameters, GeneratorType) else taken
        if not isinstance(parameters, Iterator):
            handed = parameters
        rest = {key: value for key, value in keywords.items() if key != name}
        clipped = [item for item in taken if getattr(item, "requires_grad", False)] if name == "params" else taken
        begun = session.clip_begins(clipped, {**dict(zip(("max_norm", "norm_type"), arguments[1:], strict=False)), **rest}, state.scaler)
        returned = original(handed, *arguments[1:], **rest)
        session.clip_ends(begun, clipped, returned, state.scaler)
        return returned

    return clip_grads


def _scales(scaler: Any) -> bool:
    """Tell whether a scaler does anything; one of a script's own need not have torch's `is_enabled`."""
    return bool(getattr(scaler, "_enabled", True))


def _traced_unscale(session: Session, state: UpdateState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale_(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not session.listens() or not _scales(self) or session.is_within("unscale", "optimizer_step"):
            return original(self, *arguments, **keywords)
        state.scaler = self
        span = session.unscale_begins(_argument(arguments, keywords, "optimizer"), self)
        result = original(self, *arguments, **keywords)
        session.span_ends(span)
        return result

    return unscale_


def _traced_scaler_step(session: Session, state: UpdateState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not session.listens() or state.scaler_steps or not _scales(self):
            return original(self, *arguments, **keywords)
        state.scaler = self
        optimizer = _argument(arguments, keywords, "optimizer")
        begun = session.scaler_step_begins(self, optimizer)
        state.scaler_steps.append(begun[0] if begun else None)
        try:
            result = original(self, *arguments, **keywords)
        finally:
            state.scaler_steps.pop()
        session.scaler_step_ends(begun, self, optimizer)
        return result

    return step


def _traced_scaler_update(session: Session, state: UpdateState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not session.listens() or not _scales(self) or session.is_within("scaler_update"):
            return original(self, *arguments, **keywords)
        span = session.span_begins("scaler_update")
        result = original(self, *arguments, **keywords)
        session.scaler_updated(span, self)
        return result

    return update


_SCALER_METHODS = {"unscale_": _traced_unscale, "step": _traced_scaler_step, "update": _traced_scaler_update}
