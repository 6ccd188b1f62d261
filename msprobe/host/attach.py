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
from collections.abc import Callable
from typing import Any

from msprobe import config as configuration
from msprobe import untraced
from msprobe.capture.recorder import Recorder
from msprobe.config import Config
from msprobe.host import environment, seams
from msprobe.host.attachment import Attachment, attachment_of, running
from msprobe.host.hooks import register_trace_hook
from msprobe.notice import say
from msprobe.schema import EndReason
from msprobe.trace import folder as run_folder


class _Process:
    """What msprobe holds in this process: whether it is enabled, its settings, its recorder."""

    def __init__(self) -> None:
        self.config: Config | None = None
        self.recorder: Recorder | None = None
        self.patch: seams.Patch | None = None


_process = _Process()


def enable(**settings: Any) -> None:
    """Record every `train()` of every `EpochBasedTrainer` in this process, from the next one on.

    May be called before or after trainers are built, once or many times; settings given later apply to later `train()` calls.

    Args:
        **settings: the options of `msprobe trace` by the same names (`out`, `name`, `tensors`, `level`, `steps`, `dump`, …); what is not
            given comes from the `MSPROBE_*` variables, else from the defaults.

    Raises:
        UsageError: a setting makes no sense, or the run folder cannot be written. Nothing is installed then.
        HostError: ModelScope cannot be imported, or is too old. Nothing is installed then.
    """
    base = _process.config if _process.config is not None else configuration.from_environment(os.environ)
    config = base.with_arguments(settings)
    environment.load_trainer_class()
    register_trace_hook()
    enable_with(config)


def enable_launched() -> None:
    """Enable in a program that `msprobe trace` started, which may know nothing of msprobe: the name `TraceHook` stays free for it."""
    enable_with(configuration.from_environment(os.environ))


def enable_with(config: Config) -> None:
    """Enable with a whole configuration, see `enable`."""
    trainer_class = environment.load_trainer_class()
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
    for attachment in running():
        attachment.ask_to_detach("disabled")


def current_config() -> Config | None:
    """Return the settings in force, or None while disabled."""
    return _process.config


def is_enabled() -> bool:
    """Tell whether `train()` calls are being recorded."""
    return _process.patch is not None


def _prepare_recorder(config: Config) -> None:
    """Make the run folder at once, so that an unwritable place is an error before anything is installed."""
    recorder = _process.recorder
    if recorder is not None and recorder.belongs_here() and recorder.config.place == config.place:
        recorder.config = config
        return
    _process.recorder = None if environment.is_helper_process() else _new_recorder(config)
    if recorder is not None and not running():  # a training that is running goes on writing where it began
        recorder.close()


def _new_recorder(config: Config) -> Recorder:
    if config.run_dir is not None:
        folder = config.run_dir
        run_folder.join_run_folder(folder)
    else:
        folder = run_folder.make_run_folder(config.out, config.name, run_folder.script_stem(sys.argv), os.environ)
    recorder = Recorder(config, folder, environment.header)
    atexit.register(_at_exit, recorder)
    return recorder


def _at_exit(recorder: Recorder) -> None:
    """Say at the end where the trace is, or that there is none. No imports, no rich: the interpreter is ending."""
    if not recorder.belongs_here():
        return
    if recorder.wrote_anything:
        if not recorder.config.quiet and recorder.rank == 0:
            say(f"recorded {recorder.written_steps} step(s) in {recorder.folder}; next: msprobe summary {recorder.folder}")
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
    if any(not other.session.is_of_this_thread() for other in running()):
        say("this training is not recorded: one in another thread is, and what msprobe watches belongs to the whole process")
        return None
    attachment = None
    try:
        recorder = _recorder_for_train()
        attachment = Attachment(trainer, recorder, environment.progress(recorder))
        attachment.attach()
    except BaseException as error:
        if attachment is not None:
            _detach(attachment, "exception")
        if _process.config.strict or not isinstance(error, Exception):
            raise
        say(f"this training is not recorded ({type(error).__name__}: {error}); it goes on without")
        return None
    return attachment


def _detach(attachment: Attachment, reason: EndReason) -> None:
    try:
        attachment.detach(reason)
    except Exception as error:
        attachment.session.recorder.failed("detach", error)
