"""Run the repository's Dreambooth script and save what it computed: train_dreambooth.py STATE [--amp] [OPTIONS of the script].

`--amp` puts torch's enabled CPU scaler and autocast where ModelScope looks for those of CUDA.
"""

import sys
from pathlib import Path

import torch
from trainings import Witness, enable_amp_on_cpu, state_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import finetune_stable_diffusion_dreambooth as script

state = sys.argv.pop(1)
if "--amp" in sys.argv:
    sys.argv.remove("--amp")
    enable_amp_on_cpu()
arguments = script.parse_arguments()
script.check_folders(arguments)
witness = Witness()
settings = {**script.trainer_arguments(arguments), "callbacks": [witness]}
trainer = script.build_trainer(name=script.Trainers.dreambooth_diffusion, default_args=settings)
script.set_random_seed(arguments.seed)
trainer.train()
torch.save({**state_of(trainer, witness), "unet": trainer.model.unet.state_dict()}, state)
