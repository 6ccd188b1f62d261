from __future__ import annotations

import pytest
import synthetic as made
from synthetic import MS, phase

from msprobe.analysis.phases import PhaseTimes


def table(steps):
    times = PhaseTimes()
    for step in steps:
        times.add(step)
    return times.table()


def rows(found):
    return {row.name: row for row in found.phases}


def test_totals_count_all_steps_and_quantiles_all_but_the_first():
    waits = [900, 10, 20, 30]
    found = table(made.step(index, wall_ns=1000 * MS, phases=[phase("data_load", 0, wait)]) for index, wait in enumerate(waits))
    load = rows(found)["data_load"]
    assert (load.count, load.host.total_ns) == (4, 960 * MS)
    assert (load.host.first_step_ns, load.host.median_ns) == (900 * MS, 20 * MS)
    assert load.host.p95_ns == 29 * MS
    assert load.share == pytest.approx(0.24)


def test_shares_count_leaves_only_and_leave_the_rest_unaccounted():
    found = table([made.step(0), made.step(1)])
    expected = {
        "data_load": 0.10,
        "forward": 0.50,
        "backward": 0.20,
        "clip_grads": 0.02,
        "optimizer_step": 0.04,
        "zero_grad": 0.01,
        "hook": 0.03,
    }
    assert {name: row.share for name, row in rows(found).items()} == pytest.approx(expected)
    assert found.unaccounted_ns == 2 * (100 - 90 - 1) * MS
    assert sum(expected.values()) + found.unaccounted_share + 2 * MS / (200 * MS) == pytest.approx(1)


def test_hooks_are_told_by_name_and_stage_with_their_own_time():
    found = table([made.step(0), made.step(1)])
    hooks = {(row.hook, row.stage): row for row in found.hooks}
    optimizer = hooks["OptimizerHook", "after_train_iter"]
    assert (optimizer.host.total_ns, optimizer.own_host_ns, optimizer.encloses) == (60 * MS, 2 * (30 - 27) * MS, True)
    scheduler = hooks["LrSchedulerHook", "after_train_iter"]
    assert (scheduler.own_host_ns, scheduler.encloses) == (6 * MS, False)
    assert rows(found)["hook"].count == 2


def test_device_time_comes_first_where_there_is_one():
    phases = [phase("data_load", 0, 10), phase("forward", 10, 5, device_ms=60)]
    found = table(made.step(index, phases=phases) for index in range(3))
    forward = rows(found)["forward"]
    assert (forward.device.total_ns, forward.host.total_ns) == (180 * MS, 15 * MS)
    assert forward.share == pytest.approx(0.6)
    assert rows(found)["data_load"].device is None


def test_what_recording_cost_is_both_outside_and_inside_the_phases():
    found = table([made.step(0, probe_ns=2 * MS, probe_inside_ns=3 * MS)])
    assert found.probe_share == pytest.approx(0.05)
    assert found.unaccounted_ns == (100 - 90 - 2) * MS


def test_broken_off_steps_are_left_out():
    found = table([made.step(0), made.step(1, complete=False, wall_ns=10**12)])
    assert (found.steps, found.step.total_ns, found.slowest_step) == (1, 100 * MS, 0)


def test_the_slowest_step_is_not_the_first():
    walls = [900, 100, 300, 200]
    found = table(made.step(index, wall_ns=wall * MS) for index, wall in enumerate(walls))
    assert (found.slowest_step, found.slowest_step_ns) == (2, 300 * MS)


def test_a_run_without_steps_has_no_shares():
    found = table([])
    assert (found.steps, found.unaccounted_share, found.probe_share, found.slowest_step, found.phases) == (0, None, None, None, [])


@pytest.mark.parametrize("parent", [0, 7, -1])
def test_parents_that_make_no_sense_do_no_harm(parent):
    found = table([made.step(0, phases=[phase("forward", 0, 10, parent=parent)])])
    assert rows(found)["forward"].host.total_ns == 10 * MS
