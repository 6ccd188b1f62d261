"""Everything that `msprobe summary` says of a run, gathered in one pass over each rank's file.

The command calls `summarise`; each question has its own collector in a module of its own, and this one only hands out the records. The
memory in use does not grow with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msprobe import schema
from msprobe.analysis.events import EventGroup, Events
from msprobe.analysis.health import Health, HealthCheck
from msprobe.analysis.losses import Losses, LossSeries
from msprobe.analysis.modules import ModuleRow, ModuleTimes
from msprobe.analysis.norms import Norms, NormSeries
from msprobe.analysis.origin import Origins
from msprobe.analysis.outside import OutsideTimes, StageTime
from msprobe.analysis.overview import ModelOverview, Overview
from msprobe.analysis.phases import PhaseTable, PhaseTimes
from msprobe.analysis.progress import Progress, ProgressCount
from msprobe.analysis.settings import Settings, SettingSeries
from msprobe.trace.reader import RankFile


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one process recorded. `header` is None where the first line could not be read."""

    file: str
    rank: int
    records: int
    header: schema.RunRecord | None
    overview: Overview
    progress: Progress
    time: PhaseTable
    modules: list[ModuleRow]
    losses: LossSeries
    gradient_norms: list[NormSeries]
    settings: SettingSeries
    health: Health
    origins: dict[int, schema.TensorRecord | None]
    outside: list[StageTime]
    events: list[EventGroup]


class _Collectors:
    """One collector for each question, and the way from a record to those whom it concerns."""

    def __init__(self) -> None:
        self.header: schema.RunRecord | None = None
        self.overview = ModelOverview()
        self.progress = ProgressCount()
        self.time = PhaseTimes()
        self.modules = ModuleTimes()
        self.losses = Losses()
        self.norms = Norms()
        self.settings = Settings()
        self.health = HealthCheck()
        self.origins = Origins()
        self.outside = OutsideTimes()
        self.events = Events()

    def add(self, record: schema.AnyRecord) -> None:
        match record:
            case schema.StepRecord():
                self._add_step(record)
            case schema.ModuleRecord():
                self.modules.add(record)
            case schema.TensorRecord():
                self.overview.add_tensor(record)
                self.health.add_tensor(record)
                self.origins.add(record)
            case schema.NormsRecord():
                self.overview.add_norms(record)
            case schema.StageRecord():
                self.outside.add(record)
            case schema.EventRecord():
                self.events.add(record)
            case schema.ModelRecord():
                self.overview.add_model(record)
                self.progress.add_model(record)
            case schema.EndRecord():
                self.progress.add_end(record)
            case schema.RunRecord():
                self.header = self.header or record

    def _add_step(self, step: schema.StepRecord) -> None:
        self.progress.add_step(step)
        self.time.add(step)
        self.losses.add(step)
        self.norms.add(step)
        self.settings.add(step)
        self.health.add_step(step)


def summarise(files: Sequence[RankFile]) -> list[RankSummary]:
    """Return a summary of each rank's file, in the order given."""
    return [_summarise_file(file) for file in files]


def _summarise_file(file: RankFile) -> RankSummary:
    found = _Collectors()
    records = 0
    for record in file.records():
        records += 1
        found.add(record)
    return RankSummary(
        file=file.name,
        rank=file.rank,
        records=records,
        header=found.header,
        overview=found.overview.told(),
        progress=found.progress.told(),
        time=found.time.table(),
        modules=found.modules.rows(),
        losses=found.losses.told(),
        gradient_norms=found.norms.told(),
        settings=found.settings.told(),
        health=found.health.told(),
        origins=found.origins.told(),
        outside=found.outside.told(),
        events=found.events.told(),
    )
