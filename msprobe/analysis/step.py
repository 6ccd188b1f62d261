"""One step of a run with everything that was recorded in it: its phases as a tree, its modules in their phases, its tensors and events.

`msprobe show` asks for it. A file is read once from end to end, and only the records of the wanted step are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msprobe.errors import UsageError
from msprobe.schema import EventRecord, ModuleRecord, Phase, StepRecord, TensorRecord
from msprobe.steps import StepSelection
from msprobe.trace.reader import RankFile
from msprobe.trace.tensors import TensorStream


@dataclass(slots=True)
class StepFacts:
    """A step and what belongs to it; modules are in order of execution, tensors in the order in which they were written."""

    file: str
    rank: int
    step: StepRecord
    modules: list[ModuleRecord]
    tensors: list[TensorRecord]
    events: list[EventRecord]


@dataclass(slots=True)
class SpanNode:
    """A phase with the phases and modules that ran inside it. `phase` is None for modules that ran in no phase."""

    phase: Phase | None
    inner: list[SpanNode] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)


@dataclass(slots=True)
class _Extent:
    """Which steps a file holds."""

    count: int = 0
    first: int | None = None
    last: int | None = None

    def add(self, step: int) -> None:
        self.count += 1
        self.first = step if self.first is None else min(self.first, step)
        self.last = step if self.last is None else max(self.last, step)

    def __str__(self) -> str:
        if self.count == 0:
            return "no steps"
        return f"step {self.first}" if self.count == 1 else f"steps {self.first} to {self.last}"


def find_step(files: Sequence[RankFile], wanted: int) -> StepFacts:
    """Return a step from the first of the files that holds it.

    Raises:
        UsageError: none of the files holds it.
    """
    extents = []
    for file in files:
        found, extent = _search(file, wanted)
        if found is not None:
            return found
        extents.append(f"{file.name} holds {extent}")
    raise UsageError(f"there is no step {wanted}: {', '.join(extents)}")


def _search(file: RankFile, wanted: int) -> tuple[StepFacts | None, _Extent]:
    extent = _Extent()
    step: StepRecord | None = None
    modules: list[ModuleRecord] = []
    tensors: list[TensorRecord] = []
    events: list[EventRecord] = []
    stream = TensorStream(None, None, StepSelection(frozenset((wanted,)), ()))
    for record in file.records():
        tensors.extend(stream.feed(record))
        if isinstance(record, StepRecord):
            extent.add(record.step)
            step = record if record.step == wanted else step
        elif isinstance(record, ModuleRecord) and record.step == wanted:
            modules.append(record)
        elif isinstance(record, EventRecord) and record.step == wanted:
            events.append(record)
    tensors.extend(stream.flush())
    if step is None:
        return None, extent
    modules.sort(key=lambda module: module.seq)
    return StepFacts(file.name, file.rank, step, modules, tensors, events), extent


def span_tree(step: StepRecord, modules: Sequence[ModuleRecord]) -> list[SpanNode]:
    """Return the outermost phases in the order they began, each with what ran inside; modules of no phase come last."""
    nodes = [SpanNode(phase) for phase in step.phases]
    roots = []
    for index, phase in enumerate(step.phases):
        if _is_nested(step.phases, index):
            nodes[phase.parent or 0].inner.append(nodes[index])
        else:
            roots.append(nodes[index])
    outside = SpanNode(None)
    for module in modules:
        (_innermost(roots, module.start_ns) or outside).modules.append(module)
    _sort_by_start(roots)
    return roots + [outside] * bool(outside.modules)


def _is_nested(phases: Sequence[Phase], index: int) -> bool:
    """Tell whether a phase has an enclosing one; a parent that does not exist, or a circle of parents, counts as none."""
    seen = {index}
    parent = phases[index].parent
    if parent is None or not 0 <= parent < len(phases):
        return False
    while parent is not None and 0 <= parent < len(phases):
        if parent in seen:
            return False
        seen.add(parent)
        parent = phases[parent].parent
    return True


def _innermost(nodes: Sequence[SpanNode], at_ns: int) -> SpanNode | None:
    """Return the innermost phase that was open at a time, in nanoseconds from the step's start."""
    for node in nodes:
        phase = node.phase
        if phase is not None and phase.start_ns <= at_ns < phase.start_ns + max(phase.host_ns, 1):
            return _innermost(node.inner, at_ns) or node
    return None


def _sort_by_start(nodes: list[SpanNode]) -> None:
    nodes.sort(key=lambda node: node.phase.start_ns if node.phase is not None else 0)
    for node in nodes:
        _sort_by_start(node.inner)
