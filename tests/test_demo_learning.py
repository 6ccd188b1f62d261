"""The demo learns: a default fine-tune run predicts noise on the subject's pictures much better than its start did.

Both scripts run as a user runs them. The error is computed here, from the model folder and from the weights that the
run saved, on (latent, noise, timestep) triples that training never sees and that are the same before and after.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

# diffusers and transformers take many seconds to import, which collecting the tests should not cost.
if TYPE_CHECKING:
    import torch

NEEDED = ("torch", "torchvision", "diffusers", "transformers", "modelscope")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs the packages of the train extra")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
TRIPLES = 64
NEEDED_FALL = 0.2


class Triples(NamedTuple):
    """Noisy latents of the subject's pictures, and what their noise was.

    ``noisy`` and ``noise`` are float32 of shape (64, 4, height, width), ``timesteps`` int64 of shape (64,),
    ``texts`` the encoded captions, float32 of shape (64, tokens, width).
    """

    noisy: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor
    texts: torch.Tensor


def run_script(name: str, *arguments: str | Path) -> None:
    """Run one of the scripts to its end; a failure shows what it printed."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    # On a busy machine several threads wait for each other at every one of this model's small operations.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def latents_of(model: Path, paths: list[Path]) -> torch.Tensor:
    """The scaled latents of pictures, without the autoencoder's own noise."""
    import torch
    from diffusers import AutoencoderKL
    from PIL import Image
    from torchvision.transforms.functional import to_tensor

    vae = AutoencoderKL.from_pretrained(model, subfolder="vae")
    pixels = torch.stack([to_tensor(Image.open(path).convert("RGB")) for path in paths]) * 2 - 1
    with torch.no_grad():
        latents: torch.Tensor = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    return latents


def encoded(model: Path, texts: list[str]) -> torch.Tensor:
    """The captions as the UNet is given them."""
    import torch
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    encoder = CLIPTextModel.from_pretrained(model, subfolder="text_encoder").eval()
    with torch.no_grad():
        states: torch.Tensor = encoder(tokenizer(texts, padding="max_length", return_tensors="pt").input_ids)[0]
    return states


def make_triples(demo: Path) -> Triples:
    """Each picture four times, with noise and timesteps that are fixed."""
    import torch
    from diffusers import DDPMScheduler

    with (demo / "pictures" / "captions.csv").open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    repeats = TRIPLES // len(rows)
    latents = latents_of(demo / "model", [demo / "pictures" / row["file"] for row in rows]).repeat(repeats, 1, 1, 1)
    texts = encoded(demo / "model", [row["text"] for row in rows]).repeat(repeats, 1, 1)
    chance = torch.Generator().manual_seed(64)
    noise = torch.randn(latents.shape, generator=chance)
    timesteps = torch.randint(0, 1000, (TRIPLES,), generator=chance)
    schedule = DDPMScheduler.from_pretrained(demo / "model", subfolder="scheduler")
    return Triples(schedule.add_noise(latents, noise, timesteps), noise, timesteps, texts)


def prediction_error(model: Path, triples: Triples) -> float:
    """The mean squared error of a model's noise prediction."""
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet").eval()
    with torch.no_grad():
        predicted = unet(triples.noisy, triples.timesteps, triples.texts).sample
    return float((predicted - triples.noise).square().mean())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder and the pictures, made once."""
    folder = tmp_path_factory.mktemp("demo")
    run_script("make_stable_diffusion.py", folder)
    return folder


@pytest.fixture(scope="module")
def triples(demo: Path) -> Triples:
    """The fixed triples; there are 64 of them."""
    made = make_triples(demo)
    assert len(made.noisy) == TRIPLES
    return made


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_run_learns_the_subject(demo: Path, triples: Triples, seed: int, tmp_path: Path) -> None:
    """The error falls by a fifth or more, whatever the seed."""
    folders = ("--model", demo / "model", "--train_dataset_name", demo / "pictures", "--work_dir", tmp_path)
    run_script("finetune_stable_diffusion_dreambooth.py", *folders, "--seed", str(seed))
    before = prediction_error(demo / "model", triples)
    after = prediction_error(tmp_path / "output", triples)
    print(f"seed {seed}: {before:.4f} to {after:.4f}, {1 - after / before:.1%} less")
    assert after <= (1 - NEEDED_FALL) * before
