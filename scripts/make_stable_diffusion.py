"""Make a Stable Diffusion model folder and pictures to fine-tune it on, without a network.

    python scripts/make_stable_diffusion.py OUT [--size tiny|sd15] [--seed N]

OUT/model is a folder that ModelScope's ``StableDiffusion`` and ``DreamboothDiffusionTrainer`` and diffusers'
``DiffusionPipeline`` load as they load a downloaded one. Every part is the real class of diffusers or transformers;
only the weights and the vocabulary are made up. ``tiny`` trains on a CPU in a fraction of a second per step, ``sd15``
has the shapes of Stable Diffusion 1.5 and is meant for a GPU. OUT/pictures holds small pictures of one drawn subject
and their captions (``captions.csv``: file, text), which is what a Dreambooth run learns.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

# torch, diffusers and transformers take seconds to import: a call that finds its folder complete does without them.
if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

START, END, END_OF_WORD = "<|startoftext|>", "<|endoftext|>", "</w>"
LATENT_CHANNELS = 4
PICTURES = 16
PLACES: dict[str, tuple[str, str]] = {
    "on a meadow": ("#9fd3f5", "#5ea84b"),
    "in the desert": ("#f7e2b0", "#d9a34a"),
    "in the snow": ("#c4d4e6", "#f4f7fb"),
    "at night": ("#1c2340", "#39305c"),
    "at the sea": ("#f5c9a6", "#2f7fa8"),
    "in a red room": ("#c9605a", "#7d3230"),
    "in a grey street": ("#b9bcc0", "#6d7278"),
    "under a pink sky": ("#f3b1cf", "#8f6a9c"),
}


@dataclass(frozen=True)
class Size:
    """The shapes of one model; widths are in channels, lengths in tokens, the resolution in pixels."""

    resolution: int
    vocabulary: int
    text_width: int
    text_layers: int
    text_heads: int
    vae_channels: tuple[int, ...]
    vae_layers: int
    unet_channels: tuple[int, ...]
    unet_layers: int
    groups: int
    learning_rate: float
    max_epochs: int
    text_length: int = 77
    unet_heads: int = 8

    @property
    def latent_size(self) -> int:
        """Height and width of a latent; each stage of the autoencoder but the last halves them."""
        return self.resolution >> (len(self.vae_channels) - 1)


SIZES = {
    "tiny": Size(
        resolution=64,
        vocabulary=1024,
        text_width=32,
        text_layers=2,
        text_heads=4,
        vae_channels=(16, 32, 32, 32),
        vae_layers=1,
        unet_channels=(32, 48, 64, 64),
        unet_layers=1,
        groups=8,
        learning_rate=2e-3,
        max_epochs=15,
    ),
    "sd15": Size(
        resolution=512,
        vocabulary=49408,
        text_width=768,
        text_layers=12,
        text_heads=12,
        vae_channels=(128, 256, 512, 512),
        vae_layers=2,
        unet_channels=(320, 640, 1280, 1280),
        unet_layers=2,
        groups=32,
        learning_rate=1e-5,
        max_epochs=100,
    ),
}


def captions() -> list[str]:
    """The text of every picture: the subject has a name of its own, as Dreambooth wants it."""
    places = list(PLACES)
    return [f"a photo of sks robot {places[number % len(places)]}" for number in range(PICTURES)]


def draw_background(draw: ImageDraw.ImageDraw, size: int, place: str, horizon: float) -> None:
    """Fill the picture with the sky and the ground of a place; the horizon is a share of the height."""
    sky, ground = PLACES[place]
    draw.rectangle((0, 0, size, size), fill=sky)
    draw.rectangle((0, horizon * size, size, size), fill=ground)


def draw_robot(draw: ImageDraw.ImageDraw, left: float, top: float, unit: float) -> None:
    """Draw the subject, 6 units wide and 10 high."""

    def box(x: float, y: float, width: float, height: float, colour: str) -> None:
        corners = (left + x * unit, top + y * unit, left + (x + width) * unit, top + (y + height) * unit)
        draw.rectangle(corners, fill=colour)

    box(2.8, 0, 0.4, 1.2, "#30343a")
    box(1.2, 1.2, 3.6, 2.6, "#f2c230")
    box(1.9, 2.0, 0.7, 0.7, "#30343a")
    box(3.4, 2.0, 0.7, 0.7, "#30343a")
    box(0.6, 3.9, 4.8, 3.6, "#1f9e93")
    box(2.2, 4.8, 1.6, 1.4, "#e8512f")
    box(1.2, 7.5, 1.2, 2.5, "#30343a")
    box(3.6, 7.5, 1.2, 2.5, "#30343a")


def draw_picture(resolution: int, place: str, chance: random.Random) -> Image.Image:
    """One picture of the robot somewhere in a place, as large as a quarter to a half of the frame."""
    picture = Image.new("RGB", (resolution, resolution))
    draw = ImageDraw.Draw(picture)
    draw_background(draw, resolution, place, chance.uniform(0.5, 0.8))
    unit = resolution * chance.uniform(0.055, 0.075)
    draw_robot(draw, chance.uniform(0, resolution - 6 * unit), chance.uniform(0, resolution - 10 * unit), unit)
    return picture


def write_pictures(folder: Path, resolution: int, seed: int) -> list[Image.Image]:
    """Draw the pictures into a folder beside a table of their captions, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    pictures = []
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        rows.writerow(["file", "text"])
        for number, text in enumerate(captions()):
            name = f"robot-{number:02d}.png"
            pictures.append(draw_picture(resolution, text.removeprefix("a photo of sks robot "), chance))
            pictures[-1].save(folder / name)
            rows.writerow([name, text])
    return pictures


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """The byte-pair merges that build each word from its first letter on."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        symbols = [*word[:-1], word[-1] + END_OF_WORD]
        merges.update(dict.fromkeys(("".join(symbols[:cut]), symbols[cut]) for cut in range(1, len(symbols))))
    return list(merges)


def make_tokenizer(size: Size) -> CLIPTokenizer:
    """A CLIP tokenizer that knows the captions' words whole and spells out any other."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    merges = merges_of(sorted({word for text in captions() for word in text.split() if len(word) > 1}))
    tokens = dict.fromkeys([*letters, *(letter + END_OF_WORD for letter in letters), *map("".join, merges)])
    # CLIP's start and end are its last two tokens; unused ones fill the gap to the size of the embedding table.
    unused = [f"<|unused{number}|>" for number in range(size.vocabulary - 2 - len(tokens))]
    vocabulary = {token: number for number, token in enumerate([*tokens, *unused, START, END])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=size.text_length)


def make_text_encoder(size: Size) -> CLIPTextModel:
    """A CLIP text encoder of this size."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.text_width,
        intermediate_size=4 * size.text_width,
        projection_dim=size.text_width,
        num_hidden_layers=size.text_layers,
        num_attention_heads=size.text_heads,
        max_position_embeddings=size.text_length,
        bos_token_id=size.vocabulary - 2,
        eos_token_id=size.vocabulary - 1,
        pad_token_id=size.vocabulary - 1,
    )
    return CLIPTextModel(config)


def make_vae(size: Size) -> AutoencoderKL:
    """An autoencoder of this size, whose latents still need ``scale_latents``."""
    from diffusers import AutoencoderKL

    stages = len(size.vae_channels)
    return AutoencoderKL(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=size.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        layers_per_block=size.vae_layers,
        norm_num_groups=size.groups,
        sample_size=size.resolution,
    )


def make_unet(size: Size) -> UNet2DConditionModel:
    """A noise predictor of this size, with Stable Diffusion's order of blocks."""
    from diffusers import UNet2DConditionModel

    stages = len(size.unet_channels)
    return UNet2DConditionModel(
        sample_size=size.latent_size,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=size.unet_channels,
        down_block_types=("CrossAttnDownBlock2D",) * (stages - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (stages - 1),
        layers_per_block=size.unet_layers,
        attention_head_dim=size.unet_heads,
        cross_attention_dim=size.text_width,
        norm_num_groups=size.groups,
    )


def make_scheduler() -> DDPMScheduler:
    """The noise schedule of Stable Diffusion 1.5."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
    )


def to_tensor(pictures: list[Image.Image]) -> torch.Tensor:
    """The pictures as float32 of shape (pictures, 3, height, width), from -1 to 1."""
    import torch
    from torchvision.transforms.functional import to_tensor as unit_range

    return torch.stack([unit_range(picture) for picture in pictures]) * 2 - 1


def scale_latents(vae: AutoencoderKL, pictures: list[Image.Image]) -> None:
    """Make the latents of these pictures centred and, times the scaling factor, of unit variance.

    An untrained encoder answers each picture with a large constant, small differences and noise of unit variance, which
    would drown them. So the constant is taken off, the noise is set to a twentieth of the differences, and the scaling
    factor is what the differences ask for.
    """
    import torch

    with torch.no_grad():
        mean = torch.cat([vae.encode(pixels[None]).latent_dist.mean for pixels in to_tensor(pictures)])
        centre = mean.mean(dim=(0, 2, 3))
        deviation = float((mean - centre[:, None, None]).std())
        vae.quant_conv.bias[:LATENT_CHANNELS] -= centre
        vae.quant_conv.weight[LATENT_CHANNELS:] = 0
        vae.quant_conv.bias[LATENT_CHANNELS:] = 2 * math.log(deviation / 20)
    vae.register_to_config(scaling_factor=1 / deviation)


def make_pipeline(size: Size, pictures: list[Image.Image], seed: int) -> StableDiffusionPipeline:
    """All parts of the model, put together as diffusers saves and loads them."""
    import torch
    from diffusers import StableDiffusionPipeline

    torch.manual_seed(seed)
    vae = make_vae(size)
    scale_latents(vae, pictures)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=make_text_encoder(size),
        tokenizer=make_tokenizer(size),
        unet=make_unet(size),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def configuration(size: Size) -> dict[str, Any]:
    """What ModelScope reads from configuration.json."""
    train = {
        "work_dir": "./work_dir",
        "max_epochs": size.max_epochs,
        "dataloader": {"batch_size_per_gpu": 4, "workers_per_gpu": 0},
        "optimizer": {"type": "AdamW", "lr": size.learning_rate},
        "lr_scheduler": {"type": "CosineAnnealingLR", "T_max": size.max_epochs},
        # Present and without checkpoint and logger: ModelScope's default list would be shared by every trainer of a
        # process and be emptied by the first.
        "hooks": [{"type": "IterTimerHook"}],
        "checkpoint": {"period": {"interval": size.max_epochs}},
        "logging": {"by_epoch": False, "interval": 10},
    }
    return {
        "framework": "pytorch",
        "task": "text-to-image-synthesis",
        "model": {"type": "stable-diffusion"},
        "pipeline": {"type": "diffusers-stable-diffusion"},
        "train": train,
    }


def make(out: Path, size: Size, seed: int) -> None:
    """Write the pictures and the model folder."""
    pictures = write_pictures(out / "pictures", size.resolution, seed)
    make_pipeline(size, pictures, seed).save_pretrained(out / "model")
    (out / "model" / "configuration.json").write_text(json.dumps(configuration(size), indent=4) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write model/ and pictures/ into")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="shapes of the model (default: tiny)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures (default: 0)")
    return parser.parse_args()


def main() -> None:
    """Make the folder, unless it is there already."""
    arguments = parse_arguments()
    # Written last, so that its presence says that everything else is complete.
    made = arguments.out / "made.json"
    wanted = {"size": arguments.size, "seed": arguments.seed}
    if not made.exists():
        make(arguments.out, SIZES[arguments.size], arguments.seed)
        made.write_text(json.dumps(wanted) + "\n", "utf-8")
    elif json.loads(made.read_text("utf-8")) != wanted:
        print(f"{arguments.out} holds another size or seed ({made.read_text('utf-8').strip()})", file=sys.stderr)
        raise SystemExit(2)
    print(f"{arguments.out}: model and pictures, {arguments.size}, seed {arguments.seed}")


if __name__ == "__main__":
    main()
