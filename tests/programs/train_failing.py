"""A training that ends badly, in its second iteration: train_failing.py forward|hook|interrupt|exit."""

import os
import shutil
import signal
import sys

from modelscope.trainers.hooks.hook import Hook
from trainings import Known, build_trainer

place = sys.argv[1]


class Ends(Hook):
    def after_train_iter(self, trainer):
        if trainer.iter == 1 and place == "hook":
            raise ValueError("planted in a hook")
        if trainer.iter == 1 and place == "exit":
            sys.exit(7)


class Fails(Known):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2 and place == "forward":
            raise ValueError("planted in forward")
        if self.calls == 2 and place == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x)


trainer = build_trainer(os.path.abspath("files"), model=Fails(), callbacks=[Ends()])
if place == "no-folder":
    os.mkdir("gone")
    os.chdir("gone")
    shutil.rmtree(os.path.abspath("."))
trainer.train()
print("weights", trainer.model.linear.weight.tolist())
