"""Train a model whose forward calls a compiled part, and print how often dynamo compiled: train_compiled.py STATE."""

import sys

import torch
from trainings import Known, Witness, build_trainer, state_of


class Compiled(Known):
    """A compiled function over a child, which must stay one graph."""

    def forward(self, x):
        return {"loss": self.whole(x).sum()}


model = Compiled()
model.whole = torch.compile(lambda x: model.linear(x), backend="eager", fullgraph=True)
witness = Witness()
trainer = build_trainer("configured", model=model, steps=5, callbacks=[witness])
trainer.train()


counters = sys.modules["torch._dynamo.utils"].counters
print("graphs", counters["stats"]["unique_graphs"], "breaks", sum(counters["graph_break"].values()))
torch.save(state_of(trainer, witness), sys.argv[1])
