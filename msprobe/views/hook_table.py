"""ModelScope's hooks as tables, one for each stage, in the order in which they are called.

`msprobe hooks` prints them. A hook that is listed for a stage but was never timed there shows a dash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from msprobe.analysis.hook_times import HookCalls, HookTable, Stage
from msprobe.views.layout import Cell, heading, note, table
from msprobe.views.numbers import NOT_RECORDED, duration
from msprobe.views.text import label, safe

# modelscope/trainers/hooks/priority.py
PRIORITIES = {
    0: "HIGHEST",
    10: "VERY_HIGH",
    30: "HIGH",
    40: "ABOVE_NORMAL",
    50: "NORMAL",
    60: "BELOW_NORMAL",
    70: "LOW",
    90: "VERY_LOW",
    100: "LOWEST",
}


def hook_page(path: str, file: str, tables: Sequence[HookTable]) -> Iterator[RenderableType]:
    """Yield a table for each stage of each list of hooks."""
    yield label(f"{path}, {file}", style="bold")
    if not any(stage.hooks for hooks in tables for stage in hooks.stages):
        yield note("No hooks were recorded.")
    for hooks in tables:
        if len(tables) > 1:
            yield heading(f"train() {', '.join(map(str, hooks.trains))}")
        for stage in hooks.stages:
            yield from _stage(stage)
    if any(hook.hook == "OptimizerHook" for hooks in tables for stage in hooks.stages for hook in stage.hooks):
        yield note("OptimizerHook's time holds what recording took between its phases (step.probe_ns).")


def _stage(stage: Stage) -> Iterator[RenderableType]:
    yield heading(safe(stage.stage))
    yield table(["method", "priority", "calls", "total", "mean", "max"], [_row(stage.stage, hook) for hook in stage.hooks], left=2, gap=1)


def _row(stage: str, hook: HookCalls) -> list[Cell]:
    return [
        label(f"{hook.hook}.{stage}"),
        priority(hook.priority),
        f"{hook.calls:,}" if hook.calls else NOT_RECORDED,
        duration(hook.total_ns),
        duration(hook.mean_ns),
        duration(hook.max_ns),
    ]


def priority(value: int | None) -> str:
    """Return a priority as its number and, where ModelScope has one, its name."""
    if value is None:
        return NOT_RECORDED
    return f"{value} {PRIORITIES[value]}" if value in PRIORITIES else str(value)
