"""Models, optimizer processors and hooks of a user's own, for updates that ModelScope's stock processor does not make."""

import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook, OptimizerProcessor
from trainings import build_trainer


class Given(torch.nn.Module):
    """A model of zero parameters whose gradients are given: the loss is the sum of each parameter times its gradient.

    A parameter whose given gradient is None takes no part in the loss.
    """

    def __init__(self, **gradients):
        super().__init__()
        self.gradients = gradients
        self.tensors = torch.nn.ParameterDict()
        for name, gradient in gradients.items():
            self.tensors[name] = torch.zeros(2) if gradient is None else torch.zeros_like(gradient)

    def forward(self, x):
        terms = [(self.tensors[name] * gradient).sum().float() for name, gradient in self.gradients.items() if gradient is not None]
        return {"loss": sum(terms) * x.ravel()[0]}


def ones(length):
    """Return a dataset of that many 1.0, at which a `Given` model has exactly its given gradients."""
    from trainings import Repeated

    return Repeated([{"x": torch.ones(1)}], length)


class Install(Hook):
    """Puts a processor into the optimizer's hook, as a user's hook does who wants another kind of update."""

    def __init__(self, processor):
        self.processor = processor

    def register_processor(self, trainer):
        trainer.get_hook(OptimizerHook)[0].set_processor(self.processor)


class Do(Hook):
    """Calls a function at the begin of chosen iterations, before any other hook of the iteration."""

    PRIORITY = 0

    def __init__(self, function, *iterations):
        self.function = function
        self.iterations = iterations

    def before_train_iter(self, trainer):
        if trainer.iter in self.iterations:
            self.function(trainer)


class Update(OptimizerProcessor):
    """A processor whose update is a function of the user's, called after an ordinary backward at every iteration."""

    def __init__(self, update, scaler=None):
        self.update = update
        if scaler is not None:
            self.scaler = scaler

    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        loss = sum(trainer.train_outputs[key] for key in loss_keys)
        scaler = getattr(self, "scaler", None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.update(trainer)


class KeepingGradients(OptimizerProcessor):
    """The stock processor, which keeps a copy of every gradient at the moment of each update, before anything is clipped."""

    def __init__(self):
        self.kept = []

    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        for key in loss_keys:
            trainer.train_outputs[key] /= cumulative_iters
            trainer.train_outputs[key].backward()
        if not self.every_n_iters(trainer, cumulative_iters):
            return
        self.kept.append(
            {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
        )
        if grad_clip is not None:
            self.clip_grads(trainer.model.parameters(), **grad_clip)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    every_n_iters = staticmethod(Hook.every_n_iters)


class Recorded:
    """The records of one `train()`, by kind, and the trainer that made them."""

    def __init__(self, trainer, records):
        from msprobe import schema

        def of(kind):
            return [record for record in records if isinstance(record, kind)]

        self.trainer = trainer
        self.steps = of(schema.StepRecord)
        self.norms = of(schema.NormsRecord)
        self.tensors = of(schema.TensorRecord)
        self.events = of(schema.EventRecord)
        (self.model,) = of(schema.ModelRecord)
        (self.end,) = of(schema.EndRecord)
        assert self.end.steps == sum(step.complete for step in self.steps), "a step was lost, or could not be read"

    def grad_norms(self):
        """Return each step's gradient norm."""
        return [step.grad_norm for step in self.steps]

    def before_clip(self):
        """Return each step's norm before clipping, None at steps without update."""
        return [step.grad_norm and step.grad_norm.before_clip for step in self.steps]

    def outcomes(self):
        """Return each step's `optimizer_step`."""
        return [step.optimizer_step for step in self.steps]

    def scales(self):
        """Return the loss scale before and after every step's update."""
        return [(step.loss_scale.before, step.loss_scale.after) for step in self.steps]

    def codes(self):
        """Return the codes of the events, in order."""
        return [event.code for event in self.events]

    def l2(self, name):
        """Return a parameter's gradient norm at every step that has norms."""
        (number,) = [parameter.id for parameter in self.model.parameters if parameter.name == name]
        return [record.l2[number if record.ids is None else record.ids.index(number)] for record in self.norms]

    def phases(self, name):
        """Return the phases of that name, one list per step."""
        return [[phase for phase in step.phases if phase.name == name] for step in self.steps]


def record(folder, *, expect=None, capture=None, **settings):
    """Train as `build_trainer` is told, with msprobe on, and return what was recorded.

    Args:
        expect: a context manager around `train()`, for trainings that raise or warn.
        capture: settings of msprobe.
    """
    import contextlib

    from msprobe.testing import capture as capturing

    torch.manual_seed(0)
    trainer = build_trainer(folder, **settings)
    with capturing(**(capture or {})) as records, expect or contextlib.nullcontext():
        trainer.train()
    return Recorded(trainer, records)
