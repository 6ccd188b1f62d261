from __future__ import annotations

import synthetic as made

from msprobe.analysis.overview import ModelOverview
from msprobe.schema import ModelRecord, NormsRecord


def overview(records):
    found = ModelOverview()
    for record in records:
        if isinstance(record, ModelRecord):
            found.add_model(record)
        elif isinstance(record, NormsRecord):
            found.add_norms(record)
        else:
            found.add_tensor(record)
    return found.told()


def test_parameters_are_counted_by_what_happens_to_them():
    listed = [
        made.parameter(0, "a", (2, 3)),
        made.parameter(1, "b", (5,), dtype="bfloat16"),
        made.parameter(2, "c", (7,), optimizer=None),
        made.parameter(3, "d", (11,), trainable=False),
    ]
    found = overview([made.model(parameters=listed)]).parameters
    assert (found.trainable.parameters, found.trainable.values) == (3, 6 + 5 + 7)
    assert (found.frozen.parameters, found.frozen.values) == (1, 11)
    assert (found.in_optimizer.parameters, found.in_optimizer.values) == (2, 11)
    assert found.trainable_without_optimizer.parameters == 1
    assert found.trainable_dtypes == {"float32": 13, "bfloat16": 5}


def test_a_scalar_parameter_has_one_value():
    assert overview([made.model(parameters=[made.parameter(0, "s", ())])]).parameters.trainable.values == 1


def test_parameters_without_gradient_are_counted_and_frozen_ones_are_not():
    found = overview([made.model(), made.norms(0), made.norms(1)]).gradients
    assert (found.never, found.never_names, found.sometimes) == (1, ["unet.unused.weight"], 0)


def test_a_gradient_of_zero_is_a_gradient():
    assert overview([made.model(), made.norms(0, (0.0, 0.0, 0.0, None))]).gradients.never == 0


def test_a_gradient_that_is_there_at_some_steps_is_told_apart():
    found = overview([made.model(), made.norms(0), made.norms(1, (3.0, 4.0, 5.0, None)), made.norms(2)]).gradients
    assert (found.never, found.sometimes) == (0, 1)


def test_gradients_on_parameters_that_no_optimizer_owns_are_named():
    listed = [made.parameter(0, "a"), made.parameter(1, "orphan", optimizer=None)]
    found = overview([made.model(parameters=listed), made.norms(0, (1.0, 2.0))]).gradients
    assert (found.without_optimizer, found.without_optimizer_names) == (1, ["orphan"])


def test_full_records_tell_of_gradients_as_well_as_norms():
    found = overview([made.model(), made.tensor(0, "unet.conv.weight"), made.tensor(0, "unet.conv.bias", l2=None, skipped="no gradient")])
    assert (found.gradients.never, found.gradients.never_names) == (1, ["unet.conv.bias"])


def test_without_recorded_gradients_nothing_is_claimed():
    assert overview([made.model()]).gradients.never is None


def test_norms_of_some_parameters_say_nothing_of_the_others():
    found = overview([made.model(), made.norms(0, (None,), ids=[1])]).gradients
    assert (found.never, found.never_names) == (1, ["unet.conv.bias"])


def test_several_train_calls_are_counted_and_the_last_one_is_shown():
    found = overview([made.model(0), made.model(1, trainer="Other")])
    assert (found.trains, found.trainer) == (2, "Other")


def test_nothing_trained_has_no_trainer():
    found = overview([made.norms(0)])
    assert (found.trains, found.trainer, found.parameters.trainable.parameters) == (0, None, 0)
