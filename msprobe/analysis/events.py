"""The events of a run by their code: how many, when first, and what the first one said.

`analysis.summary` feeds it every event once. Only the first event of a code is kept whole, so ten thousand warnings cost no more than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msprobe.schema import EventRecord, Level

_SEVERITY: dict[Level, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(slots=True)
class EventGroup:
    """All events of one code and level; message, step and data are those of the first."""

    code: str
    level: Level
    count: int
    first_step: int | None
    last_step: int | None
    message: str
    data: dict[str, Any]


class Events:
    """Groups events that are fed to it in order."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], EventGroup] = {}

    def add(self, event: EventRecord) -> None:
        """Count an event."""
        group = self._groups.get((event.code, event.level))
        if group is None:
            self._groups[event.code, event.level] = EventGroup(
                event.code, event.level, 1, event.step, event.step, event.message, event.data
            )
        else:
            group.count += 1
            group.last_step = event.step if event.step is not None else group.last_step

    def told(self) -> list[EventGroup]:
        """Return the groups so far, errors first, then in order of appearance."""
        return sorted(self._groups.values(), key=lambda group: _SEVERITY[group.level])
