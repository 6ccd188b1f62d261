"""Train a small convolutional network with dropout and shuffled data: train_network.py STATE MODE.

MODE is `float32`, `bfloat16` (CPU autocast around forward) or `deterministic` (torch.use_deterministic_algorithms). The state holds the
random generators' states after every step.
"""

import random
import sys

import numpy
import torch
from modelscope.trainers.hooks.hook import Hook
from trainings import Repeated, Witness, build_trainer, state_of


class Network(torch.nn.Module):
    """Convolution, dropout, linear; a part is frozen."""

    def __init__(self, autocast):
        super().__init__()
        self.autocast = autocast
        self.stem = torch.nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.GELU(), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(8 * 8 * 8, 2)

    def forward(self, picture, target):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            answer = self.head(self.body(self.stem(picture)).flatten(1))
        return {"loss": torch.nn.functional.mse_loss(answer.float(), target)}


class RandomStates(Hook):
    """Writes the random generators' states down after every step, last of all hooks that a user has."""

    PRIORITY = 95

    def __init__(self):
        self.seen = []

    def after_train_iter(self, trainer):
        self.seen.append((torch.get_rng_state(), str(numpy.random.get_state()), str(random.getstate())))


state_file, mode = sys.argv[1:]
torch.use_deterministic_algorithms(mode == "deterministic")
torch.manual_seed(7)
model = Network(autocast=mode == "bfloat16")
examples = [{"picture": torch.randn(3, 8, 8), "target": torch.randn(2)} for _ in range(40)]
witness, states = Witness(), RandomStates()
trainer = build_trainer(
    "configured",
    model=model,
    dataset=Repeated(examples),
    optimizer="AdamW",
    lr=1e-2,
    batch_size=4,
    epochs=2,
    options={"grad_clip": {"max_norm": 1.0}},
    dataloader={"batch_size_per_gpu": 4, "workers_per_gpu": 0, "shuffle": True},
    callbacks=[witness, states],
)
trainer.train()
torch.save({**state_of(trainer, witness), "states": states.seen}, state_file)
