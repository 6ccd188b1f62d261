"""One step as a tree of phases and modules, followed by its numbers.

`msprobe show` prints it. Times are the host's, with the device's beside them where it has a clock; shares are of the step's wall time.
Every gradient norm is named in full, and a value that was not measured is a dash, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import UNSET
from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from msprobe.analysis.norms import norms_of
from msprobe.analysis.phases import share
from msprobe.analysis.step import SpanNode, StepFacts, span_tree
from msprobe.schema import NO_GRADIENT, EventRecord, GradNorm, LossTerm, ModuleRecord, Phase, StepRecord, TensorRecord
from msprobe.trace.tensors import FROZEN
from msprobe.views.layout import Cell, facts, heading, note, sentence, table
from msprobe.views.numbers import duration, number, percent, size
from msprobe.views.text import counted, label, safe

_DIGITS = 8
_MODULES_PER_PHASE = 40
_TENSORS = 10
_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}


def step_page(path: str, found: StepFacts, everything: bool = False) -> Iterator[RenderableType]:
    """Yield the page of a step.

    Args:
        path: the run as the user named it.
        found: the step with all that belongs to it.
        everything: show all modules and all tensors instead of the first and the largest.
    """
    step = found.step
    yield label(f"{path}, {found.file}", style="bold")
    yield _tree(found, everything)
    yield heading("Numbers")
    yield facts(_numbers(step))
    for optimizer, norm in norms_of(step):
        yield heading("Gradient norm" + (f" of optimizer {optimizer}" if len(step.updates) > 1 else ""))
        yield facts(_norm(norm))
    yield from _tensor_sections(found.tensors, everything)
    yield from _event_section(found.events)


def _tree(found: StepFacts, everything: bool) -> Tree:
    step = found.step
    title = f"step {step.step}  epoch {step.epoch}, iter {step.iter}, train() {step.train}: {duration(step.wall_ns)}"
    tree = Tree(Text(title if step.complete else f"{title}, broken off", style="bold"))
    for node in span_tree(step, found.modules):
        _grow(tree, node, step.wall_ns, everything)
    leaves_ns = sum(phase.host_ns for index, phase in enumerate(step.phases) if not _encloses(step.phases, index))
    left_ns = step.wall_ns - leaves_ns - step.probe_ns
    inside = f" and {duration(step.probe_inside_ns)} inside the phases" if step.probe_inside_ns else ""
    tree.add(Text(f"msprobe itself  {_timed(step.probe_ns, None, step.wall_ns)}{inside}", style="dim"))
    tree.add(Text(f"unaccounted  {_timed(left_ns, None, step.wall_ns)}", style="dim"))
    return tree


def _encloses(phases: Sequence[Phase], index: int) -> bool:
    return any(phase.parent == index for phase in phases)


def _grow(tree: Tree, node: SpanNode, wall_ns: int, everything: bool) -> None:
    branch = tree.add(_phase_text(node.phase, wall_ns))
    for inner in node.inner:
        _grow(branch, inner, wall_ns, everything)
    shown = node.modules if everything else node.modules[:_MODULES_PER_PHASE]
    for module in shown:
        branch.add(_module_text(module, wall_ns))
    if len(shown) < len(node.modules):
        branch.add(Text(f"{len(node.modules) - len(shown):,} more modules: --all", style="dim"))


def _phase_text(phase: Phase | None, wall_ns: int) -> Text:
    if phase is None:
        return Text("in no phase", style="dim")
    name, details = phase.name, [f"#{phase.call}"] if phase.call else []
    if phase.hook is not UNSET:  # its call counts all hooks of the step, which tells nothing
        name, details = f"{phase.hook}.{'?' if phase.stage is UNSET else phase.stage}", []
    if phase.loss_key is not UNSET:
        details.append(f"of {phase.loss_key}")
    if phase.optimizer is not UNSET and phase.optimizer:
        details.append(f"optimizer {phase.optimizer}")
    if phase.set_to_none is not UNSET:
        details.append("to None" if phase.set_to_none else "to zeros")
    text = label(" ".join([name, *details]), style="cyan")
    return text.append(f"  {_timed(phase.host_ns, phase.device_ns, wall_ns)}", style="default")


def _module_text(module: ModuleRecord, wall_ns: int) -> Text:
    details = "".join(
        [
            f" #{module.call}" if module.call else "",
            " backward" if module.direction == "backward" else "",
            " recomputed" if module.recompute else "",
        ]
    )
    text = label(f"{module.name or '(root)'}{details}")
    return text.append(f"  {_timed(module.host_ns, module.device_ns, wall_ns)}")


def _timed(host_ns: int, device_ns: int | None, wall_ns: int) -> str:
    clocks = duration(host_ns) if device_ns is None else f"{duration(device_ns)} on the device, host {duration(host_ns)}"
    return f"{clocks}  {percent(share(host_ns if device_ns is None else device_ns, wall_ns))}"


def _numbers(step: StepRecord) -> Iterator[tuple[str, Cell]]:
    for key, value in step.loss.items():
        yield "loss", label(number(value, _DIGITS) if key == "loss" else f"{key}: {number(value, _DIGITS)}")
    if not step.loss:
        yield "loss", number(None)
    for term in step.loss_terms:
        yield "loss term", label(_term(term))
    yield "update", label(_outcome(step))
    for update in step.updates if len(step.updates) > 1 else []:
        yield "", label(f"optimizer {update.optimizer}: {update.outcome or f'unknown: {update.reason}'}")
    yield "learning rate", ", ".join(number(lr, _DIGITS) for lr in step.lr) or number(None)
    scale = step.loss_scale
    yield "loss scale", "none in use" if scale is None else f"{number(scale.before)} -> {number(scale.after)}"
    if step.accumulation is not None:
        yield "accumulation", f"index {step.accumulation.index} of {step.accumulation.size}"
    memory = step.memory
    yield "memory", f"allocated {size(memory.allocated_bytes)}, reserved {size(memory.reserved_bytes)}, peak {size(memory.peak_bytes)}"
    yield "", f"resident on the host {size(memory.rss_bytes)}"


def _term(term: LossTerm) -> str:
    weight = "" if term.weight is None else f", weight {number(term.weight)}"
    timesteps = "" if term.timesteps is None else f", timesteps {', '.join(map(str, term.timesteps[:16]))}"
    return f"{term.name}: {number(term.value, _DIGITS)}{weight}{timesteps}"


def _outcome(step: StepRecord) -> str:
    words = {
        "done": "done",
        "skipped": "skipped: the loss scaler found non-finite gradients",
        "none": "none: no optimizer stepped",
        None: f"unknown: {step.optimizer_step_reason or 'not recorded'}",
    }
    return words[step.optimizer_step]


def _norm(norm: GradNorm) -> Iterator[tuple[str, Cell]]:
    clips = norm.max_norm is not None
    yield ("before clipping" if clips else "all parameters"), number(norm.before_clip, _DIGITS)
    yield "returned by clip_grads", number(norm.clip_returned, _DIGITS)
    yield "after clipping", number(norm.after_clip, _DIGITS)
    yield "optimizer's, before", number(norm.optimizer_params, _DIGITS)
    yield "optimizer's, after", number(norm.optimizer_params_after, _DIGITS)
    clipped = {True: "yes", False: "no", None: number(None)}[norm.clipped]
    yield "clipped", f"{clipped}, max_norm {number(norm.max_norm)}, norm_type {number(norm.norm_type)}"


def _tensor_sections(tensors: Sequence[TensorRecord], everything: bool) -> Iterator[RenderableType]:
    roles = dict.fromkeys((tensor.role, tensor.point) for tensor in tensors)
    for role, point in roles:
        group = [tensor for tensor in tensors if (tensor.role, tensor.point) == (role, point)]
        yield heading(safe(f"Tensors: {role}" + (f" {point}" if point else "")))
        yield from _tensor_table(group, everything)


def _tensor_table(group: Sequence[TensorRecord], everything: bool) -> Iterator[RenderableType]:
    """Yield all non-finite tensors of a role and the largest others, then how many are not shown."""
    absent = sum(tensor.skipped == NO_GRADIENT for tensor in group)
    frozen = sum(tensor.skipped == FROZEN for tensor in group)
    present = sorted((tensor for tensor in group if tensor.skipped not in (NO_GRADIENT, FROZEN)), key=_rank_of_tensor)
    bad = sum(_is_nonfinite(tensor) for tensor in present)
    shown = present if everything else present[: bad + _TENSORS]
    rows: list[list[Cell]] = [
        [
            label(_tensor_name(tensor)),
            number(tensor.l2, 6),
            *(number(count) for count in (tensor.nan, tensor.posinf, tensor.neginf)),
            number(tensor.numel),
        ]
        for tensor in shown
    ]
    if rows:
        yield table(["the non-finite ones, then by l2", "l2", "NaN", "+inf", "-inf", "numel"], rows)
    counts = [f"{counted(len(group), 'tensor')}: {bad:,} non-finite, {absent:,} with no gradient, {frozen:,} frozen"]
    if len(shown) < len(present):
        counts.append(f"{len(present) - len(shown):,} smaller ones not shown: --all")
    if bad:
        counts.append("l2 is over the finite values where the others are counted")
    yield note("; ".join(counts) + ".")


def _tensor_name(tensor: TensorRecord) -> str:
    call = f" #{tensor.call}" if tensor.call else ""
    path = f" {tensor.path}" if tensor.path else ""
    skipped = f" (not measured: {tensor.skipped})" if tensor.skipped else ""
    return f"{tensor.name}{call}{path}{skipped}"


def _is_nonfinite(tensor: TensorRecord) -> bool:
    counts = bool(tensor.nan or tensor.posinf or tensor.neginf)
    return counts or (tensor.l2 is not None and not math.isfinite(tensor.l2))


def _rank_of_tensor(tensor: TensorRecord) -> tuple[bool, float]:
    """Order tensors: non-finite ones as they ran, then the others from the largest l2 down."""
    if _is_nonfinite(tensor):
        return False, 0.0
    return True, math.inf if tensor.l2 is None else -tensor.l2


def _event_section(events: Sequence[EventRecord]) -> Iterator[RenderableType]:
    if events:
        yield heading("Events")
    for event in events:
        places = ", ".join(f"{key} {event.data[key]}" for key in ("phase", "module") if event.data.get(key))
        yield sentence(label(f"{event.level} {event.code}: {event.message}{f' (in {places})' if places else ''}", _STYLES[event.level]))
