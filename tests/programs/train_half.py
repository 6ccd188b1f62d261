"""Train `Known` by ModelScope's own mixed precision, and save what shows that it was on: train_half.py STATE."""

import sys

import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook
from modelscope.trainers.hooks.optimizer.torch_optimizer_hook import TorchAMPOptimizerProcessor
from trainings import Known, Repeated, Witness, build_trainer, enable_amp_on_cpu, state_of

scalings = []
dtypes = []


class CountingScaler(torch.amp.GradScaler):
    """The scaler, which counts how often it scaled a loss."""

    def scale(self, outputs):
        scalings.append(1)
        return super().scale(outputs)


class Asking(Hook):
    """Looks at the trainer's hooks while it trains, as a user's hook may; a hook more than without msprobe there must be."""

    def __init__(self):
        self.found = []

    def before_train_iter(self, trainer):
        (hook,) = trainer.get_hook(OptimizerHook)
        names = [type(other).__name__ for other in trainer.hooks if type(other).__name__ != "TraceHook"]
        self.found.append([names, isinstance(hook.processor, TorchAMPOptimizerProcessor), hook.processor.__class__.__name__])


torch.amp.GradScaler = CountingScaler
enable_amp_on_cpu()
model = Known()
model.linear.register_forward_hook(lambda module, inputs, output: dtypes.append(str(output.dtype)))
examples = [{"x": torch.tensor(values)} for values in ([float("inf"), 1.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0])]
witness, asking = Witness(), Asking()
trainer = build_trainer(
    "configured",
    model=model,
    dataset=Repeated(examples),
    callbacks=[witness, asking],
    trainer_arguments={"use_fp16": True},
    options={"grad_clip": {"max_norm": 1.0}},
)
trainer.train()
state = {
    **state_of(trainer, witness),
    "scalings": len(scalings),
    "dtypes": dtypes,
    "while_training": asking.found,
    "processor": type(trainer.get_hook(OptimizerHook)[0].processor).__name__,
    "scale": trainer.get_hook(OptimizerHook)[0].processor.scaler.state_dict(),
}
torch.save(state, sys.argv[1])
