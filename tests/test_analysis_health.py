from __future__ import annotations

import math

import pytest
import synthetic as made

from msprobe.analysis.health import HealthCheck
from msprobe.schema import LossTerm, StepRecord


def health(records):
    check = HealthCheck()
    for record in records:
        if isinstance(record, StepRecord):
            check.add_step(record)
        else:
            check.add_tensor(record)
    return check.told()


def test_a_healthy_run_has_no_bad_value():
    found = health([made.tensor(0), made.step(0), made.step(1)])
    assert (found.first_bad, found.bad_steps, found.overflow_skips) == (None, 0, 0)


@pytest.mark.parametrize(("value", "spelled"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_the_first_nonfinite_loss_is_found(value, spelled):
    found = health([made.step(0), made.step(1, value), made.step(2, value)])
    assert (found.first_bad.step, found.first_bad.kind, found.first_bad.value) == (1, "loss", spelled)
    assert found.bad_steps == 2


def test_an_overflow_that_ends_in_a_skip_is_no_fault():
    found = health([made.tensor(0, posinf=3), made.skipped_step(0), made.step(1)])
    assert (found.first_bad, found.bad_steps, found.overflow_skips) == (None, 0, 1)


def test_tensors_written_after_their_skipped_step_are_no_fault_either():
    found = health([made.skipped_step(0), made.tensor(0, posinf=3), made.step(1)])
    assert (found.first_bad, found.overflow_skips) == (None, 1)


def test_a_skip_with_a_nonfinite_loss_is_a_fault():
    found = health([made.tensor(0, nan=20), made.skipped_step(0, math.nan)])
    assert (found.first_bad.step, found.first_bad.kind) == (0, "loss")
    assert found.overflow_skips == 0
    assert [bad.kind for bad in found.also_bad] == ["param.grad", "gradient_norm"]


@pytest.mark.parametrize("tensor_first", [True, False])
def test_a_bad_gradient_that_reached_the_weights_is_named_with_its_counts(tensor_first):
    pair = [made.tensor(3, "unet.conv.bias", nan=3, neginf=1, numel=4), made.step(3, grad_norm=made.norm(math.nan, math.nan))]
    found = health([made.step(2), *(pair if tensor_first else pair[::-1]), made.step(4)])
    bad = next(bad for bad in [found.first_bad, *found.also_bad] if bad.kind == "param.grad")
    assert (bad.step, bad.name, bad.nan, bad.posinf, bad.neginf, bad.numel) == (3, "unet.conv.bias", 3, 0, 1, 4)
    assert {found.first_bad.kind, *(bad.kind for bad in found.also_bad)} == {"param.grad", "gradient_norm"}
    assert found.bad_steps == 1


def test_a_nonfinite_norm_of_a_done_update_is_a_fault():
    found = health([made.step(0, grad_norm=made.norm(math.inf, math.nan))])
    assert (found.first_bad.kind, found.first_bad.value, found.first_bad.what) == (
        "gradient_norm",
        "Infinity",
        "the gradient norm before clipping",
    )


def test_an_overflow_in_a_micro_step_is_judged_by_the_update_that_follows():
    micro = [made.tensor(0, posinf=1), made.micro_step(0, 0, 2)]
    assert health([*micro, made.skipped_step(1), made.step(2)]).first_bad is None
    assert health([*micro, made.step(1)]).first_bad.step == 0


def test_a_bad_gradient_whose_update_never_came_is_a_fault():
    assert health([made.tensor(5, nan=1)]).first_bad.step == 5
    assert health([made.tensor(5, nan=1), made.micro_step(5, 0, 4)]).first_bad.step == 5


def test_a_nonfinite_parameter_is_a_fault_and_a_masked_output_is_not():
    assert health([made.tensor(0, role="module.output", neginf=9), made.step(0)]).first_bad is None
    assert health([made.tensor(0, role="param", nan=9), made.step(0)]).first_bad.kind == "param"


def test_a_nonfinite_loss_term_is_named():
    found = health([made.step(0, loss_terms=[LossTerm(name="instance", value=1.0), LossTerm(name="prior", value=math.nan)])])
    assert (found.first_bad.kind, found.first_bad.name) == ("loss_term", "prior")


def test_a_loss_that_was_not_recorded_is_not_bad():
    assert health([made.step(0, None)]).first_bad is None
