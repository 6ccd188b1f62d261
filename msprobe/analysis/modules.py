"""How the forward and backward time of a run divides among the modules that were recorded.

`analysis.summary` feeds it every module record once. A recorded module may lie inside another recorded one, so shares of nested modules
overlap; `outermost` says which ones do not. Memory grows with the number of module names, not with the number of calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from msprobe.schema import ModuleRecord


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module over all steps. `device_ns` is None where no call had one."""

    name: str
    direction: str
    outermost: bool
    calls: int
    recomputed: int
    host_ns: int
    device_ns: int | None

    @property
    def time_ns(self) -> int:
        """The device time where there is one, else the host time."""
        return self.host_ns if self.device_ns is None else self.device_ns


class _Calls:
    __slots__ = ("calls", "device_calls", "device_ns", "host_ns", "recomputed")

    def __init__(self) -> None:
        self.calls = 0
        self.recomputed = 0
        self.host_ns = 0
        self.device_ns = 0
        self.device_calls = 0


class ModuleTimes:
    """Adds up module calls that are fed to it."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _Calls] = {}

    def add(self, record: ModuleRecord) -> None:
        """Add a call of a module."""
        calls = self._calls.get((record.name, record.direction))
        if calls is None:
            calls = self._calls[record.name, record.direction] = _Calls()
        calls.calls += 1
        calls.recomputed += record.recompute
        calls.host_ns += record.host_ns
        if record.device_ns is not None:
            calls.device_ns += record.device_ns
            calls.device_calls += 1

    def rows(self) -> list[ModuleRow]:
        """Return the modules, forward before backward, the longest first."""
        names = {name for name, _ in self._calls}
        rows = [
            ModuleRow(
                name=name,
                direction=direction,
                outermost=not any(ancestor in names for ancestor in _ancestors(name)),
                calls=calls.calls,
                recomputed=calls.recomputed,
                host_ns=calls.host_ns,
                device_ns=calls.device_ns if calls.device_calls else None,
            )
            for (name, direction), calls in self._calls.items()
        ]
        return sorted(rows, key=lambda row: (row.direction != "forward", -row.time_ns, row.name))


def _ancestors(name: str) -> list[str]:
    """Return the paths that enclose a module's path: `a.b.c` lies in `a.b` and `a`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
