"""One live trace: a `train()` call from its first stage to its last, as the host's hooks and seams report it.

`host.attach` makes a session per `train()`; `host.hooks` and `host.seams` call it at every boundary. Each call is an *entry*: its time is
counted as msprobe's own, and an exception inside it is noted by the recorder and never reaches the training. The session numbers the
steps, keeps the spans, has values measured at the right moments, and publishes a step when its values have arrived. It knows no
ModelScope: stages and hooks are names to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from msprobe.capture.calling import CallEntries
from msprobe.capture.clock import Mark, clock_for, now_ns
from msprobe.capture.entries import entry
from msprobe.capture.measured import measure
from msprobe.capture.memory import memory_reader
from msprobe.capture.modules import innermost_module
from msprobe.capture.nested import tensors_in
from msprobe.capture.notes import Note
from msprobe.capture.parameters import ParameterTable
from msprobe.capture.planning import Planner
from msprobe.capture.publishing import Publisher
from msprobe.capture.recorder import Recorder
from msprobe.capture.selection import Selection
from msprobe.capture.spans import Span
from msprobe.capture.step import StepDraft, StepWriter
from msprobe.capture.weights import WeightWatch
from msprobe.schema import Accumulation, EndReason, HookTime, StageRecord, StepRecord


class _Stage:
    """A stage that runs outside any step."""

    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.start_ns = start_ns
        self.hooks: list[HookTime] = []


class Session(CallEntries):
    """The trace of one `train()` call. All times are the host's monotonic nanoseconds, device times beside them."""

    def __init__(self, recorder: Recorder, on_step: Callable[[StepRecord], None] | None = None) -> None:
        super().__init__(recorder)
        self.opens()
        self._origin: Mark | None = None
        self._model: nn.Module | None = None
        self._planner: Planner | None = None
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
        selection = Selection(model, table, self.recorder.config)
        self.ledger.selected(selection)
        self._planner = Planner(self.recorder, selection, self.train)
        writer = StepWriter(self.train, table, selection, self.clock, self.recorder.origin_ns)
        self._publisher = Publisher(self.recorder, self.ledger, writer, self.clock, self._on_step)
        self.weights = WeightWatch(selection, table.parameters, table.names)
        self.watch_modules(model, selection.modules)
        return table

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
        self.take_module_hooks_out()
        self._publish_all()
        if self._planner is not None:
            self._planner.close()
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
        if self.table is None or self._planner is None:
            return
        if self.draft is not None:  # the script caught what broke the last iteration off, and went on
            self._close_step(loaded, complete=False)
        origin = self._origin if self._origin is not None else loaded
        plan = self._planner.plan(self.recorder.next_step)
        draft = StepDraft(self.recorder.next_step, epoch, iteration, origin, self.carried_ns, self.table, plan)
        self.recorder.next_step += 1
        if accumulation_size:
            draft.accumulation = Accumulation(index=iteration % accumulation_size, size=accumulation_size)
        began = Mark(origin.host_ns + self.carried_ns, origin.event)
        self.carried_ns = 0
        draft.spans.finish(draft.spans.begin("data_load", began), loaded)
        self.draft = draft

    @entry
    def forward_begins(self, batch: object) -> None:
        """`before_train_iter` has run its hooks: the training step itself begins, on this batch."""
        if self.draft is None or self.weights is None:
            return
        self._read_values("batch", batch)
        self.weights.forward_begins(self.draft)
        self.put_module_hooks_in()
        self.draft.spans.begin("forward", self.clock.mark())

    def _read_values(self, role: str, values: object) -> None:
        """Measure what is selected of a batch, or of the losses, by its path."""
        draft, planner = self.draft, self._planner
        if draft is None or planner is None or not draft.is_selected or not planner.wants(role):
            return
        for path, tensor in tensors_in(values):
            if planner.selection.wants(role, path):
                note = Note(draft.next_seq(), role, path, None, None, measure(tensor, draft.full, draft.readback))
                draft.notes.append(note)
                if planner.selection.is_dumped(role, path):
                    draft.keep_whole(note, tensor)

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
        self.take_module_hooks_out()
        self.draft.loss_terms.prior_weight = prior_weight
        found = {key: value for key, value in outputs.items() if _is_loss(key, value, loss_keys)} if isinstance(outputs, Mapping) else {}
        for key, value in found.items():
            self.draft.losses[key] = self.draft.readback.put(value) if isinstance(value, torch.Tensor) else _float(value)
        self._read_values("loss", found)

    @entry
    def step_ends(self) -> None:
        """`after_train_iter` has run all hooks: the step is over."""
        end = self.clock.mark()
        if self.draft is not None:
            self._close_step(end, complete=True)
        else:
            self._origin = end

    # The ends of steps and stages

    def _close_step(self, end: Mark, complete: bool) -> None:
        draft = self.draft
        assert draft is not None
        assert self._publisher is not None
        self.draft = None
        self._origin = end
        draft.memory = self._read_memory()
        draft.is_over(end, complete)
        self.take_module_hooks_out()
        self._publisher.add(draft)

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


def _is_loss(key: Any, value: Any, loss_keys: Iterable[str]) -> bool:
    """Tell whether an output of the training step is a loss: a scalar of which the hook, or its name, says so."""
    if not isinstance(key, str) or not (key in loss_keys or "loss" in key):
        return False
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
