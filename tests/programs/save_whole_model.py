"""Save a model object whole in mid-training, or load one where msprobe cannot be imported: save_whole_model.py save|load."""

import sys

import torch
from modelscope.trainers.hooks.hook import Hook
from trainings import build_trainer


class Saves(Hook):
    def after_train_iter(self, trainer):
        torch.save(trainer.model, "model.pt")


if sys.argv[1] == "save":
    build_trainer("files", callbacks=[Saves()]).train()
else:
    sys.modules["msprobe"] = None
    model = torch.load("model.pt", weights_only=False)
    loss = model(torch.tensor([[3.0, 4.0]]))["loss"]
    loss.backward()
    print(list(model.state_dict()), [loss.item(), model.linear.weight.grad.tolist()])
