from __future__ import annotations

import math

import pytest
import synthetic as made
from invocation import cells, invoke, strict
from synthetic import MS

from msprobe.schema import LossScale, LossTerm


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def page(capsys, tmp_path, records) -> str:
    outcome = invoke(capsys, "summary", made.write_run(tmp_path / "run", records))
    assert (outcome.status, outcome.err) == (0, "")
    assert all(len(line) <= 80 or line.startswith("  msprobe ") for line in outcome.out.splitlines())
    return outcome.out


def flat(out: str) -> str:
    """Return the page as one line, so that wrapping does not matter."""
    return " ".join(out.split())


def test_the_page_says_what_was_trained(capsys, tmp_path):
    out = flat(page(capsys, tmp_path, made.small_run()))
    assert "StableDiffusion by DreamboothDiffusionTrainer, OptimizerProcessor" in out
    assert "AdamW: 1 group, lr 0.001" in out
    assert "3 (31 values) trainable (float32); 1 (100 values) frozen; 3 (31 values) in an optimizer" in out
    assert "1 trainable parameter had no gradient: unet.unused.weight" in out
    assert "finished after 3 steps" in out


def test_three_iterations_with_one_overflow_are_two_updates_and_one_skip(capsys, tmp_path):
    records = [made.header(), made.model(), made.skipped_step(0), made.step(1), made.step(2), made.end(3)]
    out = flat(page(capsys, tmp_path, records))
    assert "3 steps (0 to 2, epoch 0); 2 updates; 1 skipped; 0 unapplied micro-steps" in out
    assert "None: every recorded loss, gradient norm and gradient was finite; 1 update skipped by the loss scaler" in out
    assert "The loss scale after the last update is 32768." in out


def test_phases_have_count_total_share_and_the_first_step_apart(capsys, tmp_path):
    waits = [90, 10, 20, 30]
    steps = [made.step(index, wall_ns=500 * MS, phases=[made.phase("data_load", 0, wait)]) for index, wait in enumerate(waits)]
    out = page(capsys, tmp_path, [made.header(), made.model(), *steps, made.end(4)])
    assert " ".join(cells(out, "data_load")) == "4 150 ms 7.5% 20.0 ms 29.0 ms 90.0 ms"
    assert " ".join(cells(out, "unaccounted")) == "1.85 s 92.3%"
    assert "Recording took 4.00 ms, 0.2% of the steps" in out


def test_device_times_stand_before_the_hosts(capsys, tmp_path):
    steps = [made.step(index, phases=[made.phase("forward", 0, 5, device_ms=60)]) for index in range(3)]
    out = page(capsys, tmp_path, [made.header(), made.model(), *steps, made.end(3)])
    assert "device time where there is one" in out
    assert " ".join(cells(out, "forward")) == "3 180 ms 60.0% 60.0 ms 60.0 ms 60.0 ms 15.0 ms"


def test_modules_say_how_much_of_their_phase_they_are(capsys, tmp_path):
    out = page(capsys, tmp_path, made.small_run())
    assert " ".join(cells(out, "unet          forward")) == "3 120 ms 40.0 ms 80.0%"
    assert " ".join(cells(out, "text_encoder")) == "forward 3 15.0 ms 5.00 ms 10.0%"
    assert "unet.block" not in out


def test_forty_bad_losses_of_fifty_cannot_be_overlooked(capsys, tmp_path):
    steps = [made.step(index, 1.0 if index % 5 == 0 else math.nan) for index in range(50)]
    out = page(capsys, tmp_path, [made.header(), made.model(), *steps, made.end(50)])
    assert "Step 1: the loss was NaN." in out
    text = flat(out)
    assert "40 steps had a bad value" in text
    assert "loss: not finite (×) in 40 of 50 values, first at step 1 (40 NaN); the extremes are over the 10 finite values." in text
    assert "×" in next(line for line in out.splitlines() if line.startswith("  loss "))
    assert "finite" in out


def test_gradient_norms_say_which_they_are_and_how_often_clipping_took_hold(capsys, tmp_path):
    steps = [made.step(index, grad_norm=made.norm(5.0 if index < 3 else 0.5, 1.0 if index < 3 else 0.5, index < 3)) for index in range(4)]
    out = page(capsys, tmp_path, [made.header(), made.model(), *steps, made.end(4)])
    assert cells(out, "before clipping")[1:] == ["5", "0.5", "0.5", "5"]
    assert cells(out, "after clipping")[1:] == ["1", "0.5", "0.5", "1"]
    assert "clipped in 3 of 4 updates; 2-norm, max_norm 1." in out
    assert "grad_norm" not in out


def test_without_clipping_no_norm_is_called_before_or_after(capsys, tmp_path):
    bare = made.norm(5.0, None, None, max_norm=None, clip_returned=None, optimizer_params_after=None)
    out = page(capsys, tmp_path, [made.header(), made.model(), made.step(0, grad_norm=bare), made.end(1)])
    assert "nothing clips the gradients" in out
    assert "before clipping" not in out


def test_a_smaller_norm_over_the_optimizers_parameters_is_shown_beside(capsys, tmp_path):
    out = page(capsys, tmp_path, [made.header(), made.model(), made.step(0, grad_norm=made.norm(optimizer_params=3.0)), made.end(1)])
    assert cells(out, "optimizer's before")[1:] == ["3", "3", "3", "3"]


def test_loss_terms_stand_apart(capsys, tmp_path):
    terms = [LossTerm(name="instance", value=0.25), LossTerm(name="prior", value=0.75)]
    out = page(capsys, tmp_path, [made.header(), made.model(), made.step(0, loss_terms=terms), made.end(1)])
    assert cells(out, "+ instance")[1] == "0.25"
    assert cells(out, "+ prior")[1] == "0.75"


def test_a_run_without_steps_has_a_page(capsys, tmp_path):
    out = page(capsys, tmp_path, [made.header(), made.model(), made.end(0)])
    assert "finished after 0 steps" in out
    assert "msprobe hooks" in out


def test_an_empty_file_has_a_page(capsys, tmp_path):
    out = page(capsys, tmp_path, b"")
    assert "there is no readable record" in out
    assert "msprobe doctor" in out


def test_a_run_that_was_cut_says_after_which_step(capsys, tmp_path):
    out = flat(page(capsys, tmp_path, [made.header(), made.model(), made.step(0), made.step(1)]))
    assert "the run was cut after step 1: there is no end record" in out


def test_an_exception_is_told_with_its_phase_and_module(capsys, tmp_path):
    data = {"phase": "forward", "module": "unet.mid_block"}
    failure = made.event("exception", 1, "ValueError: no", level="error", data=data)
    records = [made.header(), made.model(), made.step(0), made.step(1, complete=False), failure, made.end(1, "exception")]
    out = flat(page(capsys, tmp_path, records))
    assert "exception after 1 step; in step 1, phase forward, module unet.mid_block: ValueError: no" in out
    assert "1 step (0, epoch 0); 1 broken off (step 1)" in out
    assert "# the step that was broken off msprobe show" in out
    assert "run --step 1" in out


def test_the_page_ends_with_the_command_for_the_first_bad_step(capsys, tmp_path):
    folder = tmp_path / "a run's"
    made.write_run(folder, [made.header(), made.model(), made.step(0), made.step(1, math.inf), made.end(2)])
    lines = invoke(capsys, "summary", folder).out.splitlines()
    quoted = str(folder).replace("'", "'\"'\"'")
    command = lines.index(f"  msprobe show '{quoted}' --step 1")
    assert lines[command - 1] == "  # the step with the first bad value"


def test_without_a_fault_the_slowest_step_comes_next(capsys, tmp_path):
    walls = [900, 100, 300, 200]
    steps = [made.step(index, wall_ns=wall * MS) for index, wall in enumerate(walls)]
    out = flat(page(capsys, tmp_path, [made.header(), made.model(), *steps, made.end(4)]))
    assert "# the slowest step but the first, 300 ms msprobe show" in out
    assert "--step 2 " in out


def test_several_ranks_have_a_line_each(capsys, tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header(0, 2), made.model(), made.step(0, 1.5), made.end(1)])
    bad = [made.step(0, 2.5), made.step(1, math.nan)]
    made.write_run(folder, [made.header(1, 2), made.model(), *bad], "rank00001.jsonl")
    outcome = invoke(capsys, "summary", folder)
    assert cells(outcome.out, "rank00000 ") == ["1", "1", "1.5", "100", "ms", "none", "finished"]
    assert cells(outcome.out, "rank00001 ") == ["2", "2", "NaN", "100", "ms", "step", "1", "cut"]
    text = flat(outcome.out)
    assert "Step 1 on rank 1: the loss was NaN." in text
    assert "--step 1 --rank 1" in text
    assert "rank 1 (rank00001.jsonl), one of 2 files" in flat(invoke(capsys, "summary", folder, "--rank", 1).out)


def test_a_rank_that_is_not_there_is_refused(capsys, tmp_path):
    outcome = invoke(capsys, "summary", made.write_run(tmp_path / "run", made.small_run()), "--rank", 5)
    assert (outcome.status, outcome.out) == (2, "")
    assert "no rank 5" in outcome.err
    assert outcome.err.count("\n") == 1


def test_several_train_calls_are_counted(capsys, tmp_path):
    records = [made.header(), made.model(0), made.step(0), made.end(1), made.model(1), made.step(1, train=1), made.end(1, train=1)]
    assert "2 train() calls in this run" in page(capsys, tmp_path, records)


def test_events_show_their_count_and_their_text_unharmed(capsys, tmp_path):
    events = [made.event("odd", index, "bad \x1b]0;title\x07 [red]name[/red]") for index in range(3)]
    out = flat(page(capsys, tmp_path, [made.header(), made.model(), made.step(0), *events, made.end(1)]))
    assert r"bad \x1b]0;title\x07 [red]name[/red]" in out
    assert "warning 3 0 odd:" in out


def test_damage_is_told_once_on_stderr_and_the_page_still_comes(capsys, tmp_path):
    data = made.lines(made.small_run())
    last = data.count(b"\n")
    outcome = invoke(capsys, "summary", made.write_run(tmp_path / "run", data[:-10]))
    assert outcome.status == 0
    why = "cut at the end of the file: the run was killed while writing"
    assert outcome.err == f"msprobe: rank00000.jsonl: line {last} cannot be read and was skipped ({why})\n"
    assert "3 steps (0 to 2" in outcome.out


def test_json_is_strict_and_alone_on_stdout(capsys, tmp_path):
    steps = [made.step(0, math.nan, grad_norm=made.norm(math.inf, -math.inf)), made.step(1, loss_scale=LossScale(before=2.0, after=4.0))]
    folder = made.write_run(tmp_path / "run", made.lines([made.header(), made.model(), *steps]) + b"torn")
    outcome = invoke(capsys, "summary", folder, "--json")
    answer = strict(outcome.out)
    rank = answer["ranks"][0]
    assert rank["losses"]["loss"]["loss"]["first"] == "NaN"
    assert rank["gradient_norms"][0]["before_clip"]["first"] == "Infinity"
    assert rank["health"]["first_bad"]["step"] == 0
    assert rank["progress"]["cut"] is True
    assert rank["settings"]["final_loss_scale"] == 4.0
    assert answer["next"][0] == f"msprobe show {folder} --step 0"
    assert "line 5" in outcome.err


def test_every_cut_of_a_small_trace_has_a_page(capsys, tmp_path):
    data = made.lines(made.small_run(1))
    for offset in range(0, len(data), 97):
        folder = made.write_run(tmp_path / "run", data[:offset])
        for verb in (["summary"], ["hooks"], ["summary", "--json"]):
            outcome = invoke(capsys, *verb, folder)
            assert outcome.status == 0
            assert outcome.err.count("\n") <= 1


def test_the_default_run_is_the_newest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.write_run(tmp_path / "msprobe-runs" / "only", made.small_run())
    outcome = invoke(capsys, "summary")
    assert outcome.out.startswith("msprobe-runs/only\n")
    assert "msprobe hooks msprobe-runs/only" in outcome.out
