from __future__ import annotations

import synthetic as made

from msprobe.analysis.progress import ProgressCount
from msprobe.schema import EndRecord, ModelRecord


def progress(records):
    count = ProgressCount()
    for record in records:
        if isinstance(record, ModelRecord):
            count.add_model(record)
        elif isinstance(record, EndRecord):
            count.add_end(record)
        else:
            count.add_step(record)
    return count.told()


def test_a_skipped_step_is_an_iteration_and_no_update():
    found = progress([made.model(), made.skipped_step(0), made.step(1), made.step(2), made.end(3)])
    assert (found.steps, found.updates, found.skipped, found.unapplied_micro_steps, found.cut) == (3, 2, 1, 0, False)


def test_micro_steps_after_the_last_update_are_unapplied():
    steps = [made.micro_step(0, 0, 2), made.step(1), made.micro_step(2, 0, 2), made.micro_step(3, 1, 2)]
    found = progress([made.model(), *steps, made.end(4)])
    assert (found.updates, found.unapplied_micro_steps) == (1, 2)
    assert found.accumulation_sizes == [1, 2]


def test_unapplied_micro_steps_of_all_train_calls_add_up():
    records = [made.model(0), made.micro_step(0, 0, 2), made.end(1), made.model(1), made.step(1), made.micro_step(2, 0, 2), made.end(2)]
    assert progress(records).unapplied_micro_steps == 2


def test_a_run_without_an_end_record_was_cut():
    found = progress([made.model(), made.step(0), made.step(1)])
    assert (found.cut, found.last_step, found.endings) == (True, 1, [])


def test_the_second_of_two_train_calls_may_be_cut():
    assert progress([made.model(0), made.step(0), made.end(1), made.model(1), made.step(1)]).cut


def test_a_broken_off_step_is_not_counted_as_finished_but_its_update_is_a_fact():
    found = progress([made.model(), made.step(0), made.step(1, complete=False), made.end(1, "exception")])
    assert (found.steps, found.broken_off, found.updates) == (1, 1, 2)
    assert found.endings[0].reason == "exception"


def test_steps_that_the_end_counts_and_the_trace_lacks_are_missing():
    found = progress([made.model(), made.step(0), made.step(2), made.end(3, dropped_records=4)])
    assert (found.missing_steps, found.dropped_records) == (1, 4)


def test_an_outcome_that_was_not_recorded_is_unknown():
    found = progress([made.model(), made.step(0, optimizer_step=None)])
    assert (found.updates, found.unknown, found.unapplied_micro_steps) == (0, 1, 0)


def test_a_run_without_steps_counts_nothing():
    found = progress([made.model(), made.end(0)])
    assert (found.steps, found.first_step, found.last_step, found.cut) == (0, None, None, False)
