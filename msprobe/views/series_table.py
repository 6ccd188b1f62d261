"""Numbers over the steps as curves: losses, gradient norms, learning rates, loss scale.

The summary page shows them. A norm always says which one it is; extremes are those of the finite values, and wherever a value was not
finite, a line below says how often, since when and of what kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from msprobe.analysis.losses import LossSeries
from msprobe.analysis.norms import NormSeries
from msprobe.analysis.series import Told
from msprobe.analysis.settings import SettingSeries
from msprobe.views.layout import Cell, heading, note, table
from msprobe.views.numbers import number, rate
from msprobe.views.sparkline import NOT_FINITE, sparkline
from msprobe.views.text import label, safe, shortened

_CURVE_COLUMNS = 18
_NAME_COLUMNS = 18
_GROUPS = 4
_DIGITS = 4

_Row = tuple[str, Told]


def loss_section(losses: LossSeries) -> Iterator[RenderableType]:
    """Yield the losses and their addends."""
    terms = losses.loss_terms if len(losses.loss_terms) > 1 else {}  # a single one is the loss itself
    rows = [*losses.loss.items(), *((f"+ {name}", told) for name, told in terms.items())]
    yield heading("Loss")
    yield from _curves(rows, "No loss was recorded.")


def norm_section(norms: Sequence[NormSeries]) -> Iterator[RenderableType]:
    """Yield the gradient norms before and after clipping, for each optimizer."""
    yield heading("Gradient norm")
    if not norms:
        yield note("None was recorded: there was no update.")
    for series in norms:
        yield from _curves(_norm_rows(series), "No norm was measured.")
        yield note(_clipping(series, several=len(norms) > 1))


def setting_section(settings: SettingSeries) -> Iterator[RenderableType]:
    """Yield learning rates, and the loss scale where a scaler worked."""
    groups = settings.lr[:_GROUPS]
    rows = [("learning rate" if len(settings.lr) == 1 else f"lr of group {index}", told) for index, told in enumerate(groups)]
    if settings.loss_scale.count:
        rows.append(("loss scale", settings.loss_scale))
    yield heading("Learning rate" + (" and loss scale" if settings.loss_scale.count else ""))
    yield from _curves(rows, "No learning rate was recorded.")
    if settings.final_loss_scale is not None:
        yield note(f"The loss scale after the last update is {number(settings.final_loss_scale)}.")
    if len(settings.lr) > _GROUPS:
        yield note(f"{len(settings.lr) - _GROUPS} more groups: --json.")


def _norm_rows(series: NormSeries) -> list[_Row]:
    clips = series.clip_calls > 0
    rows = [("before clipping" if clips else "all parameters", series.before_clip)]
    if clips:
        rows.append(("after clipping", series.after_clip))
    if _differs(series.optimizer_params, series.before_clip):
        rows.append(("optimizer's before" if clips else "optimizer's", series.optimizer_params))
        if clips:
            rows.append(("optimizer's after", series.optimizer_params_after))
    return rows


def _differs(one: Told, other: Told) -> bool:
    """Tell whether two series show different numbers: the optimizer may own fewer parameters than clipping takes."""
    keys = ("first", "last", "finite_min", "finite_max")
    return one.count > 0 and [number(getattr(one, key)) for key in keys] != [number(getattr(other, key)) for key in keys]


def _clipping(series: NormSeries, several: bool) -> str:
    of = f"Optimizer {series.optimizer}: " if several else ""
    order = ", ".join(f"{number(norm_type)}-norm" for norm_type in series.norm_types)
    if not series.clip_calls:
        return f"{of}nothing clips the gradients; {order} over all parameters with a gradient."
    bounds = ", ".join(map(number, series.max_norms))
    return f"{of}clipped in {rate(series.clipped, series.clip_calls)} updates; {order}, max_norm {bounds}."


def _curves(rows: Sequence[_Row], if_none: str) -> Iterator[RenderableType]:
    known = [(name, told) for name, told in rows if told.count or told.not_recorded]
    if not known:
        yield note(if_none)
        return
    cells: list[list[Cell]] = [
        [
            label(shortened(safe(name), _NAME_COLUMNS)),
            sparkline(told.curve, _CURVE_COLUMNS),
            *(number(value, _DIGITS) for value in (told.first, told.last, told.finite_min, told.finite_max)),
        ]
        for name, told in known
    ]
    nonfinite = any(told.nonfinite_count for _, told in known)
    extremes = ["finite\nmin", "finite\nmax"] if nonfinite else ["min", "max"]
    yield table(["", "", "first", "last", *extremes], cells, left=2, gap=1)
    for name, told in known:
        yield from _remarks(name, told)


def _remarks(name: str, told: Told) -> Iterator[RenderableType]:
    if told.nonfinite_count:
        kinds = [f"{count:,} {kind}" for kind, count in (("NaN", told.nan), ("+inf", told.posinf), ("-inf", told.neginf)) if count]
        yield note(
            f"{name}: not finite ({NOT_FINITE}) in {rate(told.nonfinite_count, told.count)} values, first at step "
            f"{told.first_nonfinite_step} ({', '.join(kinds)}); the extremes are over the {told.finite_count:,} finite values."
        )
    if told.not_recorded:
        yield note(f"{name}: not recorded in {told.not_recorded:,} steps.")
