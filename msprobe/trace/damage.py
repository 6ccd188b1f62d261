"""What could not be read in a trace file: which lines, why, and how many.

`trace.reader` keeps one `DamageReport` per file and pass; the commands print what `sentences` says of it to stderr. A report holds a
bounded number of lines in detail and counts the rest, so that a file of nothing but rubbish costs no memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

_DETAILED_LINES = 1000
_NAMED_LINES = 12
_KILLED = "cut at the end of the file: the run was killed while writing"


class Damage(NamedTuple):
    """A line that was skipped. `at_tail`: the file ends in the middle of it, which is what a killed run leaves behind."""

    file: str
    line: int
    at_tail: bool
    reason: str


@dataclass(slots=True)
class DamageReport:
    """The damage of one file, as one pass over it found it.

    `records` counts the good ones, `lines` is the number of the last line looked at, `count` counts all damaged lines while `damage`
    holds the first thousand and the cut one. `unknown_kinds` counts sound lines of kinds that this version does not know.
    """

    file: str
    records: int = 0
    lines: int = 0
    count: int = 0
    damage: list[Damage] = field(default_factory=list)
    unknown_kinds: Counter[str] = field(default_factory=Counter)

    def add(self, line: int, reason: str, at_tail: bool) -> None:
        """Count a damaged line, and keep it while there is room."""
        self.count += 1
        if at_tail or len(self.damage) < _DETAILED_LINES:
            self.damage.append(Damage(self.file, line, at_tail, reason))

    def sentences(self) -> list[str]:
        """Return at most one line on the damage and one on unknown kinds, each naming the file."""
        lines = []
        if self.count == 1:
            lines.append(f"{self.file}: {_one(self.damage[0], self.lines)}")
        elif self.count > 1:
            lines.append(f"{self.file}: {self._several()}")
        if self.unknown_kinds:
            kinds = ", ".join(f"{count} {kind!r}" for kind, count in sorted(self.unknown_kinds.items()))
            lines.append(f"{self.file}: records of kinds that this version of msprobe does not know were passed over: {kinds}")
        return lines

    def _several(self) -> str:
        inside = [damage.line for damage in self.damage if not damage.at_tail]
        cut = [damage.line for damage in self.damage if damage.at_tail]
        unnamed = self.count - len(cut) - min(len(inside), _NAMED_LINES)
        named = ", ".join(map(str, inside[:_NAMED_LINES])) + (f" and {unnamed} more" if unnamed else "")
        parts = [f"{'lines' if len(inside) > 1 else 'line'} {named} in the middle of the file (damaged)"]
        parts += [f"line {line} ({_KILLED})" for line in cut]
        return f"{self.count} lines cannot be read and were skipped: {'; '.join(parts)}"


def _one(damage: Damage, last_line: int) -> str:
    if damage.at_tail:
        return f"line {damage.line} cannot be read and was skipped ({_KILLED})"
    where = "" if damage.line == last_line else " in the middle of the file"
    return f"line {damage.line}{where} cannot be read and was skipped (damaged, not cut: {damage.reason})"
