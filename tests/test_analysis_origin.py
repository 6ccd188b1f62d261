"""Where a bad value came from, and the time outside the steps."""

from msprobe.analysis.origin import Origins
from msprobe.analysis.outside import OutsideTimes
from msprobe.schema import HookTime, StageRecord, TensorRecord


def output(step, seq, name, **counts):
    return TensorRecord(train=0, step=step, seq=seq, role="module.output", name=name, call=0, **counts)


def test_the_first_output_in_execution_order_that_is_not_finite_is_the_origin():
    origins = Origins()
    for record in (output(3, 7, "late", nan=1), output(3, 5, "early", posinf=2), output(3, 4, "fine"), output(4, 1, "fine")):
        origins.add(record)
    assert origins.told()[3].name == "early"
    assert origins.told()[4] is None
    assert 5 not in origins.told()


def test_an_attention_mask_of_minus_infinity_is_no_origin():
    origins = Origins()
    origins.add(output(0, 0, "mask", neginf=40))
    assert origins.told() == {0: None}


def test_gradients_and_parameters_are_no_module_outputs():
    origins = Origins()
    origins.add(TensorRecord(train=0, step=0, role="param.grad", name="weight", nan=1))
    assert origins.told() == {}


def stage(name, host_ns, *hooks):
    times = [HookTime(index=index, hook=hook, priority=50, host_ns=spent) for index, (hook, spent) in enumerate(hooks)]
    return StageRecord(train=0, stage=name, after_step=None, start_ns=0, host_ns=host_ns, hooks=times)


def test_stages_outside_the_steps_add_up_and_name_the_hook_that_took_most():
    outside = OutsideTimes()
    outside.add(stage("before_run", 5, ("A", 3)))
    outside.add(stage("after_train_epoch", 1000, ("Saver", 600), ("Sleeper", 300)))
    outside.add(stage("after_train_epoch", 1500, ("Saver", 100), ("Sleeper", 1300)))
    first, second = outside.told()
    assert (first.stage, first.count, first.total_ns, first.slowest_hook, first.slowest_hook_ns) == (
        "after_train_epoch",
        2,
        2500,
        "Sleeper",
        1600,
    )
    assert second.stage == "before_run"
