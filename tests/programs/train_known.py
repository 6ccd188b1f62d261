"""Train `Known` as told by a JSON argument, and save the final state: train_known.py STATE [SETTINGS]."""

import json
import sys

import torch
from trainings import Witness, build_trainer, enable_amp_on_cpu, state_of

settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
if settings.pop("amp", False):
    enable_amp_on_cpu()
    settings.setdefault("trainer_arguments", {})["use_fp16"] = True
witness = Witness()
trainer = build_trainer("configured", callbacks=[witness], **settings)
trainer.train()
torch.save(state_of(trainer, witness), sys.argv[1])
print("trained", float(trainer.model.linear.weight.sum()))
