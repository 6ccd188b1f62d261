"""The page that a user looks at first: what was trained, how it went, where the time went, what is wrong, and what to type next.

`msprobe summary` prints it. It turns what `analysis.summary` found into renderables for 80 columns, and renders a run without a single
step as well as a finished one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from msprobe.analysis.events import EventGroup
from msprobe.analysis.health import BadValue, Health
from msprobe.analysis.overview import Overview, Tally
from msprobe.analysis.progress import Progress
from msprobe.analysis.summary import RankSummary
from msprobe.schema import RunRecord, TensorRecord
from msprobe.views.layout import Cell, command_line, facts, heading, sentence, table
from msprobe.views.numbers import duration, number, size
from msprobe.views.series_table import loss_section, norm_section, setting_section
from msprobe.views.text import counted, label
from msprobe.views.time_tables import median_step, module_section, outside_section, phase_section

_EVENTS = 12
_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}


def summary_page(path: str, ranks: Sequence[RankSummary], shown: RankSummary) -> Iterator[RenderableType]:
    """Yield the page.

    Args:
        path: the run as the user named it.
        ranks: all ranks; more than one get a line each.
        shown: the one that the page is about.
    """
    yield label(path, style="bold")
    yield facts(_facts(shown, ranks))
    if shown.progress.steps or shown.progress.broken_off:
        yield from _health_section(ranks)
    yield from phase_section(shown.time)
    yield from outside_section(shown.outside, shown.time)
    yield from module_section(shown.modules, shown.time)
    if shown.progress.steps or shown.progress.broken_off:
        yield from loss_section(shown.losses)
        yield from norm_section(shown.gradient_norms)
        yield from setting_section(shown.settings)
    yield from _rank_section(ranks)
    yield from _event_section(ranks)
    yield from _next_section(path, ranks, shown)


def _facts(shown: RankSummary, ranks: Sequence[RankSummary]) -> Iterator[tuple[str, Cell]]:
    overview = shown.overview
    if len(ranks) > 1:
        yield "rank", label(f"{shown.rank} ({shown.file}), one of {len(ranks)} files; --rank shows another")
    if overview.trainer is None:
        yield "trained", "nothing: no train() began" if shown.records else "nothing: there is no readable record"
    else:
        yield from _trained(overview)
    yield "steps", _steps(shown.progress)
    yield "ended", _ended(shown)
    memory = _memory(shown)
    if memory:
        yield "memory", memory


def _trained(overview: Overview) -> Iterator[tuple[str, Cell]]:
    yield "trained", label(f"{overview.model_class} by {overview.trainer}, {overview.processor}")
    if overview.trains > 1:
        yield "", f"{overview.trains:,} train() calls in this run; the model is that of the last"
    for optimizer in overview.optimizers:
        rates = ", ".join(dict.fromkeys(number(lr) for lr in optimizer.lr))
        lr = f", lr {rates}" if rates else ""
        yield "optimizer", label(f"{optimizer.class_name}: {counted(optimizer.groups, 'group')}{lr}")
    if not overview.optimizers:
        yield "optimizer", "none was seen"
    yield "parameters", label(_parameters(overview))
    gradients = _gradients(overview)
    if gradients:
        yield "gradients", label(gradients)


def _parameters(overview: Overview) -> str:
    parameters = overview.parameters
    dtypes = ", ".join(parameters.trainable_dtypes)
    lines = [
        f"{_tally(parameters.trainable)} trainable{f' ({dtypes})' if dtypes else ''}",
        f"{_tally(parameters.frozen)} frozen",
        f"{_tally(parameters.in_optimizer)} in an optimizer",
    ]
    if parameters.trainable_without_optimizer.parameters:
        lines.append(f"{_tally(parameters.trainable_without_optimizer)} trainable but in no optimizer")
    if parameters.frozen_in_optimizer.parameters:
        lines.append(f"{_tally(parameters.frozen_in_optimizer)} in an optimizer but frozen")
    return "; ".join(lines)


def _tally(tally: Tally) -> str:
    return f"{tally.parameters:,} ({tally.values:,} values)" if tally.parameters else "0"


def _gradients(overview: Overview) -> str:
    gradients = overview.gradients
    if gradients.never is None:
        return "not recorded for single parameters"
    parts = []
    if gradients.never:
        parts.append(f"{counted(gradients.never, 'trainable parameter')} had no gradient: {_names(gradients.never_names, gradients.never)}")
    else:
        parts.append("0 trainable parameters had no gradient")
    if gradients.sometimes:
        parts.append(f"{gradients.sometimes:,} had none at some steps")
    if gradients.without_optimizer:
        names = _names(gradients.without_optimizer_names, gradients.without_optimizer)
        parts.append(f"{gradients.without_optimizer:,} have one but are in no optimizer: {names}")
    return "; ".join(parts)


def _names(names: Sequence[str], count: int) -> str:
    few = ", ".join(names[:3])
    return few if count <= 3 else f"{few} and {count - 3:,} more"


def _steps(progress: Progress) -> str:
    if not progress.steps and not progress.broken_off:
        return "0"
    epochs = (
        f"{progress.first_epoch}" if progress.first_epoch == progress.last_epoch else f"{progress.first_epoch} to {progress.last_epoch}"
    )
    parts = [
        f"{counted(progress.steps, 'step')} ({_range(progress)}epoch {epochs})",
        counted(progress.updates, "update"),
        f"{progress.skipped:,} skipped",
        counted(progress.unapplied_micro_steps, "unapplied micro-step"),
    ]
    if progress.broken_off:
        parts.insert(1, f"{progress.broken_off:,} broken off (step {progress.broken_step})")
    if progress.unknown:
        parts.append(f"{progress.unknown:,} of unknown outcome")
    if any(accumulated > 1 for accumulated in progress.accumulation_sizes):
        parts.append(f"an update every {' or '.join(map(str, progress.accumulation_sizes))} steps")
    return "; ".join(parts)


def _range(progress: Progress) -> str:
    """Return which steps were finished."""
    if progress.first_step is None:
        return ""
    return f"{progress.first_step}, " if progress.first_step == progress.last_step else f"{progress.first_step} to {progress.last_step}, "


def _ended(shown: RankSummary) -> Text:
    progress = shown.progress
    parts = [f"{ending.reason} after {counted(ending.steps, 'step')}" for ending in progress.endings[-3:]]
    if progress.cut:
        after = "before its first step" if progress.last_step is None else f"after step {progress.last_step}"
        parts.append(f"the run was cut {after}: there is no end record (it was killed, or is still running)")
    if progress.missing_steps:
        parts.append(f"{counted(progress.missing_steps, 'finished step')} missing from the trace")
    if progress.dropped_records:
        parts.append(f"{counted(progress.dropped_records, 'record')} dropped while recording")
    parts += [f"{_place(event)}{event.message}" for event in shown.events if event.code == "exception"]
    plain = not progress.cut and all(ending.reason == "finished" for ending in progress.endings)
    return label("; ".join(parts), style="" if plain else "yellow")


def _place(event: EventGroup) -> str:
    """Return where an exception was raised, as far as its message does not say so itself."""
    places = [f"step {event.first_step}"] if event.first_step is not None else []
    found = [(key, str(event.data[key])) for key in ("phase", "module") if event.data.get(key)]
    places += [f"{key} {value}" for key, value in found if value not in event.message]
    return f"in {', '.join(places)}: " if places else ""


def _memory(shown: RankSummary) -> str:
    memory = shown.settings.memory_max
    parts = [
        (memory.peak_bytes, "peak on the device"),
        (memory.allocated_bytes, "allocated at a step's end at most"),
        (memory.reserved_bytes, "reserved"),
        (memory.rss_bytes, "resident on the host"),
    ]
    return ", ".join(f"{size(value)} {what}" for value, what in parts if value is not None)


def _health_section(ranks: Sequence[RankSummary]) -> Iterator[RenderableType]:
    yield heading("First bad value")
    bad = first_bad(ranks)
    if bad is None:
        yield sentence("None: every recorded loss, gradient norm and gradient was finite" + _skips(ranks) + ".")
        return
    rank, health, value = bad
    where = f" on rank {rank.rank}" if len(ranks) > 1 else ""
    also = f" In the same step: {'; '.join(map(_described, health.also_bad[:3]))}." if health.also_bad else ""
    also += f" ({len(health.also_bad) - 3:,} more.)" if len(health.also_bad) > 3 else ""
    yield sentence(label(f"Step {value.step}{where}: {_described(value)}.{also}", style="bold red"))
    origin = rank.origins.get(value.step)
    if origin is not None:
        yield sentence(label(_origin(origin), style="bold red"))
    yield sentence(f"{counted(health.bad_steps, 'step')} had a bad value{_skips(ranks)}.")


def first_bad(ranks: Sequence[RankSummary]) -> tuple[RankSummary, Health, BadValue] | None:
    """Return the earliest bad value of all ranks, with its rank."""
    found = [(rank, rank.health, rank.health.first_bad) for rank in ranks if rank.health.first_bad is not None]
    return min(found, key=lambda item: item[2].step) if found else None


def _described(bad: BadValue) -> str:
    if bad.value is not None:
        return f"{bad.what} was {number(float(bad.value))}"
    kinds = [f"{count:,} {kind}" for kind, count in (("NaN", bad.nan), ("+inf", bad.posinf), ("-inf", bad.neginf)) if count]
    of = "" if bad.numel is None else f" among {bad.numel:,} values"
    return f"{bad.what} held {', '.join(kinds)}{of}"


def _origin(origin: TensorRecord) -> str:
    """Say which module output was the first that was not finite, in execution order."""
    kinds = [f"{count:,} {kind}" for kind, count in (("NaN", origin.nan), ("+inf", origin.posinf), ("-inf", origin.neginf)) if count]
    path = f", {origin.path}" if origin.path else ""
    of = f" among {origin.numel:,} values" if origin.numel is not None else ""
    whose = f"{origin.name} (call {origin.call}{path})"
    return f"In execution order, the first module output that was not finite is that of {whose}: {', '.join(kinds)}{of}."


def _skips(ranks: Sequence[RankSummary]) -> str:
    skips = sum(rank.health.overflow_skips for rank in ranks)
    return f"; {counted(skips, 'update')} skipped by the loss scaler, which is its ordinary work" if skips else ""


def _rank_section(ranks: Sequence[RankSummary]) -> Iterator[RenderableType]:
    if len(ranks) < 2:
        return
    rows: list[list[Cell]] = []
    for rank in ranks:
        loss = next(iter(rank.losses.loss.values()), None)
        bad = rank.health.first_bad
        rows.append(
            [
                label(rank.file.removesuffix(".jsonl")),
                f"{rank.progress.steps:,}",
                f"{rank.progress.updates:,}",
                number(loss.last if loss else None),
                median_step(rank.time),
                f"step {bad.step}" if bad else "none",
                "cut" if rank.progress.cut else rank.progress.endings[-1].reason,
            ]
        )
    yield heading("Ranks")
    yield table(["file", "steps", "updates", "last loss", "step time", "first bad", "ended"], rows)


def _event_section(ranks: Sequence[RankSummary]) -> Iterator[RenderableType]:
    groups = [(rank.rank, event) for rank in ranks for event in rank.events]
    if not groups:
        return
    yield heading("Events")
    rows: list[list[Cell]] = []
    for rank, event in groups[:_EVENTS]:
        step = "–" if event.first_step is None else str(event.first_step)
        where = f"{rank}" if len(ranks) > 1 else ""
        rows.append(
            [Text(event.level, style=_STYLES[event.level]), where, f"{event.count:,}", step, label(f"{event.code}: {event.message}")]
        )
    yield table(["level", "rank" if len(ranks) > 1 else "", "count", "step", "first of its kind"], rows, left=5)
    if len(groups) > _EVENTS:
        yield sentence(f"{len(groups) - _EVENTS} more kinds: --json.")


def _next_section(path: str, ranks: Sequence[RankSummary], shown: RankSummary) -> Iterator[RenderableType]:
    yield heading("Next")
    for command, why in next_commands(path, ranks, shown):
        yield command_line(command, why)


def next_commands(path: str, ranks: Sequence[RankSummary], shown: RankSummary) -> Iterator[tuple[str, str]]:
    """Yield commands that answer the next question, each with what it shows."""
    run = shlex.quote(path)
    bad = first_bad(ranks)
    if bad is not None:
        option = f" --rank {bad[0].rank}" if bad[0].rank != ranks[0].rank else ""
        yield f"msprobe show {run} --step {bad[2].step}{option}", "the step with the first bad value"
        again = _trace_again(shown.header, bad[2].step)
        if again is not None and bad[2].step not in bad[0].origins:
            yield again, "run again, recording what every module of that step produced"
    elif shown.progress.broken_step is not None:
        yield f"msprobe show {run} --step {shown.progress.broken_step}", "the step that was broken off"
    elif shown.time.slowest_step is not None:
        option = f" --rank {shown.rank}" if shown.rank != ranks[0].rank else ""
        slowest = duration(shown.time.slowest_step_ns)
        yield f"msprobe show {run} --step {shown.time.slowest_step}{option}", f"the slowest step but the first, {slowest}"
    if shown.overview.trainer is not None:
        yield f"msprobe hooks {run}", "ModelScope's hooks, their order and time"
    else:
        yield "msprobe doctor", "what can be recorded here"


def _trace_again(header: RunRecord | None, step: int) -> str | None:
    """Return the command that records the same script again, with the module outputs of one step."""
    if header is None or not header.argv or header.argv[0] in ("", "-c"):
        return None
    return f"msprobe trace --tensors param.grad --tensors module.output --steps {step} {shlex.join(header.argv)}"
