"""Small real trainings that tests and test programs share: ModelScope's own trainer on models whose gradients are known by heart.

`Known` is `Linear(2, 1, bias=False)` with zero weight on the input [[3, 4]] and the loss `output.sum()`: its gradient is [3, 4], of
2-norm 5 and inf-norm 4, at every step.
"""

import json
import os
from pathlib import Path

import torch
from modelscope.metrics.base import Metric
from modelscope.metrics.builder import METRICS
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.trainer import EpochBasedTrainer
from torch.utils.data import Dataset


class Repeated(Dataset):
    """The same example over and over, or a list of examples."""

    def __init__(self, examples, length=None):
        self.examples = examples
        self.length = length if length is not None else len(examples)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.examples[index % len(self.examples)]


class Known(torch.nn.Module):
    """The model whose gradient is its input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return {"loss": self.linear(x.to(self.linear.weight.dtype)).sum()}


def three_four(length):
    """Return a dataset of that many [3, 4]."""
    return Repeated([{"x": torch.tensor([3.0, 4.0])}], length)


def configuration(
    folder, *, epochs=1, optimizer="SGD", lr=0.1, options=None, hooks=(), batch_size=1, scheduler=None, evaluation=None, **train
):
    """Write a training configuration into `folder` and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "framework": "pytorch",
        "task": "text-classification",
        "model": {"type": "known"},
        "train": {
            "work_dir": str(folder / "work"),
            "max_epochs": epochs,
            # An empty list, because ModelScope otherwise shares, and empties, its default one between trainers.
            "hooks": list(hooks),
            "dataloader": {"batch_size_per_gpu": batch_size, "workers_per_gpu": 0, "shuffle": False},
            "optimizer": {"type": optimizer, "lr": lr, "options": options or {}},
            "lr_scheduler": scheduler or {"type": "StepLR", "step_size": 1000},
            "checkpoint": {"period": {"interval": 1000, "save_last": False}},
            **train,
        },
        **({"evaluation": evaluation} if evaluation else {}),
    }
    path = folder / "configuration.json"
    path.write_text(json.dumps(settings))
    return str(path)


def build_trainer(
    folder, model=None, dataset=None, steps=3, trainer_class=EpochBasedTrainer, callbacks=None, trainer_arguments=None, **settings
):
    """Return a real trainer of `Known` (or another model) for that many iterations of one epoch."""
    return trainer_class(
        model=model if model is not None else Known(),
        cfg_file=configuration(folder, **settings),
        train_dataset=dataset if dataset is not None else three_four(steps),
        data_collator=torch.utils.data.default_collate,
        callbacks=callbacks,
        work_dir=str(Path(folder) / "work"),
        **(trainer_arguments or {}),
    )


class Counting(Metric):
    """Counts the batches that it is shown."""

    def __init__(self):
        self.seen = 0

    def add(self, outputs, inputs):
        self.seen += 1

    def evaluate(self):
        return {"seen": self.seen}

    def merge(self, other):
        self.seen += other.seen

    def __getstate__(self):
        return self.seen

    def __setstate__(self, seen):
        self.seen = seen


METRICS.register_module(group_key="default", module_name="counting-for-msprobe", module_cls=Counting, force=True)


def evaluating(**period):
    """Return settings of `build_trainer` with which two examples are evaluated every period (`interval`, `by_epoch`)."""
    evaluation = {
        "dataloader": {"batch_size_per_gpu": 1, "workers_per_gpu": 0, "shuffle": False},
        "metrics": ["counting-for-msprobe"],
        "period": period,
    }
    return {"evaluation": evaluation, "trainer_arguments": {"eval_dataset": three_four(2)}}


class Witness(Hook):
    """Writes down what a training does, in the way of a user's own hook: every loss before and learning rate after each iteration.

    It stands at the normal priority, after the optimizer's hook, so the losses are those that ModelScope logs.
    """

    def __init__(self):
        self.losses = []
        self.rates = []

    def after_train_iter(self, trainer):
        self.losses.append(
            {key: float(value).hex() for key, value in trainer.log_buffer.val_history.items() for value in value[-1:] if "loss" in key}
        )
        self.rates.append([float(group["lr"]).hex() for group in trainer.optimizer.param_groups])


def state_of(trainer, witness):
    """Return everything that must be the same with msprobe on and off."""
    import random

    import numpy

    return {
        "losses": witness.losses,
        "rates": witness.rates,
        "parameters": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": [str(part) for part in numpy.random.get_state()],
        "python_rng": str(random.getstate()),
        "hooks": [type(hook).__name__ for hook in trainer.hooks],
        "environment": sorted(key for key in os.environ if not key.startswith("MSPROBE")),
    }


def enable_amp_on_cpu(init_scale=1024.0, **scaler_settings):
    """Make ModelScope's own TorchAMP processor scale and autocast on CPU.

    A stand-in for a CUDA device, and only for its two switches: ModelScope takes `GradScaler` and `autocast` from `torch.cuda.amp`,
    where both turn themselves off without one. Put in their place are torch's enabled CPU scaler and bfloat16 autocast.
    """
    from torch.cuda import amp

    amp.GradScaler = lambda **settings: torch.amp.GradScaler("cpu", **{"init_scale": init_scale, **scaler_settings, **settings})
    amp.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
