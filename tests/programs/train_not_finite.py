"""Train a model whose inner module, not a leaf, makes one element NaN in the third step."""

import torch
from trainings import Repeated, build_trainer


class Inner(torch.nn.Module):
    """A layer and arithmetic of its own, as in a residual block."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        y = self.layer(x) + x
        self.calls += 1
        if self.calls == 3:
            y = torch.where(torch.arange(4) == 1, y * float("nan"), y)
        return y


class Network(torch.nn.Module):
    """Inner between two layers."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(4, 4)
        self.body = torch.nn.Sequential()
        self.body.add_module("inner", Inner())
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.head(self.body(self.stem(x))).square().mean()}


torch.manual_seed(0)
build_trainer("configured", model=Network(), dataset=Repeated([{"x": torch.ones(4)}], 5)).train()
