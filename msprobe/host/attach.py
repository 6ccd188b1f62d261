"""`enable()` and `disable()`: putting a trace into a trainer for the time of its `train()`, and taking all of it out again.

While msprobe is enabled, one class attribute is replaced for good: `EpochBasedTrainer.train`. The replacement attaches (an `Attachment`
per call: session, hook, shadowed `invoke_hook`), calls the original, records an exception, and detaches. This module owns the process's
recorder. It never measures, and never lets its own failure reach the training.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from msprobe import config as configuration
from msprobe import untraced
from msprobe.capture.recorder import Recorder
from msprobe.capture.session import Session
from msprobe.config import Config
from msprobe.host import environment, seams
from msprobe.host import hooks as host_hooks
from msprobe.host.hooks import TraceHook, TraceOptimizerProcessor
from msprobe.notice import say
from msprobe.schema import EndReason, HookInfo, ModelRecord
from msprobe.trace import folder as run_folder


class _Process:
    """What msprobe holds in this process: whether it is enabled, its settings, its recorder, the running attachments."""

    def __init__(self) -> None:
        self.config: Config | None = None
        self.recorder: Recorder | None = None
        self.patch: seams.Patch | None = None
        self.attachments: dict[int, Attachment] = {}
        self.next_step = 0


_process = _Process()


def enable(**settings: Any) -> None:
    """Record every `train()` of every `EpochBasedTrainer` in this process, from the next one on.

    May be called before or after trainers are built, once or many times; settings given later apply to later `train()` calls.

    Args:
        **settings: the options of `msprobe trace` by the same names (`out`, `name`, `tensors`, `steps`, `strict`, `quiet`); what is not
            given comes from the `MSPROBE_*` variables, else from the defaults.

    Raises:
        UsageError: a setting makes no sense, or the run folder cannot be written. Nothing is installed then.
        HostError: ModelScope cannot be imported, or is too old. Nothing is installed then.
    """
    base = _process.config if _process.config is not None else configuration.from_environment(os.environ)
    config = base.with_arguments(settings)
    trainer_class = environment.load_trainer_class()
    host_hooks.register_trace_hook()
    _prepare_recorder(config)
    _process.config = config
    if _process.patch is None or vars(trainer_class).get("train") is not _process.patch.replacement:
        _process.patch = seams.Patch(trainer_class, "train", _traced_train(trainer_class.train))
        _process.patch.install()


def disable() -> None:
    """Stop recording and take everything out; a running `train()` goes on untraced.

    Called from inside a hook, it takes effect when the stage's hooks have run: ModelScope is walking its list of hooks until then.
    """
    if _process.patch is not None:
        _process.patch.remove()
        _process.patch = None
    _process.config = None
    for attachment in list(_process.attachments.values()):
        attachment.ask_to_detach("disabled")


def is_enabled() -> bool:
    """Tell whether `train()` calls are being recorded."""
    return _process.patch is not None


def attachment_of(trainer: Any) -> Attachment | None:
    """Return the attachment of a trainer whose `train()` is being traced, or None (a copy of such a trainer has none)."""
    found = _process.attachments.get(id(trainer))
    return found if found is not None and found.trainer is trainer else None


class Attachment:
    """A trace inside one trainer while its `train()` runs."""

    def __init__(self, trainer: Any, recorder: Recorder, on_step: Callable[[Any], None] | None) -> None:
        self.trainer = trainer
        self.session = Session(recorder, on_step)
        self.update_state = seams.UpdateState()
        self.has_begun = False
        self._recorder = recorder
        self._run_seams = seams.RunSeams(self.session, self.update_state)
        self._shadow = seams.Patch(trainer, "invoke_hook", types.MethodType(host_hooks.invoke_hook, trainer))
        self._hook: TraceHook | None = None
        self._stage_depth = 0
        self._wanted_end: EndReason | None = None

    def attach(self) -> None:
        """Put the hook and the seams in."""
        if not any(isinstance(hook, TraceHook) for hook in self.trainer._hooks):
            self._hook = TraceHook()
            self.trainer.register_hook(self._hook)
        self._shadow.install()
        self._run_seams.install()

    def detach(self, reason: EndReason) -> None:
        """Take everything out, in the opposite order, and close the session. Doing it twice does nothing."""
        if _process.attachments.pop(id(self.trainer), None) is None:
            return
        self._run_seams.remove()
        self._shadow.remove()
        for hook in host_hooks.optimizer_hooks(self.trainer):
            if isinstance(type(hook.processor), type) and type(hook.processor) is TraceOptimizerProcessor:
                hook.set_processor(hook.processor.__wrapped__)
        if self._hook is not None and self._hook in self.trainer._hooks:
            self.trainer._hooks.remove(self._hook)
        self.session.ends(reason)
        _process.next_step = max(_process.next_step, self._recorder.next_step)

    def ask_to_detach(self, reason: EndReason) -> None:
        """Detach now, or, inside a stage's hooks, when they have run."""
        if self._stage_depth:
            self._wanted_end = reason
        else:
            self.detach(reason)

    def begin(self) -> None:
        """`before_run` has run every other hook: wrap the processors, and tell the session what is trained."""
        try:
            self.wrap_processors()
            model = unwrapped_model(self.trainer)
            optimizers = self.optimizers()
            if self.session.model_is_ready(model, optimizers) is not None:
                self.has_begun = True
                self._recorder.write(self._describe(model))
        except Exception as error:
            self._recorder.failed("begin", error, self.session.train)

    def wrap_processors(self) -> None:
        """Stand around every optimizer processor that is not wrapped yet."""
        for hook in host_hooks.optimizer_hooks(self.trainer):
            if hook.processor is not None and type(hook.processor) is not TraceOptimizerProcessor:
                hook.set_processor(TraceOptimizerProcessor(hook.processor, self))

    def backward_seams(self, processor: Any, loss_keys: Any) -> seams.BackwardSeams:
        """Note the update that begins, and return the seams for it."""
        self.update_state.scaler = seams.scaler_of(processor)
        self.session.update_begins(self.optimizers(), engine=_is_engine(processor))
        return host_hooks.bracket(self, processor, list(loss_keys))

    def optimizers(self) -> list[Any]:
        """Return the trainer's optimizer, as it is now."""
        optimizer = getattr(self.trainer, "optimizer", None)
        return [optimizer] if hasattr(optimizer, "param_groups") else []

    # The stages, as `invoke_hook` reports them

    def stage_begins(self, stage: str) -> None:
        """A stage's hooks are about to run."""
        self._stage_depth += 1
        if stage == "before_train_iter" and self.session.draft is None:
            self.session.step_begins(self.trainer.epoch, self.trainer.iter, getattr(self.trainer, "cumulative_iters", None))
        elif stage == "after_train_iter" and self._stage_depth == 1:
            self.session.forward_ends(getattr(self.trainer, "train_outputs", None), self._loss_keys())
        else:
            self.session.stage_begins(stage)

    def stage_ends(self, stage: str) -> None:
        """A stage's hooks have run."""
        if stage == "before_train_iter" and self._stage_depth == 0:
            self.session.forward_begins()
        elif stage == "after_train_iter" and self._stage_depth == 0:
            self.session.step_ends()
        else:
            self.session.stage_ends(stage)
        if self._wanted_end is not None and not self._stage_depth:
            self.detach(self._wanted_end)

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


def unwrapped_model(trainer: Any) -> Any:
    """Return the model below DDP and its like, as ModelScope unwraps it."""
    return trainer.unwrap_module(trainer.model)


def _describe_hook(index: int, hook: Any) -> HookInfo:
    return HookInfo(index=index, hook=type(hook).__name__, priority=host_hooks.priority_of(hook), stages=host_hooks.stages_of(hook))


def _is_engine(processor: Any) -> bool:
    """Tell whether an engine does backward, clipping and step behind the processor's back (DeepSpeed)."""
    return any(cls.__name__ == "DeepspeedProcessor" for cls in type(processor).__mro__)


def _prepare_recorder(config: Config) -> None:
    """Make the run folder at once, so that an unwritable place is an error before anything is installed."""
    recorder = _process.recorder
    if recorder is not None and recorder.belongs_here():
        if (recorder.config.out, recorder.config.name, recorder.config.run_dir) == (config.out, config.name, config.run_dir):
            recorder.config = config
            return
        recorder.close()
    _process.recorder = None if environment.is_helper_process() else _new_recorder(config)


def _new_recorder(config: Config) -> Recorder:
    if config.run_dir is not None:
        folder = config.run_dir
        run_folder.join_run_folder(folder)
    else:
        folder = run_folder.make_run_folder(config.out, config.name, run_folder.script_stem(sys.argv), os.environ)
    recorder = Recorder(config, folder, environment.header, _process.next_step)
    atexit.register(_at_exit, recorder)
    return recorder


def _at_exit(recorder: Recorder) -> None:
    """Say at the end where the trace is, or that there is none. No imports, no rich: the interpreter is ending."""
    if not recorder.belongs_here():
        return
    if recorder.wrote_anything:
        if not recorder.config.quiet:
            say(f"recorded {recorder.next_step} step(s) in {recorder.folder}; next: msprobe summary {recorder.folder}")
        return
    untraced.report(recorder.folder, recorder.config.quiet, os.environ.get(untraced.LAUNCHER_VARIABLE))


def _recorder_for_train() -> Recorder:
    """Return the recorder of this process; a child that trains on its own gets one of its own."""
    recorder = _process.recorder
    if recorder is None or not recorder.belongs_here():
        assert _process.config is not None
        recorder = _process.recorder = _new_recorder(_process.config)
    return recorder


def _traced_train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **keywords: Any) -> Any:
        attachment = _attach(self)
        if attachment is None:
            return original(self, *arguments, **keywords)
        try:
            result = original(self, *arguments, **keywords)
        except BaseException as error:
            attachment.session.broken(error)
            _detach(attachment, "interrupted" if isinstance(error, KeyboardInterrupt) else "exception")
            raise
        _detach(attachment, "finished")
        return result

    return train


def _attach(trainer: Any) -> Attachment | None:
    """Attach to a trainer, or leave it alone: msprobe is disabled, it is attached already, or attaching failed."""
    if _process.config is None or attachment_of(trainer) is not None:
        return None
    try:
        recorder = _recorder_for_train()
        attachment = Attachment(trainer, recorder, environment.progress(recorder))
        _process.attachments[id(trainer)] = attachment
        attachment.attach()
    except Exception as error:
        if _process.config.strict:
            raise
        say(f"this training is not recorded ({type(error).__name__}: {error}); it goes on without")
        return None
    return attachment


def _detach(attachment: Attachment, reason: EndReason) -> None:
    try:
        attachment.detach(reason)
    except Exception as error:
        attachment.session.recorder.failed("detach", error)
