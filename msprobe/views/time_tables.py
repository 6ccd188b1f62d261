"""Where the time went, as tables: phases, hooks, modules, and what is left over.

The summary page shows them. Durations are by the device's clock where there is one; the host's total then stands beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType

from msprobe.analysis.modules import ModuleRow
from msprobe.analysis.outside import StageTime
from msprobe.analysis.phases import HookRow, PhaseRow, PhaseTable, Times
from msprobe.views.layout import Cell, heading, note, table
from msprobe.views.numbers import duration, percent
from msprobe.views.text import counted, label, safe, shortened

_MODULES = 12
_HOOKS = 10


def phase_section(time: PhaseTable) -> Iterator[RenderableType]:
    """Yield the table of phases with its remarks; nothing where no step was finished."""
    if not time.steps:
        return
    on_device = any(row.device is not None for row in time.phases)
    yield heading("Where the time went" + (" (device time where there is one)" if on_device else ""))
    columns = ["phase", "count", "total", "share", "median", "p95", f"step {time.first_step}"]
    rows = [[*_phase_cells(row), duration(row.host.total_ns)] for row in time.phases]
    rows.append(["unaccounted", "", duration(time.unaccounted_ns), percent(time.unaccounted_share), "", "", "", ""])
    rows.append(["whole step", *_time_cells(time.step, percent(1.0 if time.step.total_ns else None)), duration(time.step.total_ns)])
    yield table([*columns, "host"], rows) if on_device else table(columns, [row[:-1] for row in rows])
    yield note(_remark(time, on_device))
    yield from _hook_table(time.hooks)


def outside_section(stages: Sequence[StageTime], time: PhaseTable) -> Iterator[RenderableType]:
    """Yield the stages outside the steps, where they took time that counts beside that of the steps."""
    total_ns = sum(row.total_ns for row in stages)
    if total_ns < 0.01 * (time.step.total_ns or 0):
        return
    yield heading("Outside the steps")
    rows: list[list[Cell]] = [
        [
            label(row.stage),
            f"{row.count:,}",
            duration(row.total_ns),
            label(row.slowest_hook or ""),
            duration(row.slowest_hook_ns) if row.slowest_hook else "",
        ]
        for row in stages
        if row.total_ns >= 0.01 * total_ns
    ]
    yield table(["stage", "count", "total", "most by", "of it"], rows)


def _phase_cells(row: PhaseRow) -> list[str]:
    name = "hooks" if row.name == "hook" else shortened(safe(row.name), 18)
    return [name, *_time_cells(row.device or row.host, percent(row.share))]


def _time_cells(times: Times, share: str) -> list[str]:
    spread = [duration(times.median_ns), duration(times.p95_ns), duration(times.first_step_ns)]
    return [f"{times.count:,}", duration(times.total_ns), share, *spread]


def _remark(time: PhaseTable, on_device: bool) -> str:
    cost = duration(time.probe_ns + time.probe_inside_ns)
    text = f"Recording took {cost}, {percent(time.probe_share)} of the steps. Median and p95 leave out step {time.first_step}, the first."
    if not time.step.exact_quantiles:
        text += " They are right within 0.5%."
    if on_device:
        text += " Unaccounted is host time; device and host overlap, so shares need not add up."
    return text


def _hook_table(hooks: Sequence[HookRow]) -> Iterator[RenderableType]:
    if not hooks:
        return
    longest = sorted(hooks, key=lambda row: -row.host.total_ns)
    rows: list[list[Cell]] = [
        [
            label(f"{row.hook}.{row.stage}"),
            f"{row.host.count:,}",
            duration(row.host.total_ns),
            duration(row.own_host_ns) if row.encloses else "",
            duration(row.host.median_ns),
            duration(row.host.p95_ns),
        ]
        for row in longest[:_HOOKS]
    ]
    yield heading("Hooks inside the steps (host time)")
    yield table(["hook", "count", "total", "own", "median", "p95"], rows)
    remarks = []
    if any(row.encloses for row in hooks):
        remarks.append("A hook with an own time encloses phases of the table above; much of what recording took lies in it.")
    if len(longest) > _HOOKS:
        remarks.append(f"{len(longest) - _HOOKS} more hooks took less.")
    if remarks:
        yield note(" ".join(remarks))


def module_section(modules: Iterable[ModuleRow], time: PhaseTable) -> Iterator[RenderableType]:
    """Yield the table of the recorded modules that lie in no other recorded one."""
    rows = list(modules)
    outermost = [row for row in rows if row.outermost]
    if not outermost:
        return
    phases = {row.name: row for row in time.phases}
    cells: list[list[Cell]] = [
        [
            label(row.name or "(root)"),
            row.direction,
            f"{row.calls:,}",
            duration(row.time_ns),
            duration(round(row.time_ns / row.calls)),
            percent(_share_of(row, phases.get(row.direction))),
        ]
        for row in outermost[:_MODULES]
    ]
    yield heading("Modules")
    yield table(["module", "direction", "calls", "total", "per call", "of that phase"], cells, left=2)
    left_out = len(outermost) - len(outermost[:_MODULES])
    inner = len(rows) - len(outermost)
    remarks = [
        f"{left_out} more took less." if left_out else "",
        f"{counted(inner, 'row')} for modules inside these: msprobe show." if inner else "",
    ]
    if any(remarks):
        yield note(" ".join(filter(None, remarks)))


def _share_of(row: ModuleRow, phase: PhaseRow | None) -> float | None:
    """Return a module's part of its phase, both by the same clock."""
    if phase is None:
        return None
    if row.device_ns is not None and phase.device is not None:
        return row.device_ns / phase.device.total_ns if phase.device.total_ns else None
    return row.host_ns / phase.host.total_ns if phase.host.total_ns else None


def median_step(time: PhaseTable) -> str:
    """Return the median time of a step, or the first step's where there is no other."""
    return duration(time.step.median_ns) if time.step.median_ns is not None else duration(time.step.first_step_ns)
