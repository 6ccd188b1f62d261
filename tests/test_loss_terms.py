"""What a Dreambooth loss is made of: each denoiser call's timesteps and loss, the instance's and the prior's apart."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def traced(zygote, stable_diffusion, tmp_path_factory):
    """A Dreambooth run with prior preservation of weight 0.5, that writes down what its own loss function returned."""
    folder = tmp_path_factory.mktemp("terms")
    return zygote.run("dreambooth_losses.py", stable_diffusion, folder=folder, trace=True).check()


def witnessed(run):
    """Return the program's own account: per step the losses and timesteps in the order of the calls."""
    import json

    return json.loads((run.folder / "losses.json").read_text())


def test_instance_and_prior_loss_are_told_apart_with_their_timesteps(traced):
    steps = [record for record in traced.records() if record["kind"] == "step"]
    truth = witnessed(traced)
    assert len(steps) == len(truth) == 6
    for step, expected in zip(steps, truth, strict=True):
        terms = step["loss_terms"]
        assert [term["name"] for term in terms] == ["instance", "prior"]
        assert [term["weight"] for term in terms] == [1.0, 0.5]
        assert [term["call"] for term in terms] == [0, 1]
        assert [term["value"] for term in terms] == expected["losses"]
        assert [term["timesteps"] for term in terms] == expected["timesteps"]
        assert terms[0]["value"] + 0.5 * terms[1]["value"] == pytest.approx(step["loss"]["loss"], rel=1e-6)


def test_the_summary_shows_the_terms_apart(traced):
    page = subprocess.run(
        [sys.executable, "-m", "msprobe", "summary", str(traced.trace())], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert "instance" in page
    assert "prior" in page


def test_torchs_loss_functions_are_its_own_again_after_the_training(traced):
    assert "loss functions restored: True" in traced.stdout
