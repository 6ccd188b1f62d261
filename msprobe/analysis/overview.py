"""What was trained: trainer, optimizers, parameters, and which of them got no gradient.

`analysis.summary` feeds it the model records and the compact norms (and gradient tensors) of one process. Every later `train()` of the
process replaces what was known of the model; gradients are counted for the last one. Memory grows with the number of parameters only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from msprobe.schema import NO_GRADIENT, ModelRecord, NormsRecord, ParameterInfo, TensorRecord

_NAMED = 20


@dataclass(slots=True)
class Tally:
    """How many parameters, and how many values in them."""

    parameters: int = 0
    values: int = 0

    def add(self, parameter: ParameterInfo) -> None:
        """Count a parameter."""
        self.parameters += 1
        self.values += prod(parameter.shape)


@dataclass(slots=True)
class Parameters:
    """The parameters of the model by what happens to them. `trainable_dtypes` counts values by dtype."""

    trainable: Tally = field(default_factory=Tally)
    frozen: Tally = field(default_factory=Tally)
    in_optimizer: Tally = field(default_factory=Tally)
    trainable_without_optimizer: Tally = field(default_factory=Tally)
    frozen_in_optimizer: Tally = field(default_factory=Tally)
    trainable_dtypes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Which trainable parameters got gradients. All counts are None where no gradients were recorded; names are the first twenty.

    `never`: no gradient whenever gradients were recorded. `sometimes`: at some of these times only. `without_optimizer`: there was a
    gradient, but no optimizer owns the parameter.
    """

    never: int | None
    never_names: list[str]
    sometimes: int | None
    without_optimizer: int | None
    without_optimizer_names: list[str]


@dataclass(frozen=True, slots=True)
class OptimizerSummary:
    """An optimizer: its class, its number of groups, and their learning rates when training began."""

    id: int
    class_name: str
    groups: int
    parameters: int
    lr: list[float | None]


@dataclass(frozen=True, slots=True)
class Overview:
    """What was trained, as the last model record of the process says; `trains` counts the `train()` calls."""

    trains: int
    trainer: str | None
    model_class: str | None
    processor: str | None
    optimizers: list[OptimizerSummary]
    parameters: Parameters
    gradients: Gradients


class ModelOverview:
    """Collects what is known of the model from records that are fed to it in order."""

    def __init__(self) -> None:
        self._trains = 0
        self._model: ModelRecord | None = None
        self._present: set[str] = set()
        self._absent: set[str] = set()
        self._pattern: tuple[object, ...] = ()

    def add_model(self, record: ModelRecord) -> None:
        """Begin a `train()`."""
        self._trains += 1
        self._model = record
        self._present, self._absent, self._pattern = set(), set(), ()

    def add_norms(self, record: NormsRecord) -> None:
        """Note which parameters had a gradient."""
        if record.role != "param.grad" or self._model is None:
            return
        missing = [l2 is None for l2 in record.l2]
        # Nearly every step shows the same pattern, so that it is worked out by name once.
        pattern = (record.ids, missing)
        if pattern == self._pattern:
            return
        self._pattern = pattern
        parameters = self._model.parameters
        if record.ids is not None:
            by_id = {parameter.id: parameter for parameter in parameters}
            parameters = [by_id[identity] for identity in record.ids if identity in by_id]
        for parameter, absent in zip(parameters, missing, strict=False):
            (self._absent if absent else self._present).add(parameter.name)

    def add_tensor(self, record: TensorRecord) -> None:
        """Note whether a gradient that was recorded in full was there."""
        if record.role == "param.grad" and self._model is not None:
            (self._absent if record.skipped == NO_GRADIENT else self._present).add(record.name)

    def told(self) -> Overview:
        """Return what is known so far."""
        model = self._model
        return Overview(
            trains=self._trains,
            trainer=model.trainer if model else None,
            model_class=model.model_class if model else None,
            processor=model.processor if model else None,
            optimizers=_optimizers(model),
            parameters=_tallied(model),
            gradients=self._gradients(),
        )

    def _gradients(self) -> Gradients:
        if self._model is None or not (self._present or self._absent):
            return Gradients(None, [], None, None, [])
        trainable = [parameter for parameter in self._model.parameters if parameter.requires_grad]
        never = [item.name for item in trainable if item.name in self._absent and item.name not in self._present]
        sometimes = [item.name for item in trainable if item.name in self._absent and item.name in self._present]
        orphans = [item.name for item in trainable if item.optimizer is None and item.name in self._present]
        return Gradients(len(never), never[:_NAMED], len(sometimes), len(orphans), orphans[:_NAMED])


def _optimizers(model: ModelRecord | None) -> list[OptimizerSummary]:
    if model is None:
        return []
    return [
        OptimizerSummary(
            id=optimizer.id,
            class_name=optimizer.class_,
            groups=len(optimizer.groups),
            parameters=sum(group.parameters for group in optimizer.groups),
            lr=[group.lr for group in optimizer.groups],
        )
        for optimizer in model.optimizers
    ]


def _tallied(model: ModelRecord | None) -> Parameters:
    parameters = Parameters()
    dtypes: Counter[str] = Counter()
    for item in model.parameters if model is not None else []:
        (parameters.trainable if item.requires_grad else parameters.frozen).add(item)
        if item.requires_grad:
            dtypes[item.dtype] += prod(item.shape)
        if item.optimizer is not None:
            parameters.in_optimizer.add(item)
            if not item.requires_grad:
                parameters.frozen_in_optimizer.add(item)
        elif item.requires_grad:
            parameters.trainable_without_optimizer.add(item)
    parameters.trainable_dtypes = dict(dtypes.most_common())
    return parameters
