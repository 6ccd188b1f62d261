"""Looking into records in tests: picking them out, and what of a step is a leaf."""

from msprobe.schema import EndRecord, EventRecord, ModelRecord, ModuleRecord, StageRecord, StepRecord

KINDS = {"step": StepRecord, "stage": StageRecord, "module": ModuleRecord, "event": EventRecord, "model": ModelRecord, "end": EndRecord}


def of_kind(records, kind):
    """Return the records of a kind, in order."""
    return [record for record in records if isinstance(record, KINDS[kind])]


def steps_of(records):
    """Return the step records, in order."""
    return of_kind(records, "step")


def events_of(records, code):
    """Return the events of a code, in order."""
    return [event for event in of_kind(records, "event") if event.code == code]


def label(phase):
    """Return what a phase is called in tests: a hook by its class, every other by its name."""
    return phase.hook if phase.name == "hook" else phase.name


def leaves(step):
    """Return the phases that enclose no other."""
    parents = {phase.parent for phase in step.phases}
    return [phase for index, phase in enumerate(step.phases) if index not in parents]


def children(step, index):
    """Return the phases right inside the one of an index, or, for None, those at the top."""
    return [phase for phase in step.phases if phase.parent == index]


def index_of_hook(step, hook, stage="after_train_iter"):
    """Return the place of a hook's phase in the step."""
    (found,) = [index for index, phase in enumerate(step.phases) if phase.name == "hook" and (phase.hook, phase.stage) == (hook, stage)]
    return found


def end_of(phase):
    """Return when a phase ended, from the step's start."""
    return phase.start_ns + phase.host_ns
