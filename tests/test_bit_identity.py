"""Training is not changed: runs with and without msprobe, in processes of their own, agree bit for bit."""

import json

import pytest


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 8},
        {"steps": 8, "optimizer": "AdamW", "options": {"grad_clip": {"max_norm": 1.0}, "cumulative_iters": 2}},
        {"steps": 8, "options": {"grad_clip": {"max_norm": 1.0, "norm_type": "inf"}}, "amp": True},
    ],
    ids=["plain", "clip-and-accumulate", "amp"],
)
def test_a_small_training_is_bit_identical(on_and_off, settings):
    off, on = on_and_off("train_known.py", json.dumps(settings))
    steps = [record for record in on.records() if record["kind"] == "step"]
    assert len(steps) == settings["steps"]
    assert on.records()[-1]["reason"] == "finished"
    assert not (off.folder / "msprobe-runs").exists()
