"""What happened to the weights in one step: clipping, optimizer steps, their outcome, and the gradient norms that went into them.

The session passes on what the seams see: clipping begins and ends, `scaler.step` begins and ends, an optimizer's step begins, the scaler
updates. The norms of an update are taken at the first of: clipping that takes its parameters, `scaler.step`, the optimizer's own step.
Several optimizers in one step each have their update. Outcomes come from the scaler's overflow flags, never from a changed scale (a
fixed scale does not change when a step is skipped) nor from whether the optimizer's step was called (a fused one is called all the same).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from msprobe.capture import scaling
from msprobe.capture.gradients import Gradients, Measurement, with_gradient
from msprobe.capture.measured import put_many_statistics
from msprobe.capture.parameters import ParameterTable
from msprobe.capture.plan import StepPlan
from msprobe.capture.readback import Readback, Slot
from msprobe.capture.statistics import why_no_statistics
from msprobe.schema import GradientPoint, GradNorm, LossScale, OptimizerOutcome, Update


class Clipping:
    """One clipping: its arguments, the parameters that it took, and what was measured around it."""

    def __init__(self, keys: set[int], max_norm: float | None, norm_type: float, before: Moment) -> None:
        self.keys = keys
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.before = before
        self.gradients: Gradients | None = None  # only while the clipping runs: nothing may keep a gradient alive
        self.after: Moment | None = None
        self.returned: Slot | float | None = None

    @property
    def returned_value(self) -> float | None:
        """Return what the clipping call returned, as a number."""
        return self.returned.value() if isinstance(self.returned, Slot) else self.returned

    def acted(self) -> bool | None:
        """Tell whether torch's coefficient was below 1 (torch/nn/utils/clip_grad.py, `_clip_grads_with_norm_`)."""
        returned = self.returned_value
        if returned is None or self.max_norm is None:
            return None
        return self.max_norm / (returned + 1e-6) < 1.0


class Moment:
    """All gradients measured at one moment: by l2, and by the clipping's own order where that is another.

    Attributes:
        full: the statistics of single gradients, by the `id` of the parameter.
        dumps: the keys under which gradients are kept whole.
        is_verbatim: what is told of it holds the loss scale, as the gradients did.
    """

    def __init__(self, l2: Measurement, by_order: Measurement, point: GradientPoint) -> None:
        self.l2 = l2
        self.by_order = by_order
        self.point = point
        self.full: dict[int, Slot] = {}
        self.dumps: dict[int, str] = {}
        self.is_verbatim = False

    def scale_of(self, key: int) -> float:
        """Return the factor to take out of what was measured of a gradient: the loss scale that it held, or 1."""
        return 1.0 if self.is_verbatim else self.l2.scale_of(key)

    def of_order(self, order: float) -> Measurement | None:
        """Return the measurement of that order, or None where it was not taken."""
        return next((found for found in (self.l2, self.by_order) if found.order == order), None)


class PendingUpdate:
    """One optimizer's update in this step, until its values have arrived."""

    def __init__(self, optimizer: int, keys: set[int]) -> None:
        self.optimizer = optimizer
        self.keys = keys
        self.clippings: list[Clipping] = []
        self.before: Moment | None = None
        self.begun = False
        self.ran = False
        self.overflow: list[Slot] | None = None
        self.scale_before: Slot | None = None
        self.scale_after: Slot | None = None
        self.weights: dict[int, torch.Tensor] = {}  # copies of what the optimizer is changing, only while it does

    def outcome(self) -> OptimizerOutcome:
        """Return whether the weights were updated: by the overflow flags where a scaler decides, else by the call."""
        if self.overflow is not None:
            return "skipped" if any(slot.value() > 0 for slot in self.overflow) else "done"
        return "done" if self.ran else "none"

    def moment(self) -> Moment | None:
        """Return the moment at which this update's norms were taken, before any clipping."""
        return self.clippings[0].before if self.clippings else self.before

    def moment_after(self) -> Moment | None:
        """Return the moment after the last clipping, or None where nothing clipped."""
        return self.clippings[-1].after if self.clippings else None

    def takes_gradients_as_they_are(self) -> None:
        """Take this update's gradients as never scaled: the optimizer's step was called directly, so no scaler has a say."""
        moments = [self.before, *(moment for clipping in self.clippings for moment in (clipping.before, clipping.after))]
        for moment in moments:
            if moment is not None:
                moment.l2.scaled.difference_update(self.keys)
                moment.by_order.scaled.difference_update(self.keys)

    def loss_scale(self) -> LossScale | None:
        """Return the scale around this update, or None where no scaler took part."""
        if self.scale_before is None:
            return None
        after = None if self.scale_after is None else self.scale_after.value()
        return LossScale(before=self.scale_before.value(), after=after)

    def grad_norm(self, model_keys: Collection[int]) -> GradNorm | None:
        """Compose the totals of this update; without clipping, `before_clip` is over the model's parameters, `model_keys`."""
        moment = self.moment()
        if moment is None:
            return None
        if not self.clippings:
            return GradNorm(
                norm_type=2.0,
                before_clip=moment.l2.total(model_keys),
                optimizer_params=moment.l2.total(self.keys),
                optimizer=self.optimizer,
            )
        return _clipped_norm(self.clippings, self.keys, self.optimizer)

    def describe(self, model_keys: Collection[int]) -> Update:
        """Return the record's form of this update."""
        return Update(optimizer=self.optimizer, outcome=self.outcome(), grad_norm=self.grad_norm(model_keys), loss_scale=self.loss_scale())


def _clipped_norm(clippings: Sequence[Clipping], owned: set[int], optimizer: int) -> GradNorm:
    """Describe the clipping before an update; where there were several (one per part of the model), from the first to the last."""
    first, last = clippings[0], clippings[-1]
    taken = set().union(*(clipping.keys for clipping in clippings))
    before = first.before.by_order
    after = None if last.after is None else last.after.of_order(first.norm_type)
    return GradNorm(
        norm_type=first.norm_type,
        max_norm=first.max_norm,
        before_clip=before.total(taken),
        clip_returned=first.returned_value,
        after_clip=after.total(taken) if after is not None else None,
        clipped=_any_known(clipping.acted() for clipping in clippings),
        optimizer_params=before.total(owned),
        optimizer_params_after=after.total(owned) if after is not None else None,
        optimizer=optimizer,
    )


def _any_known(answers: Iterable[bool | None]) -> bool | None:
    """Return whether any answer is yes, or None where none is known."""
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


class StepUpdates:
    """The updates of one step, in the order in which they happened."""

    def __init__(self, table: ParameterTable, readback: Readback, plan: StepPlan) -> None:
        self.all: list[PendingUpdate] = []
        self.clippings: list[Clipping] = []
        self.saw_scaled: list[str] = []
        self.scaled: list[Moment] = []
        self._table = table
        self._readback = readback
        self._plan = plan
        self._described = [table.parameters[number] for number in plan.described]

    def unscale_begins(self, optimizer: Any, scaler: Any) -> None:
        """Describe the gradients that `unscale_` is about to divide, as they are: times the loss scale."""
        if not self._plan.full or not scaling.is_scaling(scaler):
            return
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        nothing = Measurement(2.0, (), None)
        moment = Moment(nothing, nothing, "after_backward")
        moment.is_verbatim = True
        self._take_statistics(moment, [parameter for parameter in self._described if id(parameter) in owned])
        self.scaled.append(moment)

    def clip_begins(self, parameters: Sequence[torch.Tensor], arguments: dict[str, Any], scaler: Any) -> Clipping:
        """Measure before clipping; `parameters` is what the clipping call will take (it drops those without gradient)."""
        taken = with_gradient(parameters)
        keys = {id(parameter) for parameter in taken}
        norm_type = _order(arguments.get("norm_type", 2.0))
        gradients = self._gather(taken)
        moment = self._measure(gradients, norm_type, scaler)
        self._describe(moment)
        clipping = Clipping(keys, _number(arguments.get("max_norm")), norm_type, moment)
        clipping.gradients = gradients
        if scaling.is_scaling(scaler):
            self.saw_scaled = self._still_scaled(taken, scaler)
        self.clippings.append(clipping)
        return clipping

    def clip_ends(self, clipping: Clipping, parameters: Sequence[torch.Tensor], returned: Any, scaler: Any) -> None:
        """Measure after clipping, and keep what the call returned."""
        gathered, clipping.gradients = clipping.gradients, None
        gradients = gathered if gathered is not None and gathered.are_current() else self._gather(with_gradient(parameters))
        moment = self._measure(gradients, clipping.norm_type, scaler)
        clipping.after = Moment(moment.l2, moment.by_order, "after_clip")
        if self._plan.full:
            self._take_statistics(clipping.after, self._described)
        clipping.returned = self._readback.put(returned) if isinstance(returned, torch.Tensor) else _number(returned)

    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> PendingUpdate:
        """Note the scale, and measure the gradients unless clipping did."""
        update = self._begin(optimizer, scaler)
        if scaling.is_scaling(scaler):
            update.scale_before = self._readback.put(scaling.scale_tensor(scaler))
        return update

    def scaler_step_ends(self, scaler: Any, update: PendingUpdate, optimizer: Any) -> None:
        """Keep the overflow flags, which `scaler.update` will forget."""
        if scaling.is_scaling(scaler):
            update.overflow = [self._readback.put(flag) for flag in scaling.found_inf(scaler, optimizer)]

    def scaler_updated(self, scaler: Any) -> None:
        """Note the scale after `scaler.update` for every update that it followed."""
        if not scaling.is_scaling(scaler):
            return
        for update in self.all:
            if update.scale_before is not None and update.scale_after is None:
                update.scale_after = self._readback.put(scaling.scale_tensor(scaler))

    def optimizer_step_begins(self, optimizer: Any, scaler: Any, within: PendingUpdate | None) -> PendingUpdate:
        """Note that an optimizer's own step runs; `within` is the update of the `scaler.step` around it, if there is one."""
        if within is None:
            update = self._begin(optimizer, scaler)
            update.takes_gradients_as_they_are()
        else:
            update = within
        update.begun = True
        return update

    def _begin(self, optimizer: Any, scaler: Any) -> PendingUpdate:
        keys = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        update = PendingUpdate(self._table.optimizer_number(optimizer), keys)
        update.clippings = self._clippings_for(keys)
        if not update.clippings:
            update.before = self._measure(self._gather([]), 2.0, scaler)
            self._describe(update.before)
        self.all.append(update)
        return update

    def _clippings_for(self, keys: set[int]) -> list[Clipping]:
        """Return the clippings, oldest first, that took this optimizer's parameters and belong to no earlier update of theirs."""
        used = {id(clipping) for update in self.all if update.keys & keys for clipping in update.clippings}
        return [clipping for clipping in self.clippings if id(clipping) not in used and (clipping.keys & keys or not clipping.keys)]

    def _measure(self, gradients: Gradients, norm_type: float, scaler: Any) -> Moment:
        scaled: set[int] = set()
        scale = None
        point: GradientPoint = "after_backward"
        if scaling.is_scaling(scaler):
            scaled = gradients.keys - scaling.unscaled_parameters(scaler, self._table.optimizers)
            scale = scaling.scale_tensor(scaler)
            point = "after_unscale"
        l2 = gradients.measure(self._readback, 2.0, scaled, scale)
        by_order = l2 if norm_type == 2.0 else gradients.measure(self._readback, norm_type, scaled, scale)
        return Moment(l2, by_order, point)

    def _describe(self, moment: Moment) -> None:
        """Say more of the gradients of which more is wanted: all statistics, or the whole tensor."""
        if self._plan.full:
            self._take_statistics(moment, self._described)
        for number in self._plan.dumped_gradients:
            parameter, key = self._table.parameters[number], f"param.grad|{self._table.names[number][0]}|{moment.point}"
            for held in with_gradient([parameter]):
                if held.grad is not None and self._plan.keep(key, held.grad, role="param.grad", name=self._table.names[number][0]):
                    moment.dumps[id(parameter)] = key

    def _take_statistics(self, moment: Moment, parameters: Sequence[torch.Tensor]) -> None:
        found = [(id(parameter), parameter.grad) for parameter in with_gradient(parameters)]
        readable = [(key, gradient) for key, gradient in found if gradient is not None and why_no_statistics(gradient) is None]
        slots = put_many_statistics([gradient for _, gradient in readable], self._readback)
        moment.full.update(zip([key for key, _ in readable], slots, strict=True))

    def _gather(self, extra: Sequence[torch.Tensor]) -> Gradients:
        """Gather the gradients of the model, of every known optimizer, and of `extra`, each once."""
        owned = [parameter for optimizer in self._table.optimizers for group in optimizer.param_groups for parameter in group["params"]]
        return Gradients(with_gradient([*self._table.parameters, *owned, *extra]))

    def _still_scaled(self, taken: Sequence[torch.Tensor], scaler: Any) -> list[str]:
        unscaled = scaling.unscaled_parameters(scaler, self._table.optimizers)
        return [self._table.name_of(parameter) or "?" for parameter in taken if id(parameter) not in unscaled]


def _order(norm_type: Any) -> float:
    return math.inf if norm_type in ("inf", math.inf) else float(norm_type)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
