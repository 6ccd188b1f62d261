from __future__ import annotations

import math

import pytest
import synthetic as made
from invocation import invoke, strict
from synthetic import MS, phase

from msprobe.schema import LossScale, LossTerm


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def page(capsys, tmp_path, records, *options) -> str:
    outcome = invoke(capsys, "show", made.write_run(tmp_path / "run", [made.header(), made.model(), *records]), "--step", 1, *options)
    assert (outcome.status, outcome.err) == (0, "")
    return outcome.out


def branches(out: str) -> list[str]:
    """Return the lines of the tree without its guides, two blanks for each level."""
    lines = []
    for line in out.splitlines():
        text = line.lstrip("│├└─ ")
        if line.startswith(("│", "├", "└")):
            lines.append("  " * ((len(line) - len(text)) // 4 - 1) + text)
    return lines


def test_phases_hooks_and_modules_stand_where_they_ran(capsys, tmp_path):
    out = page(capsys, tmp_path, [made.step(0), *made.modules(1), made.step(1)])
    assert branches(out) == [
        "data_load  10.0 ms  10.0%",
        "forward  50.0 ms  50.0%",
        "  text_encoder  5.00 ms  5.0%",
        "  unet.block  20.0 ms  20.0%",
        "  unet  40.0 ms  40.0%",
        "OptimizerHook.after_train_iter  30.0 ms  30.0%",
        "  backward of loss  20.0 ms  20.0%",
        "    unet backward  18.0 ms  18.0%",
        "  clip_grads  2.00 ms  2.0%",
        "  optimizer_step  4.00 ms  4.0%",
        "  zero_grad to None  1.00 ms  1.0%",
        "LrSchedulerHook.after_train_iter  3.00 ms  3.0%",
        "msprobe itself  1.00 ms  1.0%",
        "unaccounted  9.00 ms  9.0%",
    ]


def test_phases_are_in_the_order_they_began_even_if_written_otherwise(capsys, tmp_path):
    phases = [phase("zero_grad", 30, 1), phase("backward", 20, 5), phase("forward", 5, 10)]
    names = [line.split()[0] for line in branches(page(capsys, tmp_path, [made.step(1, phases=phases)]))]
    assert names[:3] == ["forward", "backward", "zero_grad"]


def test_device_times_stand_before_the_hosts(capsys, tmp_path):
    out = page(capsys, tmp_path, [made.step(1, phases=[phase("forward", 0, 5, device_ms=60)])])
    assert "forward  60.0 ms on the device, host 5.00 ms  60.0%" in out


def test_modules_outside_every_phase_are_not_lost(capsys, tmp_path):
    assert branches(page(capsys, tmp_path, [made.module(1, 0, "late", 98, 1), made.step(1)]))[-4:-2] == [
        "in no phase",
        "  late  1.00 ms  1.0%",
    ]


@pytest.mark.parametrize("parents", [[0], [1, 0], [5], [-1]])
def test_parents_that_make_no_sense_do_no_harm(capsys, tmp_path, parents):
    phases = [phase("forward", 0, 1, parent=parent) for parent in parents]
    assert page(capsys, tmp_path, [made.step(1, phases=phases)]).count("forward") == len(parents)


def test_all_norm_fields_are_shown_with_their_labels(capsys, tmp_path):
    norm = made.norm(5.0, 0.99999982, max_norm=1.0, clip_returned=5.5, optimizer_params=3.0, optimizer_params_after=0.6)
    lines = [" ".join(line.split()) for line in page(capsys, tmp_path, [made.step(1, grad_norm=norm)]).splitlines()]
    for line in (
        "before clipping 5",
        "returned by clip_grads 5.5",
        "after clipping 0.99999982",
        "optimizer's, before 3",
        "optimizer's, after 0.6",
        "clipped yes, max_norm 1, norm_type 2",
    ):
        assert line in lines


def test_an_infinity_norm_says_so(capsys, tmp_path):
    assert "norm_type +inf" in page(capsys, tmp_path, [made.step(1, grad_norm=made.norm(4.0, 1.0, norm_type=math.inf))])


def test_nan_infinities_and_not_recorded_are_four_renderings(capsys, tmp_path):
    norm = made.norm(math.nan, math.inf, None, clip_returned=-math.inf, optimizer_params=None)
    text = " ".join(page(capsys, tmp_path, [made.step(1, grad_norm=norm)]).split())
    assert "before clipping NaN returned by clip_grads -inf after clipping +inf optimizer's, before –" in text


def test_losses_scale_rate_and_accumulation_are_shown(capsys, tmp_path):
    terms = [LossTerm(name="prior", value=0.5, weight=1.0, timesteps=[7, 981])]
    step = made.skipped_step(1, 1.25, loss_terms=terms, lr=[0.001, 0.0001])
    text = " ".join(page(capsys, tmp_path, [step]).split())
    assert "loss 1.25" in text
    assert "prior: 0.5, weight 1, timesteps 7, 981" in text
    assert "skipped: the loss scaler found non-finite gradients" in text
    assert "loss scale 65536 -> 32768" in text
    assert "learning rate 0.001, 0.0001" in text
    assert "index 0 of 1" in text


def test_an_update_of_unknown_outcome_gives_its_reason(capsys, tmp_path):
    assert "unknown: fused scaler" in page(capsys, tmp_path, [made.step(1, optimizer_step=None, optimizer_step_reason="fused scaler")])


def test_the_largest_and_all_nonfinite_gradients_are_listed_and_the_rest_counted(capsys, tmp_path):
    listed = [made.parameter(index, f"p{index:02d}") for index in range(30)] + [made.parameter(30, "p30", trainable=False)]
    l2 = [float(index) for index in range(28)] + [None, math.nan, None]
    bad = made.tensor(1, "p29", nan=2, posinf=0, neginf=1, l2=0.5, numel=6)
    records = [made.header(), made.model(parameters=listed), made.norms(1, l2), bad, made.step(1)]
    folder = made.write_run(tmp_path / "run", records)
    out = invoke(capsys, "show", folder, "--step", 1).out
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  p")]
    assert names == ["p29", *(f"p{index:02d}" for index in range(27, 17, -1))]
    text = " ".join(out.split())
    assert "p29 0.5 2 0 1 6" in text
    assert "31 tensors: 1 non-finite, 1 with no gradient, 1 frozen; 18 smaller ones not shown: --all" in text
    everything = invoke(capsys, "show", folder, "--step", 1, "--all").out
    assert sum(line.startswith("  p") for line in everything.splitlines()) == 29


def test_events_of_the_step_and_no_others_are_shown(capsys, tmp_path):
    events = [made.event("odd", 1, "this \x1b[2J one"), made.event("odd", 2, "another")]
    out = page(capsys, tmp_path, [made.step(1), *events])
    assert r"warning odd: this \x1b[2J one" in out
    assert "another" not in out


def test_a_broken_off_step_says_so(capsys, tmp_path):
    assert "broken off" in page(capsys, tmp_path, [made.step(1, complete=False)])


def test_a_step_that_is_not_there_names_those_that_are(capsys, tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header(), *(made.step(index) for index in range(3, 8))])
    outcome = invoke(capsys, "show", folder, "--step", 99)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == "msprobe: there is no step 99: rank00000.jsonl holds steps 3 to 7\n"


@pytest.mark.parametrize("step", ["-1", "1.5", "x", "9" * 40])
def test_what_is_no_step_number_is_refused(capsys, tmp_path, step):
    outcome = invoke(capsys, "show", made.write_run(tmp_path / "run", made.small_run()), f"--step={step}")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1


def test_a_rank_can_be_chosen(capsys, tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header(), made.step(1, 1.5)])
    made.write_run(folder, [made.header(1, 2), made.step(1, 2.5)], "rank00001.jsonl")
    assert "1.5" in invoke(capsys, "show", folder, "--step", 1).out
    assert "2.5" in invoke(capsys, "show", folder, "--step", 1, "--rank", 1).out
    outcome = invoke(capsys, "show", folder, "--step", 1, "--rank", 7)
    assert outcome.status == 2
    assert "it holds rank 0, 1" in outcome.err


def test_json_holds_the_records_as_they_are(capsys, tmp_path):
    step = made.step(1, math.nan, loss_scale=LossScale(before=2.0, after=1.0))
    out = page(capsys, tmp_path, [*made.modules(1), made.norms(1, (3.0, math.inf, None, None)), made.event(index=1), step], "--json")
    answer = strict(out)
    assert answer["step"]["loss"] == {"loss": "NaN"}
    assert [module["name"] for module in answer["modules"]] == ["text_encoder", "unet.block", "unet", "unet"]
    assert {tensor["name"]: tensor["l2"] for tensor in answer["tensors"]}["unet.conv.bias"] == "Infinity"
    assert answer["step"]["phases"][0]["host_ns"] == 10 * MS
    assert len(answer["events"]) == 1
