from __future__ import annotations

import synthetic as made
from synthetic import MS

from msprobe.analysis.events import Events
from msprobe.analysis.losses import Losses
from msprobe.analysis.modules import ModuleTimes
from msprobe.analysis.norms import Norms, norms_of
from msprobe.analysis.settings import Settings
from msprobe.schema import LossScale, LossTerm, Memory, Update


def fed(collector, records):
    for record in records:
        collector.add(record)
    return collector.told()


def test_every_loss_key_and_term_has_its_series_with_the_main_loss_first():
    terms = [LossTerm(name="instance", value=0.25), LossTerm(name="prior", value=0.75)]
    steps = [made.step(index, loss_terms=terms) for index in range(2)]
    for index, step in enumerate(steps):
        step.loss = {"aux_loss": 2.0, "loss": 1.0 + index}
    found = fed(Losses(), steps)
    assert list(found.loss) == ["loss", "aux_loss"]
    assert (found.loss["loss"].first, found.loss["loss"].last) == (1.0, 2.0)
    assert (found.loss_terms["instance"].last, found.loss_terms["prior"].last) == (0.25, 0.75)


def test_norms_before_and_after_clipping_are_separate_series():
    steps = [made.step(0), made.micro_step(1, 0, 2), made.step(2, grad_norm=made.norm(0.5, 0.5, clipped=False))]
    (found,) = fed(Norms(), steps)
    assert (found.before_clip.first, found.before_clip.last) == (5.0, 0.5)
    assert (found.after_clip.first, found.after_clip.last) == (1.0, 0.5)
    assert (found.updates, found.clip_calls, found.clipped, found.max_norms, found.norm_types) == (2, 2, 1, [1.0], [2.0])


def test_without_clipping_there_is_no_after():
    bare = made.norm(5.0, None, None, max_norm=None, clip_returned=None, optimizer_params_after=None)
    (found,) = fed(Norms(), [made.step(0, grad_norm=bare)])
    assert (found.clip_calls, found.after_clip.count, found.before_clip.last) == (0, 0, 5.0)


def test_each_optimizer_of_a_step_has_its_own_norms():
    updates = [Update(optimizer=index, outcome="done", grad_norm=made.norm(float(index), optimizer=index)) for index in (0, 1)]
    found = fed(Norms(), [made.step(0, updates=updates)])
    assert [(series.optimizer, series.before_clip.last) for series in found] == [(0, 0.0), (1, 1.0)]


def test_the_norm_of_a_step_counts_where_updates_are_not_listed():
    assert [optimizer for optimizer, _ in norms_of(made.step(0, updates=[]))] == [0]


def test_learning_rates_go_by_group_and_memory_by_its_greatest():
    first = made.step(0, lr=[0.1, 0.01], memory=Memory(peak_bytes=5, rss_bytes=9))
    second = made.step(1, lr=[0.2, 0.02], memory=Memory(peak_bytes=7, rss_bytes=3))
    found = fed(Settings(), [first, second])
    assert [(series.first, series.last) for series in found.lr] == [(0.1, 0.2), (0.01, 0.02)]
    assert (found.memory_max.peak_bytes, found.memory_max.rss_bytes, found.memory_max.allocated_bytes) == (7, 9, None)
    assert found.final_loss_scale is None


def test_the_loss_scale_is_followed_to_its_last_value():
    steps = [made.skipped_step(0), made.step(1, loss_scale=LossScale(before=32768.0, after=32768.0))]
    found = fed(Settings(), steps)
    assert (found.loss_scale.first, found.loss_scale.last, found.final_loss_scale) == (65536.0, 32768.0, 32768.0)


def test_events_of_one_code_are_counted_and_errors_come_first():
    events = [made.event("nonfinite", index, f"message {index}") for index in range(1000)] + [
        made.event("exception", 7, "bad", level="error")
    ]
    found = fed(Events(), events)
    assert [(group.code, group.count, group.first_step, group.last_step) for group in found] == [
        ("exception", 1, 7, 7),
        ("nonfinite", 1000, 0, 999),
    ]
    assert found[1].message == "message 0"


def test_modules_add_up_by_name_and_direction_and_know_which_lie_inside():
    times = ModuleTimes()
    for index in range(2):
        for record in made.modules(index):
            times.add(record)
    found = {(row.name, row.direction): row for row in times.rows()}
    assert (found["unet", "forward"].calls, found["unet", "forward"].host_ns) == (2, 80 * MS)
    assert (found["unet", "backward"].host_ns, found["unet", "backward"].device_ns) == (36 * MS, None)
    assert not found["unet.block", "forward"].outermost
    assert found["text_encoder", "forward"].outermost


def test_a_module_name_that_only_begins_alike_is_not_inside():
    times = ModuleTimes()
    for name in ("unet", "unet_teacher"):
        times.add(made.module(0, 0, name, 0, 1))
    assert all(row.outermost for row in times.rows())


def test_device_times_of_modules_come_first():
    times = ModuleTimes()
    times.add(made.module(0, 0, "unet", 0, 1, device_ns=50 * MS, recompute=True))
    (row,) = times.rows()
    assert (row.time_ns, row.host_ns, row.recomputed) == (50 * MS, 1 * MS, 1)
