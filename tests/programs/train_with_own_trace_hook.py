"""A script that has a hook class of its own by the name TraceHook, used by its name: train_with_own_trace_hook.py STATE."""

import sys

import torch
from modelscope.trainers.hooks.builder import HOOKS
from modelscope.trainers.hooks.hook import Hook
from trainings import Witness, build_trainer, state_of


@HOOKS.register_module()
class TraceHook(Hook):
    def after_train_iter(self, trainer):
        print("the script's own hook", trainer.iter)


witness = Witness()
trainer = build_trainer("configured", callbacks=[witness], hooks=[{"type": "TraceHook"}])
trainer.train()
torch.save(state_of(trainer, witness), sys.argv[1])
