from __future__ import annotations

import synthetic as made
from invocation import invoke, strict
from synthetic import MS, phase

from msprobe.schema import HookInfo


def records():
    steps = [made.step(0), made.step(1)]
    stages = [made.stage("before_run", hooks=((1, "LrSchedulerHook", 50, 5), (2, "CheckpointHook", 90, 7))), made.stage("after_run")]
    return [made.header(), made.model(), stages[0], *steps, stages[1], made.end(2)]


def page(capsys, tmp_path, found) -> list[str]:
    outcome = invoke(capsys, "hooks", made.write_run(tmp_path / "run", found))
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    return [" ".join(line.split()) for line in outcome.out.splitlines()]


def test_stages_are_in_the_order_of_a_run_and_hooks_in_that_of_their_calls(capsys, tmp_path):
    lines = page(capsys, tmp_path, records())
    assert [line for line in lines if line in ("before_run", "after_train_iter", "after_train_epoch", "after_run")] == [
        "before_run",
        "after_train_iter",
        "after_train_epoch",
        "after_run",
    ]
    first = lines.index("after_train_iter")
    assert lines[first + 2].startswith("OptimizerHook.after_train_iter 40 ABOVE_NORMAL 2 60.0 ms 30.0 ms 30.0 ms")
    assert lines[first + 3].startswith("LrSchedulerHook.after_train_iter 50 NORMAL 2 6.00 ms 3.00 ms 3.00 ms")


def test_times_of_stages_outside_the_steps_are_counted(capsys, tmp_path):
    lines = page(capsys, tmp_path, records())
    assert "CheckpointHook.before_run 90 VERY_LOW 1 7.00 ms 7.00 ms 7.00 ms" in lines


def test_a_hook_that_was_never_timed_shows_dashes(capsys, tmp_path):
    assert "CheckpointHook.after_train_epoch 90 VERY_LOW – – – –" in page(capsys, tmp_path, records())


def test_a_priority_without_a_name_is_its_number(capsys, tmp_path):
    model = made.model(hooks=[HookInfo(index=0, hook="Mine", priority=45, stages=["before_run"])])
    assert "Mine.before_run 45 – – – –" in page(capsys, tmp_path, [made.header(), model])


def test_two_hooks_of_one_class_are_told_apart(capsys, tmp_path):
    model = made.model(hooks=[HookInfo(index=index, hook="Twin", priority=50, stages=["after_train_iter"]) for index in (0, 1)])
    calls = [phase("hook", index, index + 1, hook="Twin", stage="after_train_iter", hook_index=index) for index in (0, 1)]
    lines = page(capsys, tmp_path, [made.header(), model, made.step(0, phases=calls)])
    assert [line for line in lines if line.startswith("Twin")] == [
        "Twin.after_train_iter 50 NORMAL 1 1.00 ms 1.00 ms 1.00 ms",
        "Twin.after_train_iter 50 NORMAL 1 2.00 ms 2.00 ms 2.00 ms",
    ]


def test_a_hook_that_no_list_names_is_shown_with_its_times(capsys, tmp_path):
    calls = [phase("hook", 0, 2, hook="Late", stage="before_val", hook_index=9)]
    lines = page(capsys, tmp_path, [made.header(), made.model(), made.step(0, phases=calls)])
    assert "Late.before_val – 1 2.00 ms 2.00 ms 2.00 ms" in lines


def test_train_calls_with_the_same_hooks_share_a_table_and_others_do_not(capsys, tmp_path):
    other = made.model(2, hooks=[HookInfo(index=0, hook="Other", priority=0, stages=["before_run"])])
    lines = page(capsys, tmp_path, [made.header(), made.model(0), made.step(0), made.model(1), made.step(1, train=1), other])
    assert "train() 0, 1" in lines
    assert "train() 2" in lines
    assert "Other.before_run 0 HIGHEST – – – –" in lines


def test_a_run_without_hooks_has_a_page(capsys, tmp_path):
    assert "No hooks were recorded." in page(capsys, tmp_path, [made.header()])


def test_times_survive_a_model_record_that_cannot_be_read(capsys, tmp_path):
    lines = page(capsys, tmp_path, [made.header(), made.step(0)])
    assert "OptimizerHook.after_train_iter – 1 30.0 ms 30.0 ms 30.0 ms" in lines


def test_hostile_names_are_shown_as_escapes(capsys, tmp_path):
    model = made.model(hooks=[HookInfo(index=0, hook="\x1b[2J[red]", priority=0, stages=["st\nage"])])
    lines = page(capsys, tmp_path, [made.header(), model])
    assert r"\x1b[2J[red].st\nage 0 HIGHEST – – – –" in lines


def test_json_has_the_times_in_nanoseconds(capsys, tmp_path):
    outcome = invoke(capsys, "hooks", made.write_run(tmp_path / "run", records()), "--json")
    (table,) = strict(outcome.out)["tables"]
    stage = next(stage for stage in table["stages"] if stage["stage"] == "after_train_iter")
    optimizer = stage["hooks"][0]
    assert (optimizer["hook"], optimizer["calls"], optimizer["total_ns"], optimizer["mean_ns"]) == ("OptimizerHook", 2, 60 * MS, 30 * MS)
    never = next(stage for stage in table["stages"] if stage["stage"] == "after_train_epoch")["hooks"][0]
    assert (never["calls"], never["total_ns"]) == (0, None)
