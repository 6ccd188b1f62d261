"""Every record of a trace as a typed struct.

The capture side fills these structs and `trace.writer` writes them; `trace.reader` hands the very same structs to the analysis. Units
stand in the names (`_ns` nanoseconds, `_bytes`). How a record becomes a line of JSON stands in `codec`. This module does no input or
output and knows neither torch nor ModelScope.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType, field

SCHEMA_VERSION = 1
# What `skipped` says of a trained parameter that had no gradient; readers count by it.
NO_GRADIENT = "no gradient"

OptimizerOutcome: TypeAlias = Literal["none", "skipped", "done"]
Direction: TypeAlias = Literal["forward", "backward"]
GradientPoint: TypeAlias = Literal["after_backward", "after_unscale", "after_clip"]
Level: TypeAlias = Literal["info", "warning", "error"]
EndReason: TypeAlias = Literal["finished", "exception", "interrupted", "stopped", "disabled"]


class Part(msgspec.Struct, kw_only=True):
    """A piece of a record; it has no kind of its own."""


class HookInfo(Part, kw_only=True):
    """One hook of the trainer, in the order in which ModelScope calls them."""

    index: int
    hook: str
    priority: int
    stages: list[str]


class GroupInfo(Part, kw_only=True):
    """One parameter group of an optimizer: learning rate at the start, number of parameters, the scalar options."""

    lr: float | None
    parameters: int
    options: dict[str, Any] = {}


class OptimizerInfo(Part, kw_only=True):
    """An optimizer that the run uses; `id` is what other records refer to."""

    id: int
    class_: str = field(name="class")
    groups: list[GroupInfo]


class ParameterInfo(Part, kw_only=True):
    """A parameter of the model. A tied one stands once; `tied` holds its other names."""

    id: int
    name: str
    shape: list[int]
    dtype: str
    requires_grad: bool
    optimizer: int | None = None
    group: int | None = None
    tied: list[str] = []


class Phase(Part, kw_only=True):
    """A span of a step. Items without parent are disjoint; `start_ns` counts from the step's start.

    `call` numbers the spans of one name within the step; `parent` is the index of the enclosing item of `phases`. The last group of
    fields is present only where it applies: a hook's name, stage and index, the loss that a backward belongs to, the optimizer that a
    step, unscale or zero_grad belongs to, and how zero_grad cleared.
    """

    name: str
    start_ns: int
    host_ns: int
    device_ns: int | None = None
    call: int = 0
    parent: int | None = None
    hook: str | UnsetType = UNSET
    stage: str | UnsetType = UNSET
    hook_index: int | UnsetType = UNSET
    loss_key: str | UnsetType = UNSET
    optimizer: int | UnsetType | None = UNSET
    set_to_none: bool | UnsetType = UNSET


class GradNorm(Part, kw_only=True):
    """Total gradient norms of one update, unscaled. `None` means not measured.

    `before_clip` and `after_clip` are over the parameters that clipping takes (without clipping: every parameter of the model that has
    a gradient), `optimizer_params` and `optimizer_params_after` over those that the optimizer owns. `clip_returned` is what the clipping
    call returned, verbatim. `clipped` says whether torch's coefficient `max_norm / (clip_returned + 1e-6)` was below 1. Without
    clipping there is no "after": `clip_returned`, `after_clip`, `clipped`, `optimizer_params_after` and `max_norm` are null.
    """

    norm_type: float
    max_norm: float | None = None
    before_clip: float | None = None
    clip_returned: float | None = None
    after_clip: float | None = None
    clipped: bool | None = None
    optimizer_params: float | None = None
    optimizer_params_after: float | None = None
    optimizer: int | None = None


class Update(Part, kw_only=True):
    """One call of an optimizer's step (or of `scaler.step` for it): whose, with what outcome, from which gradients."""

    optimizer: int | None
    outcome: OptimizerOutcome | None
    reason: str | None = None
    grad_norm: GradNorm | None = None
    loss_scale: LossScale | None = None


class LossScale(Part, kw_only=True):
    """The scaler's scale when its `step` was entered, and after its `update`."""

    before: float | None = None
    after: float | None = None


class Accumulation(Part, kw_only=True):
    """Where the step stands in a gradient accumulation: `trainer.iter % size`, and `size` = cumulative_iters."""

    index: int
    size: int


class LossTerm(Part, kw_only=True):
    """One addend of the loss, where it can be seen: the k-th call of the denoiser, its timesteps, its loss and weight."""

    name: str
    value: float | None = None
    weight: float | None = None
    timesteps: list[int] | None = None
    call: int | None = None


class Memory(Part, kw_only=True):
    """Memory in bytes when the step ended: the accelerator's allocator, its peak since the process began, the process on CPU."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None


class HookTime(Part, kw_only=True):
    """What one hook took in a stage."""

    index: int
    hook: str
    priority: int
    host_ns: int


class Record(msgspec.Struct, kw_only=True, tag_field="kind"):
    """A line of the trace."""


class RunRecord(Record, tag="run", kw_only=True):
    """The first line: which process this is, with which versions and settings it recorded.

    `lag_steps` is how many of the newest steps may still be unread on a device.
    """

    schema: int = SCHEMA_VERSION
    run_id: str
    rank: int
    world_size: int
    local_rank: int
    pid: int
    host: str
    started_unix_ns: int
    lag_steps: int
    argv: list[str]
    cwd: str
    versions: dict[str, str]
    device: dict[str, Any]
    config: dict[str, Any]


class ModelRecord(Record, tag="model", kw_only=True):
    """One per `train()`: what is trained, by which hooks in their true order, with which optimizers."""

    train: int
    trainer: str
    model_class: str
    processor: str
    hooks: list[HookInfo]
    optimizers: list[OptimizerInfo]
    parameters: list[ParameterInfo]


class StepRecord(Record, tag="step", kw_only=True):
    """One training iteration. See docs/record.md for the exact meaning of every field."""

    train: int
    step: int
    epoch: int
    iter: int
    complete: bool
    start_ns: int
    wall_ns: int
    probe_ns: int
    probe_inside_ns: int = 0
    phases: list[Phase]
    loss: dict[str, float | None]
    loss_terms: list[LossTerm] = []
    lr: list[float | None] = []
    grad_norm: GradNorm | None = None
    accumulation: Accumulation | None = None
    optimizer_step: OptimizerOutcome | None = None
    optimizer_step_reason: str | None = None
    loss_scale: LossScale | None = None
    updates: list[Update] = []
    memory: Memory


class StageRecord(Record, tag="stage", kw_only=True):
    """Hooks that ran in no step. `start_ns` counts from the run's start; `after_step` is the last step begun before, or null."""

    train: int
    stage: str
    after_step: int | None
    start_ns: int
    host_ns: int
    hooks: list[HookTime]


class ModuleRecord(Record, tag="module", kw_only=True):
    """One call of a module. `start_ns` counts from the step's start; `seq` is the order of execution within the step."""

    train: int
    step: int
    seq: int
    name: str
    call: int
    direction: Direction = "forward"
    recompute: bool = False
    start_ns: int
    host_ns: int
    device_ns: int | None = None


class TensorRecord(Record, tag="tensor", kw_only=True):
    """Statistics of one tensor; the counts are over all elements, the rest over the finite ones. `skipped` says why a value is absent.

    `inputs_finite` is present where a module's output is not finite: whether its inputs were (null where that is not known). `file` is
    relative to the run folder.
    """

    train: int
    step: int
    seq: int | None = None
    role: str
    name: str
    call: int | None = None
    path: str | None = None
    point: GradientPoint | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    numel: int | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zeros: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    l2: float | None = None
    absmax: float | None = None
    skipped: str | None = None
    inputs_finite: bool | UnsetType | None = UNSET
    file: str | None = None
    key: str | None = None


class NormsRecord(Record, tag="norms", kw_only=True):
    """The l2 of many parameter tensors at once. `ids` are ids of `model.parameters`; null means all of them, in order.

    An l2 of null: that parameter had no gradient. A tensor whose l2 is not finite has a `tensor` record besides, with its counts.
    """

    train: int
    step: int
    role: str
    point: GradientPoint | None
    ids: list[int] | None
    l2: list[float | None]


class EventRecord(Record, tag="event", kw_only=True):
    """Something worth a sentence. `at_ns` counts from the run's start; `code` is stable, `message` is for people."""

    code: str
    level: Level
    train: int | None = None
    step: int | None = None
    at_ns: int
    message: str
    data: dict[str, Any] = {}


class EndRecord(Record, tag="end", kw_only=True):
    """One per `train()`, with its counts. A trace without it was cut."""

    train: int | None = None
    reason: EndReason
    steps: int
    optimizer_steps: int
    skipped_steps: int
    unapplied_micro_steps: int
    dropped_records: int
    probe_ns: int


AnyRecord: TypeAlias = (
    RunRecord | ModelRecord | StepRecord | StageRecord | ModuleRecord | TensorRecord | NormsRecord | EventRecord | EndRecord
)
