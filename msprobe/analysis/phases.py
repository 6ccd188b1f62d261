"""Where the time of the steps went: per phase, per hook, what nobody accounts for, and what recording cost.

`analysis.summary` feeds it every step once. Shares are of the wall time of the finished steps and count leaves only (spans without a
span inside), so that nothing is counted twice; where a leaf has a device time, that is the one that is meant. The first finished step of
a process is full of warm-up: totals include it, medians and percentiles do not, and it stands apart. Broken-off steps are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET

from msprobe.analysis.distribution import Distribution
from msprobe.schema import Phase, StepRecord

# The order in which a step runs through them; names of later versions follow in order of appearance.
_ORDER = ("data_load", "forward", "backward", "unscale", "clip_grads", "optimizer_step", "scaler_update", "zero_grad", "hook")


@dataclass(frozen=True, slots=True)
class Times:
    """Durations by one clock. Median and 95th percentile are over all but the first step; None where there is no other step."""

    count: int
    total_ns: int
    median_ns: int | None
    p95_ns: int | None
    first_step_ns: int | None
    exact_quantiles: bool


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase over all steps. `share` is that of its leaves in the wall time; None where it has no leaf or there is no wall time."""

    name: str
    count: int
    host: Times
    device: Times | None
    share: float | None


@dataclass(frozen=True, slots=True)
class HookRow:
    """A hook at one stage. Where it encloses other phases, `own_host_ns` is what is left without them."""

    hook: str
    stage: str
    count: int
    host: Times
    own_host_ns: int
    encloses: bool


@dataclass(frozen=True, slots=True)
class PhaseTable:
    """The time of the finished steps. All shares are of `wall_ns`, and None where that is 0."""

    steps: int
    first_step: int | None
    step: Times
    phases: list[PhaseRow]
    hooks: list[HookRow]
    unaccounted_ns: int
    unaccounted_share: float | None
    probe_ns: int
    probe_inside_ns: int
    probe_share: float | None
    slowest_step: int | None
    slowest_step_ns: int | None


class _Clock:
    """Durations of one thing by one clock, the first step apart."""

    def __init__(self) -> None:
        self._later = Distribution()
        self._first_count = 0
        self._first_ns = 0

    def add(self, value_ns: int, in_first_step: bool) -> None:
        if in_first_step:
            self._first_count += 1
            self._first_ns += value_ns
        else:
            self._later.add(value_ns)

    def times(self) -> Times:
        return Times(
            count=self._later.count + self._first_count,
            total_ns=self._later.total_ns + self._first_ns,
            median_ns=self._later.quantile_ns(0.5),
            p95_ns=self._later.quantile_ns(0.95),
            first_step_ns=self._first_ns if self._first_count else None,
            exact_quantiles=self._later.exact,
        )


class _Named:
    """The spans of one name."""

    def __init__(self) -> None:
        self.host = _Clock()
        self.device = _Clock()
        self.leaves = 0
        self.leaf_ns = 0

    def add(self, phase: Phase, leaf: bool, in_first_step: bool) -> None:
        self.host.add(phase.host_ns, in_first_step)
        if phase.device_ns is not None:
            self.device.add(phase.device_ns, in_first_step)
        if leaf:
            self.leaves += 1
            self.leaf_ns += phase.host_ns if phase.device_ns is None else phase.device_ns


class _Hook:
    """The calls of one hook at one stage."""

    def __init__(self) -> None:
        self.host = _Clock()
        self.inside_ns = 0
        self.encloses = False


class PhaseTimes:
    """Adds up the phases of steps that are fed to it in order."""

    def __init__(self) -> None:
        self._steps = 0
        self._first_step: int | None = None
        self._wall = _Clock()
        self._named: dict[str, _Named] = {name: _Named() for name in _ORDER}
        self._hooks: dict[tuple[str, str], _Hook] = {}
        self._leaf_host_ns = 0
        self._probe_ns = 0
        self._probe_inside_ns = 0
        self._slowest: tuple[int, int] | None = None

    def add(self, step: StepRecord) -> None:
        """Add a step; one that was broken off changes nothing."""
        if not step.complete:
            return
        first = self._first_step is None
        if self._first_step is None:
            self._first_step = step.step
        elif self._slowest is None or step.wall_ns > self._slowest[0]:
            self._slowest = (step.wall_ns, step.step)
        self._steps += 1
        self._wall.add(step.wall_ns, first)
        self._probe_ns += step.probe_ns
        self._probe_inside_ns += step.probe_inside_ns
        self._add_phases(step.phases, first)

    def _add_phases(self, phases: list[Phase], first: bool) -> None:
        inside_ns: dict[int, int] = {}
        for phase in phases:
            if phase.parent is not None:
                inside_ns[phase.parent] = inside_ns.get(phase.parent, 0) + phase.host_ns
        for index, phase in enumerate(phases):
            leaf = index not in inside_ns
            if leaf:
                self._leaf_host_ns += phase.host_ns
            if phase.name == "hook":
                self._add_hook(phase, None if leaf else inside_ns[index], first)
            # A hook that encloses other phases is not a phase beside them: its time stands in its own row only.
            if leaf or phase.name != "hook":
                named = self._named.get(phase.name)
                if named is None:
                    named = self._named[phase.name] = _Named()
                named.add(phase, leaf, first)

    def _add_hook(self, phase: Phase, inside_ns: int | None, first: bool) -> None:
        key = ("?" if phase.hook is UNSET else phase.hook, "?" if phase.stage is UNSET else phase.stage)
        hook = self._hooks.get(key)
        if hook is None:
            hook = self._hooks[key] = _Hook()
        hook.host.add(phase.host_ns, first)
        if inside_ns is not None:
            hook.inside_ns += inside_ns
            hook.encloses = True

    def table(self) -> PhaseTable:
        """Return the times so far."""
        wall = self._wall.times()
        unaccounted_ns = wall.total_ns - self._leaf_host_ns - self._probe_ns
        return PhaseTable(
            steps=self._steps,
            first_step=self._first_step,
            step=wall,
            phases=list(self._phase_rows(wall.total_ns)),
            hooks=list(self._hook_rows()),
            unaccounted_ns=unaccounted_ns,
            unaccounted_share=share(unaccounted_ns, wall.total_ns),
            probe_ns=self._probe_ns,
            probe_inside_ns=self._probe_inside_ns,
            probe_share=share(self._probe_ns + self._probe_inside_ns, wall.total_ns),
            slowest_step=self._slowest[1] if self._slowest else self._first_step,
            slowest_step_ns=self._slowest[0] if self._slowest else wall.first_step_ns,
        )

    def _phase_rows(self, wall_ns: int) -> Iterator[PhaseRow]:
        for name, named in self._named.items():
            host, device = named.host.times(), named.device.times()
            if host.count:
                leaf_share = share(named.leaf_ns, wall_ns) if named.leaves else None
                yield PhaseRow(name, host.count, host, device if device.count else None, leaf_share)

    def _hook_rows(self) -> Iterator[HookRow]:
        for (name, stage), hook in self._hooks.items():
            host = hook.host.times()
            yield HookRow(name, stage, host.count, host, host.total_ns - hook.inside_ns, hook.encloses)


def share(part_ns: int, whole_ns: int) -> float | None:
    """Return the part as a fraction of the whole, or None where the whole is 0."""
    return part_ns / whole_ns if whole_ns > 0 else None
