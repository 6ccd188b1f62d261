"""Fine-tune Stable Diffusion on pictures of one subject with ModelScope's Dreambooth trainer.

    python scripts/make_stable_diffusion.py demo
    python scripts/finetune_stable_diffusion_dreambooth.py [--model FOLDER_OR_ID] [--train_dataset_name FOLDER] ...

An ordinary ModelScope fine-tune script. Its defaults train the small model of ``make_stable_diffusion.py`` for about
fifteen seconds on two CPU cores, without a network. --model takes a folder or the id of a model on ModelScope's hub,
--train_dataset_name a folder of pictures, with their texts in ``captions.csv`` (file, text); without that table every
picture has the instance prompt. All that the training writes goes to --work_dir, the fine-tuned pipeline to
``output`` in it. One --seed gives one result, bit for bit, on one machine.
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import partial
from pathlib import Path
from typing import Any

from modelscope.metainfo import Trainers
from modelscope.msdatasets.dataset_cls.custom_datasets import TorchCustomDataset
from modelscope.trainers import build_trainer
from modelscope.utils.config import Config
from modelscope.utils.torch_utils import set_random_seed
from PIL import Image
from torchvision import transforms

PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}


def read_captions(folder: Path, instance_prompt: str) -> list[tuple[Path, str]]:
    """The folder's pictures with their texts, in the order of the table or else of their names."""
    table = folder / "captions.csv"
    if not table.exists():
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES)
        return [(path, instance_prompt) for path in paths]
    with table.open(newline="", encoding="utf-8") as rows:
        return [(folder / row["file"], row["text"]) for row in csv.DictReader(rows)]


def load_example(captioned: tuple[Path, str], to_pixels: transforms.Compose) -> dict[str, Any]:
    """One picture and its text, under the names of ``StableDiffusion.forward``'s arguments.

    ``text`` is a string, ``target`` float32 of shape (3, resolution, resolution) from -1 to 1.
    """
    path, text = captioned
    with Image.open(path) as picture:
        return {"text": text, "target": to_pixels(picture.convert("RGB"))}


def load_pictures(folder: Path, resolution: int, instance_prompt: str) -> TorchCustomDataset:
    """The training set, as one of ModelScope's own datasets, which the trainer uses as it is."""
    to_pixels = transforms.Compose(
        [
            transforms.Resize(resolution),
            transforms.CenterCrop(resolution),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    # A tuple, because ModelScope takes a list for several datasets to put end to end.
    captioned = tuple(read_captions(folder, instance_prompt))
    return TorchCustomDataset(captioned, preprocessor=partial(load_example, to_pixels=to_pixels))


def parse_arguments() -> argparse.Namespace:
    """The command line; the options that ModelScope's own example has are named as there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_dreambooth_arguments(parser)
    add_training_arguments(parser)
    arguments = parser.parse_args()
    if arguments.norm_type is not None and arguments.max_norm is None:
        parser.error("--norm_type needs --max_norm")
    return arguments


def add_dreambooth_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained on what."""
    add = parser.add_argument
    add("--model", default="./demo/model", help="model folder, or model id on the hub")
    add("--train_dataset_name", type=Path, default=Path("demo/pictures"), help="folder of pictures")
    add("--work_dir", type=Path, default=Path("demo/work"), help="folder for everything that is written")
    add("--resolution", type=int, default=64, help="pixels; 512 for Stable Diffusion 1.5")
    add("--instance_prompt", default="a photo of sks robot", help="text of the subject")
    add("--with_prior_preservation", action="store_true", help="train on pictures of the class as well")
    add("--class_prompt", default="a photo of robot", help="text of the class")
    add("--class_data_dir", type=Path, help="pictures of the class (default: class_images in --work_dir)")
    add("--num_class_images", type=int, default=4, help="pictures of the class; the missing ones are generated")
    add("--prior_loss_weight", type=float, default=1.0, help="weight of the loss on the class")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is trained."""
    add = parser.add_argument
    add("--max_epochs", type=int, default=15)
    add("--train_batch_size", type=int, default=4)
    add("--lr", type=float, default=2e-3, help="learning rate; about 5e-6 for Stable Diffusion 1.5")
    add("--use_fp16", action="store_true", help="mixed precision with loss scaling")
    add("--cumulative_iters", type=int, help="batches whose gradients are added up for one optimizer step")
    add("--max_norm", type=float, help="clip the gradients to this norm")
    add("--norm_type", type=norm_type, help="which norm --max_norm means: a number or inf (default: 2)")
    add("--seed", type=int, default=42)


def norm_type(text: str) -> float | str:
    """A norm's order; ``inf`` stays text, because ModelScope writes it into a JSON file."""
    return text if text == "inf" else float(text)


def modify_configuration(configuration: Config, arguments: argparse.Namespace) -> Config:
    """Put the command line into the model's training configuration."""
    train = configuration.train
    train.max_epochs = arguments.max_epochs
    train.dataloader = {"batch_size_per_gpu": arguments.train_batch_size, "workers_per_gpu": 0}
    train.optimizer = {"type": "AdamW", "lr": arguments.lr, "options": optimizer_options(arguments)}
    train.lr_scheduler = {"type": "CosineAnnealingLR", "T_max": arguments.max_epochs}
    train.checkpoint = {"period": {"interval": arguments.max_epochs}}
    # The pictures come ready: a preprocessor that the model names would only ask for further packages.
    configuration.preprocessor = None
    return configuration


def optimizer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Accumulation and clipping, each only if it was asked for."""
    options: dict[str, Any] = {}
    if arguments.cumulative_iters is not None:
        options["cumulative_iters"] = arguments.cumulative_iters
    if arguments.max_norm is not None:
        options["grad_clip"] = {"max_norm": arguments.max_norm}
    if arguments.norm_type is not None:
        options["grad_clip"]["norm_type"] = arguments.norm_type
    return options


def is_model_id(model: str) -> bool:
    """Whether this names a model on the hub (owner/name) and no folder."""
    return not Path(model).exists() and model.count("/") == 1 and not model.startswith((".", "/", "~"))


def model_arguments(model: str) -> dict[str, Any]:
    """How to name the model to the trainer.

    A folder goes in by its configuration alone, from which the trainer builds the model that lies beside it. Given as
    ``model``, ModelScope would first ask its hub for a newer version.
    """
    return {"model": model} if is_model_id(model) else {"cfg_file": str(Path(model) / "configuration.json")}


def prior_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prior preservation; without it the class is not named, which would make the trainer warn."""
    if not arguments.with_prior_preservation:
        return {"with_prior_preservation": False, "class_prompt": None, "class_data_dir": None}
    return {
        "with_prior_preservation": True,
        "class_prompt": arguments.class_prompt,
        "class_data_dir": str(arguments.class_data_dir or arguments.work_dir / "class_images"),
        "num_class_images": arguments.num_class_images,
        "prior_loss_weight": arguments.prior_loss_weight,
    }


def trainer_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the trainer is built from."""
    pictures = load_pictures(arguments.train_dataset_name, arguments.resolution, arguments.instance_prompt)
    return {
        **model_arguments(arguments.model),
        **prior_arguments(arguments),
        "train_dataset": pictures,
        "cfg_modify_fn": partial(modify_configuration, arguments=arguments),
        "work_dir": str(arguments.work_dir),
        "max_epochs": arguments.max_epochs,
        "resolution": arguments.resolution,
        "instance_prompt": arguments.instance_prompt,
        "use_fp16": arguments.use_fp16,
        "safe_serialization": True,
        "seed": arguments.seed,
    }


def check_folders(arguments: argparse.Namespace) -> None:
    """End with one line if there is nothing to train or to train on."""
    local_model = [] if is_model_id(arguments.model) else [Path(arguments.model)]
    for folder in [*local_model, arguments.train_dataset_name]:
        if not folder.is_dir():
            maker = Path(__file__).with_name("make_stable_diffusion.py")
            out = folder.parent if folder.name in {"model", "pictures"} else "OUT"
            print(f"There is no folder {folder}; to make one: python {maker} {out}", file=sys.stderr)
            raise SystemExit(2)


def main() -> None:
    """Build the trainer and train."""
    arguments = parse_arguments()
    check_folders(arguments)
    trainer = build_trainer(name=Trainers.dreambooth_diffusion, default_args=trainer_arguments(arguments))
    # The trainer seeds before it makes class images; training must not depend on how many of them were there already.
    set_random_seed(arguments.seed)
    trainer.train()


if __name__ == "__main__":
    main()
