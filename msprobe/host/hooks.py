"""`TraceHook` and `TraceOptimizerProcessor`: how a trace sits inside ModelScope's own hook machinery.

`host.attach` puts one `TraceHook` into a trainer for the time of `train()`. The hook installs the processor, last of all in `before_run`:
by then AMP, Apex and DeepSpeed have put theirs in (put in earlier, ours would fail their exact-type check and silently switch mixed
precision off: modelscope/trainers/hooks/optimizer/torch_optimizer_hook.py, `register_processor`). `invoke_hook` is what bounds the
phases. Neither changes what the hooks around them see.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import wrapt
from modelscope.trainers.hooks.builder import HOOKS
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook
from modelscope.trainers.hooks.priority import Priority, get_priority

from msprobe.errors import HostError
from msprobe.host import seams

if TYPE_CHECKING:
    from msprobe.host.attachment import Attachment

_STEP_DELEGATES = {
    "before_train_iter": "before_iter",
    "after_train_iter": "after_iter",
    "before_train_epoch": "before_epoch",
    "after_train_epoch": "after_epoch",
    "before_val_epoch": "before_epoch",
    "after_val_epoch": "after_epoch",
}
# One per evaluated batch: recording them would make a step's record grow with the evaluation set.
_UNRECORDED_STAGES = ("before_val_iter", "after_val_iter")


class TraceHook(Hook):  # type: ignore[misc]  # ModelScope has no types
    """Records training. Put it into `callbacks=` or `cfg.train.hooks`, or let `msprobe.enable()` do it.

    It runs last (priority 100), keeps no state in checkpoints, and does not show in ModelScope's printed list of hooks, so that both stay
    as they are without it.
    """

    PRIORITY = Priority.LOWEST
    # Hooks with this attribute are not counted when hook states are saved (checkpoint_hook.py, `_create_training_state`).
    _should_save = False

    def after_init(self, trainer: Any) -> None:
        """Built from the configuration or as a callback: enable msprobe, and leave no entry in the configuration that is saved."""
        from msprobe.host import attach

        _forget_in_configuration(trainer.cfg)
        attach.enable()

    def register_processor(self, trainer: Any) -> None:
        """Wrap processors anew when an evaluation in mid-training registered them again; before `before_run` do nothing."""
        attachment = _attachment_of(trainer)
        if attachment is not None and attachment.has_begun:
            attachment.wrap_processors()

    def before_run(self, trainer: Any) -> None:
        """Every other hook has prepared model, optimizer and processor: take them as they are now."""
        attachment = _attachment_of(trainer)
        if attachment is not None:
            attachment.begin()

    def get_triggered_stages(self) -> list[str]:
        """Return nothing: ModelScope prints the hooks of each stage, and that print stays as it was."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        """A trainer that is pickled or copied takes a hook along that does nothing and needs no msprobe."""
        return Hook, ()


class TraceOptimizerProcessor(wrapt.ObjectProxy):  # type: ignore[type-arg]  # only newer wrapt is generic
    """Stands around the processor that ModelScope chose; `isinstance` and attributes answer as the wrapped one."""

    def __init__(self, wrapped: Any, attachment: Attachment) -> None:
        super().__init__(wrapped)
        self._self_attachment = attachment

    def backward(self, trainer: Any, loss_keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """Run the wrapped `backward` with the seams in place; outside a traced step just run it."""
        attachment = self._self_attachment
        if attachment.session.draft is None or not attachment.session.listens():
            return self.__wrapped__.backward(trainer, loss_keys, *arguments, **keywords)
        try:
            attachment.update_begins(self.__wrapped__, loss_keys)
            return self.__wrapped__.backward(trainer, loss_keys, *arguments, **keywords)
        finally:
            attachment.update_ends()

    def __copy__(self) -> Any:
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


def register_trace_hook() -> None:
    """Put `TraceHook` into ModelScope's HOOKS once; another class of that name is left in place.

    Raises:
        HostError: somebody else's class has the name.
    """
    known = HOOKS.modules.get("default", {}).get("TraceHook")
    if known is None:
        HOOKS.register_module(module_name="TraceHook", module_cls=TraceHook)
    elif known is not TraceHook and known.__module__ != TraceHook.__module__:
        raise HostError(
            f"ModelScope's HOOKS already has a 'TraceHook': {known.__module__}.{known.__qualname__}; "
            f"{TraceHook.__module__}.{TraceHook.__qualname__} was not registered. Register yours under another name."
        )


class InvokeHook:
    """Stands in for one traced trainer's `invoke_hook`, timing every hook; a pickled or copied trainer gets its own method back.

    The loop is ModelScope's (modelscope/trainers/trainer.py, `invoke_hook`): over the live list, each hook that has the stage. A trainer
    with an `invoke_hook` of its own keeps it, and only its stages are timed.
    """

    def __init__(self, trainer: Any) -> None:
        from modelscope.trainers.trainer import EpochBasedTrainer

        self._trainer = trainer
        self._original = trainer.invoke_hook
        self._is_modelscopes = getattr(self._original, "__func__", None) is EpochBasedTrainer.invoke_hook

    def __call__(self, fn_name: str) -> None:
        """Run a stage's hooks, timed."""
        attachment = _attachment_of(self._trainer)
        if attachment is None or not attachment.session.listens():
            self._original(fn_name)
            return
        attachment.stage_begins(fn_name)
        try:
            if self._is_modelscopes:
                _run_hooks(attachment, self._trainer, fn_name)
            else:
                self._original(fn_name)
        finally:
            attachment.leaves_stage()
        attachment.stage_ends(fn_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._trainer, "invoke_hook")


def _run_hooks(attachment: Attachment, trainer: Any, stage: str) -> None:
    session = attachment.session
    index = -1
    for hook in trainer._hooks:
        index += not isinstance(hook, TraceHook)
        if not hasattr(hook, stage):
            continue
        if isinstance(hook, TraceHook) or not acts(hook, stage) or stage in _UNRECORDED_STAGES:
            getattr(hook, stage)(trainer)
            continue
        name = type(hook).__name__
        begun = session.hook_begins(index, name, stage)
        getattr(hook, stage)(trainer)
        attachment.hook_ends(begun, index, hook)


def acts(hook: Any, stage: str) -> bool:
    """Tell whether a hook does anything at a stage: it does not merely inherit the base class's empty method."""
    return any(_overrides(hook, name) for name in (stage, _STEP_DELEGATES.get(stage)) if name is not None)


def _overrides(hook: Any, name: str) -> bool:
    if name in getattr(hook, "__dict__", {}):
        return True
    return hasattr(hook, name) and getattr(type(hook), name, None) is not getattr(Hook, name, None)


def stages_of(hook: Any) -> list[str]:
    """Return the stages at which a hook acts, in ModelScope's order."""
    return [stage for stage in Hook.stages if acts(hook, stage)]


def priority_of(hook: Any) -> int:
    """Return a hook's priority as a number, as `register_hook` reads it."""
    return int(get_priority(getattr(hook, "PRIORITY", Priority.NORMAL)))


def optimizer_hooks(trainer: Any) -> list[Any]:
    """Return every hook of the trainer that has an optimizer processor."""
    return [hook for hook in trainer._hooks if isinstance(hook, OptimizerHook)]


def bracket(attachment: Attachment, processor: Any, loss_keys: list[str]) -> seams.BackwardSeams:
    """Return the seams for one call of a processor's `backward`."""
    outputs = getattr(attachment.trainer, "train_outputs", None)
    outputs = outputs if isinstance(outputs, Mapping) else {}
    calls = iter(loss_keys)

    def loss_of(tensors: Any) -> str | None:
        # Every processor goes through the keys in order, once each; a scaled loss is another tensor than the output.
        root = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        following = next(calls, None)
        return next((key for key in loss_keys if outputs.get(key) is root), following)

    return seams.BackwardSeams(attachment.session, attachment.update_state, processor, attachment.optimizers(), loss_of)


def _attachment_of(trainer: Any) -> Attachment | None:
    from msprobe.host.attachment import attachment_of  # it stands above this module

    return attachment_of(trainer)


def _forget_in_configuration(configuration: Any) -> None:
    """Take `{'type': 'TraceHook'}` out of `cfg.train.hooks`, which ModelScope saves into the output's configuration.json."""
    hooks = configuration.safe_get("train.hooks", None) if hasattr(configuration, "safe_get") else None
    if isinstance(hooks, list):
        hooks[:] = [entry for entry in hooks if not (isinstance(entry, dict) and entry.get("type") == "TraceHook")]
