"""Train Dreambooth with a prior and write down every loss and timestep the program itself sees: dreambooth_losses.py FOLDER."""

import json
import shutil
import sys
from pathlib import Path

import torch.nn.functional as functional
from modelscope.metainfo import Trainers
from modelscope.trainers import build_trainer
from modelscope.trainers.hooks.hook import Hook

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import finetune_stable_diffusion_dreambooth as finetune

original = functional.mse_loss
steps = []


def noted(*arguments, **keywords):
    value = original(*arguments, **keywords)
    if steps:
        steps[-1]["losses"].append(float(value))
    return value


class Account(Hook):
    """Opens an entry for every iteration, and notes the timesteps of every UNet call."""

    def before_run(self, trainer):
        trainer.model.unet.register_forward_pre_hook(self.called)

    def before_train_iter(self, trainer):
        steps.append({"losses": [], "timesteps": []})

    def called(self, module, arguments):
        if steps:
            steps[-1]["timesteps"].append([int(step) for step in arguments[1]])


functional.mse_loss = noted
folder = Path(sys.argv[1])
Path("classes").mkdir()
shutil.copy(next((folder / "pictures").glob("*.png")), "classes")  # so that the trainer need not generate one
sys.argv[1:] = [
    *("--model", str(folder / "model"), "--train_dataset_name", str(folder / "pictures"), "--work_dir", "work"),
    *("--max_epochs", "3", "--train_batch_size", "8"),
    *("--with_prior_preservation", "--class_data_dir", "classes", "--num_class_images", "1", "--prior_loss_weight", "0.5"),
]
trainer = build_trainer(name=Trainers.dreambooth_diffusion, default_args=finetune.trainer_arguments(finetune.parse_arguments()))
trainer.register_hook(Account())
trainer.train()
Path("losses.json").write_text(json.dumps(steps))
print("loss functions restored:", functional.mse_loss is noted)
