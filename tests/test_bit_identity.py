"""Training is not changed: runs with and without msprobe, in processes of their own, agree bit for bit."""

import json

import pytest


def steps_of(run):
    return [record for record in run.records() if record["kind"] == "step"]


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
    assert len(steps_of(on)) == settings["steps"]
    assert on.records()[-1]["reason"] == "finished"
    assert not (off.folder / "msprobe-runs").exists()


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "deterministic"])
def test_dropout_shuffling_and_random_states_after_every_step_are_bit_identical(on_and_off, mode):
    environment = {"MSPROBE_TENSORS": "param.grad\nmodule.output"}
    _, on = on_and_off("train_network.py", mode, environment=environment)
    assert len(steps_of(on)) == 20


def test_the_comparison_notices_a_training_that_differs(zygote, tmp_path):
    from comparison import assert_same_run

    settings = {"steps": 4}
    off = zygote.run("train_known.py", "state.pt", json.dumps(settings), folder=tmp_path / "off" / "run")
    on = zygote.run("train_known.py", "state.pt", json.dumps({**settings, "lr": 0.1000001}), folder=tmp_path / "on" / "run")
    with pytest.raises(AssertionError, match=r"rates|parameters|losses"):
        assert_same_run(off, on)


def test_a_compiled_part_is_compiled_once_and_without_a_break(on_and_off):
    environment = {"MSPROBE_TENSORS": "param.grad\nmodule.output"}
    _, on = on_and_off("train_compiled.py", environment=environment)
    assert "graphs 1 breaks 0" in on.stdout
    assert len(steps_of(on)) == 5
    assert [record["code"] for record in on.records() if record["kind"] == "event"].count("compiled_model") == 1
