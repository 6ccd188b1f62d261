"""One live trace: a `train()` call from its first stage to its last, as the host's hooks and seams report it.

`host.attach` makes a session per `train()`; `host.hooks` and `host.seams` call it at every boundary. Each call is an *entry*: its time is
counted as msprobe's own, and an exception inside it is noted by the recorder and never reaches the training. The session numbers the
steps, keeps the spans, has values measured at the right moments, and publishes a step when its values have arrived. It knows no
ModelScope: stages and hooks are names to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from msprobe.capture.clock import Mark, clock_for, now_ns
from msprobe.capture.entries import entry
from msprobe.capture.loss_terms import is_denoiser
from msprobe.capture.memory import memory_reader
from msprobe.capture.modules import Call, ModuleTimer, dynamo_is_in_use, innermost_module, is_compiled
from msprobe.capture.outputs import Output, OutputRecorder, selected_modules, tensors_in
from msprobe.capture.parameters import ParameterTable, plain_name
from msprobe.capture.publishing import Publisher
from msprobe.capture.recorder import Recorder
from msprobe.capture.spans import Span
from msprobe.capture.step import StepDraft, StepWriter
from msprobe.capture.updating import UpdateEntries
from msprobe.schema import Accumulation, EndReason, HookTime, StageRecord, StepRecord


class _Stage:
    """A stage that runs outside any step."""

    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.start_ns = start_ns
        self.hooks: list[HookTime] = []


class Session(UpdateEntries):
    """The trace of one `train()` call. All times are the host's monotonic nanoseconds, device times beside them."""

    def __init__(self, recorder: Recorder, on_step: Callable[[StepRecord], None] | None = None) -> None:
        super().__init__(recorder)
        self.opens()
        self._origin: Mark | None = None
        self._model: nn.Module | None = None
        self._timer: ModuleTimer | None = None
        self._outputs: OutputRecorder | None = None
        self._described: list[torch.Tensor] = []
        self._publisher: Publisher | None = None
        self._on_step = on_step
        self._read_memory = memory_reader(torch.device("cpu"))
        self._stages: list[_Stage] = []

    # The run

    @entry
    def model_is_ready(self, model: nn.Module, optimizers: Sequence[Any]) -> ParameterTable:
        """Take the final model (unwrapped) and optimizers: everything that could replace them in `before_run` has run."""
        device = _device_of(model)
        self._model = model
        self.clock = clock_for(device)
        self._read_memory = memory_reader(device)
        self.table = table = ParameterTable(model)
        for optimizer in optimizers:
            table.optimizer_number(optimizer)
        config = self.recorder.config
        wanted = table.selected(config.tensors)
        self._described = [table.parameters[number] for number in wanted] if config.level == "full" else []
        writer = StepWriter(self.train, table, config, self.clock, self.recorder.origin_ns)
        self._publisher = Publisher(self.recorder, self.ledger, writer, self.clock, self._on_step)
        self._timer = ModuleTimer(model, self._module_begins, self._module_ends)
        self._outputs = OutputRecorder(selected_modules(model, config.tensors), self._selected_begins, self._selected_ends)
        self._report_idle_patterns(model, table)
        return table

    def _report_idle_patterns(self, model: nn.Module, table: ParameterTable) -> None:
        """Say which patterns select nothing in this model, with the names that come near."""
        for pattern in self.recorder.config.tensors:
            if pattern.glob == "*" or is_compiled(model):
                continue
            known = table.first_names() if pattern.role == "param.grad" else [plain_name(name) for name, _ in model.named_modules() if name]
            selected = table.selected([pattern]) if pattern.role == "param.grad" else selected_modules(model, [pattern])
            if not selected:
                self.ledger.pattern_selects_nothing(str(pattern), get_close_matches(pattern.glob.rstrip("*."), known, cutoff=0.4))

    @entry
    def broken(self, error: BaseException) -> None:
        """Record the exception that ends the training: in which phase, in which module."""
        if self.ended:
            return
        phase = self.current_phase()
        module = innermost_module(self._model, error) if self._model is not None else None
        step = self.draft.index if self.draft is not None else None
        if self.draft is not None:
            self._close_step(self.clock.mark(), complete=False)
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
            self._close_step(self.clock.mark(), complete=False)
        self.closes()
        self._take_module_hooks_out()
        self._publish_all()
        self.recorder.write(self.ledger.end_record(reason, self.recorder.dropped, self.probe_ns))

    def current_phase(self) -> str | None:
        """Return the name of what is running: the innermost span's, else the stage's, else, once batches are loaded, that."""
        if self.draft is not None and self.draft.spans.innermost is not None:
            span = self.draft.spans.innermost
            return str(span.attributes["hook"]) if span.name == "hook" else span.name
        if self._stages:
            return self._stages[-1].name
        return None if self.table is None else "data_load"

    # Stages and hooks

    @entry
    def stage_begins(self, stage: str) -> None:
        """A stage's hooks are about to run (other than the two that bound a step)."""
        if self.draft is None:
            self._stages.append(_Stage(stage, now_ns()))

    @entry
    def stage_ends(self, stage: str) -> None:
        """A stage's hooks have run."""
        end = self.clock.mark()
        if self.draft is not None:
            return
        if self._stages and self._stages[-1].name == stage:
            self._write_stage(self._stages.pop(), end.host_ns)
        self._origin = end
        self.carried_ns = 0  # what was spent before the origin is no step's

    @entry
    def hook_begins(self, index: int, hook: str, stage: str) -> Span | int:
        """A hook is about to run; hand the answer to `hook_ends`."""
        if self.draft is None:
            return now_ns()
        return self.draft.spans.begin("hook", self.clock.mark(), hook=hook, stage=stage, hook_index=index)

    @entry
    def hook_ends(self, begun: Span | int | None, index: int, hook: str, priority: int) -> None:
        """A hook has run."""
        if isinstance(begun, Span):
            if self.draft is not None:
                self.draft.spans.finish(begun, self.clock.mark())
        elif begun is not None and self._stages:
            self._stages[-1].hooks.append(HookTime(index=index, hook=hook, priority=priority, host_ns=now_ns() - begun))

    # The step

    @entry
    def step_begins(self, epoch: int, iteration: int, accumulation_size: int | None) -> None:
        """`before_train_iter` is about to run its hooks: the batch has been loaded."""
        loaded = self.clock.mark()
        if self.table is None:
            return
        if self.draft is not None:  # the script caught what broke the last iteration off, and went on
            self._close_step(loaded, complete=False)
        origin = self._origin if self._origin is not None else loaded
        described = self._described if self.recorder.next_step in self.recorder.config.steps else ()
        draft = StepDraft(self.recorder.next_step, epoch, iteration, origin, self.carried_ns, self.table, described)
        self.recorder.next_step += 1
        if accumulation_size:
            draft.accumulation = Accumulation(index=iteration % accumulation_size, size=accumulation_size)
        began = Mark(origin.host_ns + self.carried_ns, origin.event)
        self.carried_ns = 0
        draft.spans.finish(draft.spans.begin("data_load", began), loaded)
        self.draft = draft

    @entry
    def forward_begins(self) -> None:
        """`before_train_iter` has run its hooks: the training step itself begins.

        The model carries hooks only until it ends, so what the script's own hooks copy, save or compile of it is free of them.
        """
        if self.draft is None:
            return
        if dynamo_is_in_use():
            self.ledger.compiled()
        else:
            self._put_module_hooks_in(self.draft.index)
        self.draft.spans.begin("forward", self.clock.mark())

    @entry
    def loss_computed(self, value: Any) -> None:
        """One of torch's loss functions returned while forward ran."""
        if self.draft is not None and self.listens():
            self.draft.loss_terms.loss_computed(value)

    @entry
    def forward_ends(self, outputs: object, loss_keys: Iterable[str], prior_weight: float | None) -> None:
        """`after_train_iter` is about to run its hooks: forward is over; its losses are kept before a hook changes them."""
        if self.draft is None:
            return
        self.draft.spans.finish_all(self.clock.mark())
        self._take_module_hooks_out()
        self.draft.loss_terms.prior_weight = prior_weight
        for key, value in outputs.items() if isinstance(outputs, Mapping) else ():
            if isinstance(key, str) and (key in loss_keys or "loss" in key) and _is_scalar(value):
                self.draft.losses[key] = self.draft.readback.put(value) if isinstance(value, torch.Tensor) else _float(value)

    @entry
    def step_ends(self) -> None:
        """`after_train_iter` has run all hooks: the step is over."""
        end = self.clock.mark()
        if self.draft is not None:
            self._close_step(end, complete=True)
        else:
            self._origin = end

    # Modules

    @entry
    def _module_begins(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
        call = self._call_begins(name)
        if call is not None and self.draft is not None and is_denoiser(name, module):
            self.draft.loss_terms.denoiser_called(call.number, arguments, keywords)
        return call

    def _call_begins(self, name: str) -> Call | None:
        """Number and time a call, if it is part of forward."""
        draft = self.draft
        if draft is None or not self.listens() or draft.spans.innermost is None or draft.spans.innermost.name != "forward":
            return None
        number = draft.call_counts.get(name, 0)
        draft.call_counts[name] = number + 1
        draft.sequence += 1
        call = Call(draft.sequence - 1, name, number, self.clock.mark())
        draft.calls.append(call)
        return call

    @entry
    def _module_ends(self, call: Call) -> None:
        call.end = self.clock.mark()

    @entry
    def _selected_begins(self, name: str, module: nn.Module) -> Call | None:
        """A module whose output is wanted is entered; one that is timed anyway has its call already."""
        timed = self._timer.call_of(module) if self._timer is not None else None
        return timed if timed is not None else self._call_begins(name)

    @entry
    def _selected_ends(self, call: Call, output: Any) -> None:
        """A module whose output is wanted returned: measure what it returned."""
        draft = self.draft
        if call.end is None:
            call.end = self.clock.mark()
        if draft is None:
            return
        for path, tensor in tensors_in(output):
            found = Output(draft.sequence, call, path, tensor)
            measure = found.measure_fully if self.recorder.config.level == "full" else found.measure
            measure(tensor, draft.readback)
            draft.outputs.append(found)
            draft.sequence += 1

    # The ends of steps and stages

    def _close_step(self, end: Mark, complete: bool) -> None:
        draft = self.draft
        assert draft is not None
        assert self._publisher is not None
        self.draft = None
        self._origin = end
        draft.spans.finish_all(end)
        draft.end = end
        draft.complete = complete
        draft.memory = self._read_memory()
        draft.readback.launch()
        self._take_module_hooks_out()
        self._publisher.add(draft)

    def _put_module_hooks_in(self, step: int) -> None:
        if self._timer is not None:
            self._timer.install()
        if self._outputs is not None and step in self.recorder.config.steps:
            self._outputs.arm()

    def _take_module_hooks_out(self) -> None:
        if self._timer is not None:
            self._timer.remove()
        if self._outputs is not None:
            self._outputs.disarm()

    def _publish_all(self) -> None:
        if self._publisher is not None:
            self._publisher.finish()

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


def _float(value: float) -> float:
    """Return a Python number as a float, infinite where it is an integer beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _one_line(error: BaseException) -> str:
    """Return the exception's first line, at most 500 characters of it; nothing where its text itself raises."""
    try:
        return str(error).split("\n", 1)[0][:500]
    except Exception:
        return ""
