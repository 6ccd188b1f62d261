"""A trace inside one trainer while its `train()` runs: what it puts in, and takes out again.

`host.attach` makes an attachment per call of `train()`; ModelScope then calls it through `host.hooks`, at every stage and around every
processor's `backward`. It tells the session what happens and installs what `host.seams` describes. Its own failures stay here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from msprobe.capture.loss_terms import is_denoiser
from msprobe.capture.recorder import Recorder
from msprobe.capture.session import Session
from msprobe.capture.spans import Span
from msprobe.errors import AnomalyStop, NothingSelected
from msprobe.host import hooks as host_hooks
from msprobe.host import seams
from msprobe.host.hooks import TraceHook, TraceOptimizerProcessor
from msprobe.schema import EndReason, HookInfo, ModelRecord

_P = ParamSpec("_P")


def shielded(method: Callable[Concatenate[Attachment, _P], None]) -> Callable[Concatenate[Attachment, _P], None]:
    """Keep a failure of an attachment's own method away from the training, which called it."""

    @functools.wraps(method)
    def shield(self: Attachment, /, *arguments: _P.args, **keywords: _P.kwargs) -> None:
        try:
            method(self, *arguments, **keywords)
        except (NothingSelected, AnomalyStop):
            raise  # meant for the user, not a failure of ours
        except Exception as error:
            self.session.recorder.failed(method.__name__, error, self.session.train)

    return shield


# The attachments of this process by the `id` of their trainer.
_running: dict[int, Attachment] = {}


def attachment_of(trainer: Any) -> Attachment | None:
    """Return the attachment of a trainer whose `train()` is being traced, or None (a copy of such a trainer has none)."""
    found = _running.get(id(trainer))
    return found if found is not None and found.trainer is trainer else None


def running() -> list[Attachment]:
    """Return every attachment whose `train()` is running."""
    return list(_running.values())


class Attachment:
    """A trace inside one trainer while its `train()` runs."""

    def __init__(self, trainer: Any, recorder: Recorder, on_step: Callable[[Any], None] | None) -> None:
        self.trainer = trainer
        self.session = Session(recorder, on_step)
        self.update_state = seams.UpdateState()
        self.has_begun = False
        self._recorder = recorder
        self._run_seams = seams.RunSeams(self.session, self.update_state)
        self._shadow = seams.Patch(trainer, "invoke_hook", host_hooks.InvokeHook(trainer))
        self._hook: TraceHook | None = None
        self._stage_depth = 0
        self._backward_seams: list[seams.BackwardSeams | None] = []
        self._forward_seams: seams.ForwardSeams | None = None
        self._wanted_end: EndReason | None = None

    def attach(self) -> None:
        """Put the hook and the seams in."""
        _running[id(self.trainer)] = self
        if not any(isinstance(hook, TraceHook) for hook in self.trainer._hooks):
            self._hook = TraceHook()
            self.trainer.register_hook(self._hook)
        self._shadow.install()
        self._run_seams.install()

    def detach(self, reason: EndReason) -> None:
        """Take everything out, in the opposite order, and close the session. Doing it twice does nothing."""
        if _running.pop(id(self.trainer), None) is None:
            return
        with contextlib.ExitStack() as stack:  # the last first, and each whatever becomes of the others (a Ctrl-C in here)
            stack.callback(self.session.ends, reason)
            stack.callback(self._take_hook_out)
            stack.callback(self._unwrap_processors)
            stack.callback(self._shadow.remove)
            stack.callback(self._run_seams.remove)
            for bracket in (self._forward_seams, *self._backward_seams):
                if bracket is not None:
                    stack.callback(bracket.remove)

    def _take_hook_out(self) -> None:
        hooks = self.trainer._hooks
        hooks[:] = [hook for hook in hooks if hook is not self._hook]

    def _unwrap_processors(self) -> None:
        for hook in host_hooks.optimizer_hooks(self.trainer):
            if type(hook.processor) is TraceOptimizerProcessor:
                hook.set_processor(hook.processor.__wrapped__)

    def ask_to_detach(self, reason: EndReason) -> None:
        """Detach now, or, inside a stage's hooks, when they have run."""
        if self._stage_depth:
            self._wanted_end = reason
        else:
            self.detach(reason)

    @shielded
    def begin(self) -> None:
        """`before_run` has run every other hook: wrap the processors, and tell the session what is trained."""
        if self.has_begun:
            return
        self.wrap_processors()
        model = unwrapped_model(self.trainer)
        if self.session.model_is_ready(model, self.optimizers()) is not None:
            self.has_begun = True
            if any(is_denoiser(name, child) for name, child in model.named_children()):
                self._forward_seams = seams.ForwardSeams(self.session)
            self._recorder.write(self._describe(model))

    @shielded
    def wrap_processors(self) -> None:
        """Stand around every optimizer processor that is not wrapped yet."""
        for hook in host_hooks.optimizer_hooks(self.trainer):
            if hook.processor is not None and type(hook.processor) is not TraceOptimizerProcessor:
                hook.set_processor(TraceOptimizerProcessor(hook.processor, self))

    @shielded
    def update_begins(self, processor: Any, loss_keys: Any) -> None:
        """A processor's `backward` is about to run: put its seams in. One processor may call another's."""
        self._backward_seams.append(None)
        self.update_state.scaler = seams.scaler_of(processor)
        self.session.update_begins(self.optimizers(), engine=_is_engine(processor))
        bracket = host_hooks.bracket(self, processor, list(loss_keys))
        self._backward_seams[-1] = bracket
        bracket.install()

    @shielded
    def update_ends(self) -> None:
        """A processor's `backward` has ended, normally or not: take its seams out."""
        bracket = self._backward_seams.pop() if self._backward_seams else None
        if bracket is not None:
            bracket.remove()

    def optimizers(self) -> list[Any]:
        """Return the trainer's optimizer, as it is now."""
        optimizer = getattr(self.trainer, "optimizer", None)
        return [optimizer] if hasattr(optimizer, "param_groups") else []

    # The stages, as `invoke_hook` reports them

    @shielded
    def stage_begins(self, stage: str) -> None:
        """A stage's hooks are about to run."""
        self._stage_depth += 1
        if stage == "before_train_iter" and self._stage_depth == 1:
            self.session.step_begins(self.trainer.epoch, self.trainer.iter, getattr(self.trainer, "cumulative_iters", None))
        elif stage == "after_train_iter" and self._stage_depth == 1:
            if self._forward_seams is not None:
                self._forward_seams.remove()
            self.session.forward_ends(getattr(self.trainer, "train_outputs", None), self._loss_keys(), prior_weight_of(self.trainer))
        else:
            self.session.stage_begins(stage)

    @shielded
    def stage_ends(self, stage: str) -> None:
        """A stage's hooks have run."""
        if stage == "before_train_iter" and self._stage_depth == 0:
            if self._forward_seams is not None:
                self._forward_seams.install()
            self.session.forward_begins(getattr(self.trainer, "data_batch", None))
        elif stage == "after_train_iter" and self._stage_depth == 0:
            self.session.step_ends()
        else:
            self.session.stage_ends(stage)
        if self._wanted_end is not None and not self._stage_depth:
            self.detach(self._wanted_end)

    @shielded
    def hook_ends(self, begun: Span | int | None, index: int, hook: Any) -> None:
        """A hook has run; `begun` is what the session answered when it began."""
        self.session.hook_ends(begun, index, type(hook).__name__, host_hooks.priority_of(hook))

    def leaves_stage(self) -> None:
        """A stage was left, normally or by an exception."""
        self._stage_depth -= 1

    def _loss_keys(self) -> set[str]:
        return {key for hook in host_hooks.optimizer_hooks(self.trainer) for key in hook.loss_keys}

    def _describe(self, model: Any) -> ModelRecord:
        table = self.session.table
        assert table is not None
        others = [hook for hook in self.trainer._hooks if not isinstance(hook, TraceHook)]
        processors = [type(hook.processor.__wrapped__).__name__ for hook in host_hooks.optimizer_hooks(self.trainer) if hook.processor]
        return ModelRecord(
            train=self.session.train,
            trainer=type(self.trainer).__name__,
            model_class=type(model).__name__,
            processor=processors[0] if processors else "none",
            hooks=[_describe_hook(index, hook) for index, hook in enumerate(others)],
            optimizers=table.describe_optimizers(),
            parameters=table.describe_parameters(),
        )


def prior_weight_of(trainer: Any) -> float | None:
    """Return the weight of the prior loss where a Dreambooth trainer preserves a prior, else None."""
    weight = getattr(trainer, "prior_loss_weight", None)
    return float(weight) if getattr(trainer, "with_prior_preservation", False) and isinstance(weight, (int, float)) else None


def unwrapped_model(trainer: Any) -> Any:
    """Return the model below DDP and its like, as ModelScope unwraps it."""
    return trainer.unwrap_module(trainer.model)


def _describe_hook(index: int, hook: Any) -> HookInfo:
    return HookInfo(index=index, hook=type(hook).__name__, priority=host_hooks.priority_of(hook), stages=host_hooks.stages_of(hook))


def _is_engine(processor: Any) -> bool:
    """Tell whether an engine does backward, clipping and step behind the processor's back (DeepSpeed)."""
    return any(cls.__name__ == "DeepspeedProcessor" for cls in type(processor).__mro__)
