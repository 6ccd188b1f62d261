"""A toy training whose stdout holds its result alone: train_quietly.py [--steps N] [--enable]; ends with status 7."""

import argparse
import sys
import tempfile

import torch
from trainings import build_trainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--enable", action="store_true")
arguments, _ = parser.parse_known_args()

if arguments.enable:
    import msprobe

    msprobe.enable()
with tempfile.TemporaryDirectory() as folder:
    trainer = build_trainer(folder, steps=arguments.steps, options={"grad_clip": {"max_norm": 1.0}, "cumulative_iters": 2})
    trainer.train()
print("weights", [value.hex() for value in trainer.model.linear.weight.flatten().tolist()], torch.initial_seed())
sys.exit(7)
