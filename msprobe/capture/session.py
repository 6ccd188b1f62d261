"""One live trace: a `train()` call from its first stage to its last, as the host's hooks and seams report it.

`host.attach` makes a session per `train()`; `host.hooks` and `host.seams` call it at every boundary. Each call is an *entry*: its time is
counted as msprobe's own, and an exception inside it is noted by the recorder and never reaches the training. The session numbers the
steps, keeps the spans, has values measured at the right moments, and publishes a step when its values have arrived. It knows no
ModelScope: stages and hooks are names to it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from msprobe.capture.clock import Clock, HostClock, Mark, clock_for, now_ns
from msprobe.capture.ledger import Ledger
from msprobe.capture.memory import memory_reader
from msprobe.capture.modules import Call, ModuleTimer, innermost_module
from msprobe.capture.parameters import ParameterTable, describe_optimizer
from msprobe.capture.recorder import Recorder
from msprobe.capture.spans import Span
from msprobe.capture.step import StepDraft, StepWriter
from msprobe.capture.updates import Clipping, PendingUpdate
from msprobe.schema import Accumulation, EndReason, HookTime, StageRecord, StepRecord

MOST_UNREAD_STEPS = 64
_P = ParamSpec("_P")
_R = TypeVar("_R")


def entry(method: Callable[Concatenate[Session, _P], _R]) -> Callable[Concatenate[Session, _P], _R | None]:
    """Make a session method an entry from the training: timed as ours, and safe to call (it returns None when it failed)."""

    @functools.wraps(method)
    def guarded(self: Session, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        began = now_ns()
        depth = self.depth()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.recorder.failed(method.__name__, error, self.train, self.draft.index if self.draft else None)
            return None
        finally:
            self.charge(depth, now_ns() - began)

    return guarded


class _Stage:
    """A stage that runs outside any step."""

    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.start_ns = start_ns
        self.hooks: list[HookTime] = []


class Session:
    """The trace of one `train()` call. All times are the host's monotonic nanoseconds, device times beside them."""

    def __init__(self, recorder: Recorder, on_step: Callable[[StepRecord], None] | None = None) -> None:
        self.recorder = recorder
        self.train = recorder.trains
        recorder.trains += 1
        self.draft: StepDraft | None = None
        self.ended = False
        self._thread = threading.get_ident()
        self._clock: Clock = HostClock()
        self._origin: Mark | None = None
        self.table: ParameterTable | None = None
        self._model: nn.Module | None = None
        self._timer: ModuleTimer | None = None
        self._writer: StepWriter | None = None
        self._ledger = Ledger(recorder, self.train)
        self._on_step = on_step
        self._read_memory = memory_reader(torch.device("cpu"))
        self._stages: list[_Stage] = []
        self._unread: deque[StepDraft] = deque()
        self._carried_ns = 0
        self._probe_ns = 0

    # How the entries are charged and guarded

    def depth(self) -> int:
        """Return how many spans enclose this moment."""
        return len(self.draft.spans.open) if self.draft is not None else 0

    def charge(self, depth: int, spent_ns: int) -> None:
        """Charge our own time to the innermost span that was open both before and after an entry, else to the step or the next one."""
        self._probe_ns += spent_ns
        if self.draft is None:
            self._carried_ns += spent_ns
            return
        shared = min(depth, len(self.draft.spans.open))
        if shared:
            self.draft.spans.open[shared - 1].probe_ns += spent_ns
        else:
            self.draft.probe_ns += spent_ns

    def listens(self) -> bool:
        """Tell whether what happens on this thread belongs to this session."""
        return not self.ended and threading.get_ident() == self._thread

    def is_within(self, *names: str) -> bool:
        """Tell whether a span of one of these names encloses this moment."""
        return self.draft is not None and any(self.draft.spans.is_within(name) for name in names)

    # The run

    @entry
    def model_is_ready(self, model: nn.Module, optimizers: Sequence[Any]) -> ParameterTable:
        """Take the final model (unwrapped) and optimizers: everything that could replace them in `before_run` has run."""
        device = _device_of(model)
        self._model = model
        self._clock = clock_for(device)
        self._read_memory = memory_reader(device)
        self.table = table = ParameterTable(model)
        for optimizer in optimizers:
            table.optimizer_number(optimizer)
        self._writer = StepWriter(self.train, table, self.recorder.config, self._clock, self.recorder.origin_ns)
        if self._timer is not None:
            self._timer.remove()
        self._timer = ModuleTimer(model, self._module_begins, self._module_ends)
        self._timer.install()
        return table

    @entry
    def broken(self, error: BaseException) -> None:
        """Record the exception that ends the training: in which phase, in which module."""
        phase = self.current_phase()
        module = innermost_module(self._model, error) if self._model is not None else None
        step = self.draft.index if self.draft is not None else None
        if self.draft is not None:
            self._close_step(self._clock.mark(), complete=False)
        self._publish_all()
        where = f" in {phase}" if phase else ""
        place = f", module {module}" if module else ""
        text = _one_line(error)
        message = f"{type(error).__name__}{where}{place}: {text}" if text else f"{type(error).__name__}{where}{place}"
        data = {"type": type(error).__name__, "phase": phase, "module": module, "text": text}
        self.recorder.event("exception", "error", message, self.train, step, **data)

    @entry
    def ends(self, reason: EndReason) -> None:
        """Close the trace of this `train()`: unread steps are waited for, the counts written, the module hooks removed."""
        if self.ended:
            return
        if self.draft is not None:
            self._close_step(self._clock.mark(), complete=False)
        self.ended = True
        if self._timer is not None:
            self._timer.remove()
        self._publish_all()
        self.recorder.write(self._ledger.end_record(reason, self.recorder.dropped, self._probe_ns))

    def current_phase(self) -> str | None:
        """Return the name of what is running: the innermost span's, else the stage's."""
        if self.draft is not None and self.draft.spans.innermost is not None:
            span = self.draft.spans.innermost
            return str(span.attributes["hook"]) if span.name == "hook" else span.name
        return self._stages[-1].name if self._stages else None

    # Stages and hooks

    @entry
    def stage_begins(self, stage: str) -> None:
        """A stage's hooks are about to run (other than the two that bound a step)."""
        if self.draft is None:
            self._stages.append(_Stage(stage, now_ns()))

    @entry
    def stage_ends(self, stage: str) -> None:
        """A stage's hooks have run."""
        end = self._clock.mark()
        if self.draft is not None:
            return
        if self._stages and self._stages[-1].name == stage:
            self._write_stage(self._stages.pop(), end.host_ns)
        self._origin = end

    @entry
    def hook_begins(self, index: int, hook: str, stage: str) -> Span | int:
        """A hook is about to run; hand the answer to `hook_ends`."""
        if self.draft is None:
            return now_ns()
        return self.draft.spans.begin("hook", self._clock.mark(), hook=hook, stage=stage, hook_index=index)

    @entry
    def hook_ends(self, begun: Span | int | None, index: int, hook: str, priority: int) -> None:
        """A hook has run."""
        if isinstance(begun, Span):
            if self.draft is not None:
                self.draft.spans.finish(begun, self._clock.mark())
        elif begun is not None and self._stages:
            self._stages[-1].hooks.append(HookTime(index=index, hook=hook, priority=priority, host_ns=now_ns() - begun))

    # The step

    @entry
    def step_begins(self, epoch: int, iteration: int, accumulation_size: int | None) -> None:
        """`before_train_iter` is about to run its hooks: the batch has been loaded."""
        loaded = self._clock.mark()
        if self.table is None:
            return
        origin = self._origin if self._origin is not None else loaded
        draft = StepDraft(self.recorder.next_step, epoch, iteration, origin, self._carried_ns, self.table)
        self.recorder.next_step += 1
        if accumulation_size:
            draft.accumulation = Accumulation(index=iteration % accumulation_size, size=accumulation_size)
        began = Mark(origin.host_ns + self._carried_ns, origin.event)
        self._carried_ns = 0
        draft.spans.finish(draft.spans.begin("data_load", began), loaded)
        self.draft = draft

    @entry
    def forward_begins(self) -> None:
        """`before_train_iter` has run its hooks: the training step itself begins."""
        if self.draft is not None:
            self.draft.spans.begin("forward", self._clock.mark())

    @entry
    def forward_ends(self, outputs: Mapping[str, Any] | None, loss_keys: Iterable[str]) -> None:
        """`after_train_iter` is about to run its hooks: forward is over; its losses are kept before a hook changes them."""
        if self.draft is None:
            return
        self.draft.spans.finish_all(self._clock.mark())
        for key, value in (outputs or {}).items():
            if (key in loss_keys or "loss" in key) and _is_scalar(value):
                self.draft.losses[key] = self.draft.readback.put(value) if isinstance(value, torch.Tensor) else float(value)

    @entry
    def step_ends(self) -> None:
        """`after_train_iter` has run all hooks: the step is over."""
        end = self._clock.mark()
        if self.draft is not None:
            self._close_step(end, complete=True)
            self._publish_ready()
        else:
            self._origin = end

    # Inside the optimizer's hook

    @entry
    def update_begins(self, optimizers: Sequence[Any], engine: bool) -> None:
        """The processor's `backward` is about to run: note the learning rates, which a scheduler changes before the step ends."""
        if self.draft is None or self.table is None:
            return
        for optimizer in optimizers:
            self._know(optimizer)
        self.draft.engine_steps = engine
        rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
        put = self.draft.readback.put
        self.draft.learning_rates = [put(rate) if isinstance(rate, torch.Tensor) else float(rate) for rate in rates if rate is not None]

    @entry
    def span_begins(self, name: str, /, **attributes: Any) -> Span | None:
        """A phase begins."""
        return None if self.draft is None else self.draft.spans.begin(name, self._clock.mark(), **attributes)

    @entry
    def span_ends(self, span: Span | None) -> None:
        """A phase ends."""
        if span is not None and self.draft is not None:
            self.draft.spans.finish(span, self._clock.mark())

    @entry
    def clip_begins(self, parameters: Sequence[torch.Tensor], arguments: Mapping[str, Any], scaler: Any) -> tuple[Clipping, Span] | None:
        """Clipping is about to run on these parameters."""
        if self.draft is None or self.draft.spans.is_within("clip_grads"):
            return None
        clipping = self.draft.updates.clip_begins(parameters, dict(arguments), scaler)
        if self.draft.updates.saw_scaled:
            self._ledger.clip_saw_scaled(self.draft.index, self.draft.updates.saw_scaled)
        return clipping, self.draft.spans.begin("clip_grads", self._clock.mark())

    @entry
    def clip_ends(self, begun: tuple[Clipping, Span] | None, parameters: Sequence[torch.Tensor], returned: Any, scaler: Any) -> None:
        """Clipping has run and returned the total norm that it saw."""
        if begun is None or self.draft is None:
            return
        clipping, span = begun
        self.draft.spans.finish(span, self._clock.mark())
        self.draft.updates.clip_ends(clipping, parameters, returned, scaler)

    @entry
    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> tuple[PendingUpdate, Span] | None:
        """`scaler.step` is about to run for an optimizer."""
        if self.draft is None:
            return None
        number = self._know(optimizer)
        update = self.draft.updates.scaler_step_begins(scaler, optimizer)
        return update, self.draft.spans.begin("optimizer_step", self._clock.mark(), optimizer=number)

    @entry
    def scaler_step_ends(self, begun: tuple[PendingUpdate, Span] | None, scaler: Any, optimizer: Any) -> None:
        """`scaler.step` has returned; whether it updated stands in its overflow flags."""
        if begun is None or self.draft is None:
            return
        update, span = begun
        self.draft.spans.finish(span, self._clock.mark())
        self.draft.updates.scaler_step_ends(scaler, update, optimizer)

    @entry
    def scaler_updated(self, span: Span | None, scaler: Any) -> None:
        """`scaler.update` has returned."""
        if self.draft is not None:
            if span is not None:
                self.draft.spans.finish(span, self._clock.mark())
            self.draft.updates.scaler_updated(scaler)

    @entry
    def optimizer_step_begins(self, optimizer: Any, scaler: Any, within: PendingUpdate | None) -> Span | None:
        """An optimizer's own step is about to run; within `scaler.step` it has no span of its own."""
        if self.draft is None:
            return None
        number = self._know(optimizer)
        self.draft.updates.optimizer_step_begins(optimizer, scaler, within)
        if self.draft.spans.is_within("optimizer_step"):
            return None
        return self.draft.spans.begin("optimizer_step", self._clock.mark(), optimizer=number)

    def _know(self, optimizer: Any) -> int:
        """Return an optimizer's number; one that was not there at the start is announced."""
        assert self.table is not None
        known = len(self.table.optimizers)
        number = self.table.optimizer_number(optimizer)
        if number == known:
            info = describe_optimizer(number, optimizer)
            self._ledger.new_optimizer(self.draft.index if self.draft else None, info)
        return number

    def optimizer_number(self, optimizer: Any) -> int | None:
        """Return an optimizer's number, or None before the model is ready."""
        return None if self.table is None else self.table.optimizer_number(optimizer)

    # Modules

    @entry
    def _module_begins(self, name: str) -> Call | None:
        draft = self.draft
        if draft is None or not self.listens() or draft.spans.innermost is None or draft.spans.innermost.name != "forward":
            return None
        number = draft.call_counts.get(name, 0)
        draft.call_counts[name] = number + 1
        draft.sequence += 1
        call = Call(draft.sequence - 1, name, number, self._clock.mark())
        draft.calls.append(call)
        return call

    @entry
    def _module_ends(self, call: Call) -> None:
        call.end = self._clock.mark()

    # Publishing

    def _close_step(self, end: Mark, complete: bool) -> None:
        draft = self.draft
        assert draft is not None
        draft.spans.finish_all(end)
        draft.end = end
        draft.complete = complete
        draft.memory = self._read_memory()
        draft.readback.launch()
        if self._timer is not None:
            self._timer.step_ends()
        self._unread.append(draft)
        self._origin = end
        self.draft = None

    def _publish_ready(self) -> None:
        """Write the steps whose values have arrived; when too many are waiting, wait for the oldest."""
        if len(self._unread) > MOST_UNREAD_STEPS:
            self._unread[0].readback.wait()
        while self._unread and self._unread[0].readback.ready():
            self._publish(self._unread.popleft())

    def _publish_all(self) -> None:
        while self._unread:
            self._unread[0].readback.wait()
            self._publish(self._unread.popleft())

    def _publish(self, draft: StepDraft) -> None:
        assert self._writer is not None
        for record in self._writer.records_of(draft):
            self.recorder.write(record)
            if isinstance(record, StepRecord):
                self._ledger.count(record)
                if self._on_step is not None:
                    self._on_step(record)
        self._clock.release(draft.marks())

    def _write_stage(self, stage: _Stage, end_ns: int) -> None:
        last = self.recorder.next_step - 1
        self.recorder.write(
            StageRecord(
                train=self.train,
                stage=stage.name,
                after_step=last if last >= 0 else None,
                start_ns=stage.start_ns - self.recorder.origin_ns,
                host_ns=end_ns - stage.start_ns,
                hooks=stage.hooks,
            )
        )


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter that is on an accelerator, else the CPU."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_line(error: BaseException) -> str:
    """Return the exception's first line, at most 500 characters of it."""
    return str(error).split("\n", 1)[0][:500]
