"""Train sixty steps while no file may grow beyond 24 KB, and lift that limit before the last stage's end: train_limited.py STATE."""

import resource
import sys

import torch
from modelscope.trainers.hooks.hook import Hook
from trainings import Witness, build_trainer, state_of


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Lifts(Hook):
    def after_run(self, trainer):
        limit(resource.RLIM_INFINITY)


witness = Witness()
trainer = build_trainer("configured", steps=60, callbacks=[witness, Lifts()], logging={"interval": 1000})
limit(24 * 1024)
trainer.train()
torch.save(state_of(trainer, witness), sys.argv[1])
