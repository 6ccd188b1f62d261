"""Enable msprobe, fork, and train in both processes: four steps in the child, three in the parent."""

import os

from trainings import build_trainer

import msprobe

msprobe.enable(name="forked")
child = os.fork()
build_trainer("child" if child == 0 else "parent", steps=4 if child == 0 else 3).train()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
