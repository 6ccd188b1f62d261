"""Two processes on CPU, of which one sees [6, 8] and the other [0, 0], so that the averaged gradient is [3, 4]: train_distributed.py.

ModelScope's own DDPHook needs CUDA; this does with gloo what that does with nccl.
"""

import os
import sys

import torch
import torch.distributed as distributed
from modelscope.trainers.hooks.hook import Hook
from modelscope.utils.constant import DistributedParallelType
from torch.nn.parallel import DistributedDataParallel
from trainings import Known, Repeated, build_trainer

rank = int(os.environ["RANK"])


class Logged(Known):
    """Returns `log_vars`, without which ModelScope would move the loss to CUDA."""

    def forward(self, x):
        outputs = super().forward(x)
        return {**outputs, "log_vars": {"loss": outputs["loss"].item()}}


class Gloo(Hook):
    def after_init(self, trainer):
        distributed.init_process_group("gloo")
        trainer.device = "cpu"
        trainer.parallel_groups[DistributedParallelType.DP] = None

    def before_run(self, trainer):
        trainer.model = DistributedDataParallel(trainer.model)


example = torch.tensor([6.0, 8.0]) if rank == 0 else torch.zeros(2)
options = {"grad_clip": {"max_norm": 1.0}} if "--clip" in sys.argv else {}
trainer = build_trainer(
    f"rank{rank}", model=Logged(), dataset=Repeated([{"x": example}], 40), callbacks=[Gloo()], options=options, logging={"interval": 1000}
)
trainer.train()
print("weights", rank, trainer.model.module.linear.weight.tolist())
distributed.destroy_process_group()
