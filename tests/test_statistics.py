"""All statistics of a tensor: counts of special values, and the distribution of the finite ones, true to float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import Given, Install, Update, ones
from trainings import build_trainer

from msprobe.capture.statistics import COLUMNS, PIECE, fill, statistics, why_no_statistics
from msprobe.schema import TensorRecord
from msprobe.testing import capture


def described(tensor):
    """Return the statistics as a record holds them."""
    record = TensorRecord(train=0, step=0, role="param", name="x")
    fill(record, statistics(tensor).tolist())
    return record


def truth(tensor):
    """Return the same from plain float64 formulas."""
    values = [float(value) for value in tensor.double().reshape(-1)]
    finite = torch.tensor([value for value in values if math.isfinite(value)], dtype=torch.float64)
    counts = {
        "nan": sum(math.isnan(value) for value in values),
        "posinf": values.count(math.inf),
        "neginf": values.count(-math.inf),
        "zeros": values.count(0.0),
    }
    if not len(finite):
        return counts | dict.fromkeys(("min", "max", "mean", "std", "l2", "absmax"))
    mean = math.fsum(finite) / len(finite)
    return counts | {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": mean,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in finite.tolist()) / len(finite)),
        "l2": math.sqrt(math.fsum(value**2 for value in finite.tolist())),
        "absmax": float(finite.abs().max()),
    }


def assert_true(tensor):
    record, expected = described(tensor), truth(tensor)
    spread = expected["absmax"] or 0.0
    for name, value in expected.items():
        found = getattr(record, name)
        if isinstance(value, float):
            assert found == pytest.approx(value, rel=1e-6, abs=1e-9 * spread), name
        else:
            assert found == value, name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0]),
        torch.full((7,), math.nan),
        torch.empty(0),
        torch.tensor(3.0),
        torch.full((5,), 0.1),
        torch.tensor([1, 2]),
        torch.tensor([True, False]),
        torch.zeros(4, dtype=torch.uint8),
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([60000.0, 60000.0], dtype=torch.float16),
        torch.tensor([1e8, 1e8 + 8]),
        torch.randn(30, 40).t()[::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_statistics_agree_with_float64_over_the_finite_elements(tensor):
    assert_true(tensor)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=0, max_size=40))
def test_any_mixture_of_floats_is_described_truly(values):
    assert_true(torch.tensor(values, dtype=torch.float32))


def test_many_pieces_combine_without_cancellation():
    torch.manual_seed(3)
    tensor = torch.randn(2 * PIECE + 17) * 1e-3 + 1e3
    exact = tensor.double()
    record = described(tensor)
    assert record.mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert record.std == pytest.approx(float((exact - exact.mean()).square().mean().sqrt()), rel=1e-6)
    assert record.l2 == pytest.approx(float(exact.norm()), rel=1e-12)


def test_huge_float64_values_do_not_overflow():
    record = described(torch.full((9,), 1e200, dtype=torch.float64))
    assert record.l2 == pytest.approx(3e200)
    assert record.std == pytest.approx(0.0, abs=1e190)


def test_a_sparse_tensor_counts_by_its_coalesced_values():
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.tensor([2.0, 2.0]), (3,))
    assert described(sparse).l2 == pytest.approx(4.0)


@pytest.mark.parametrize("tensor", [torch.tensor([1 + 2j]), torch.empty(2, device="meta")])
def test_what_cannot_be_described_says_why(tensor):
    assert why_no_statistics(tensor)


def train(folder, **options):
    with capture(level="full", tensors=["param.grad", "module.output"], **options) as records:
        build_trainer(folder, steps=3, options={"grad_clip": {"max_norm": 1.0}}).train()
    return [record for record in records if type(record).__name__ == "TensorRecord"]


def test_level_full_describes_gradients_before_clipping_and_outputs_on_the_selected_steps(tmp_path):
    records = train(tmp_path, steps="1:")
    gradients = [record for record in records if record.role == "param.grad" and record.point == "after_backward"]
    clipped = [record for record in records if record.role == "param.grad" and record.point == "after_clip"]
    assert [record.step for record in clipped] == [1, 2]
    assert all(record.l2 == pytest.approx(1.0, rel=1e-6) for record in clipped)
    outputs = [record for record in records if record.role == "module.output"]
    assert [record.step for record in gradients] == [record.step for record in outputs] == [1, 2]
    for record in gradients:
        expected = truth(torch.tensor([3.0, 4.0]))
        assert {name: getattr(record, name) for name in COLUMNS} == pytest.approx(expected)


def test_a_gradient_that_holds_the_loss_scale_is_described_without_it(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(trainer):
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    with capture(level="full") as records:
        build_trainer(tmp_path, steps=1, callbacks=[Install(Update(update, scaler))]).train()
    (gradient,) = [record for record in records if type(record).__name__ == "TensorRecord"]
    expected = truth(torch.tensor([3.0, 4.0]))
    assert {name: getattr(gradient, name) for name in COLUMNS} == pytest.approx(expected)


def test_a_trained_parameter_without_gradient_says_so(tmp_path):
    model = Given(used=torch.tensor([3.0, 4.0]), unused=None)
    with capture(level="full") as records:
        build_trainer(tmp_path, model=model, dataset=ones(1)).train()
    found = {record.name: record for record in records if type(record).__name__ == "TensorRecord"}
    assert found["tensors.used"].l2 == pytest.approx(5.0)
    assert found["tensors.unused"].skipped == "no gradient"
    assert found["tensors.unused"].l2 is None
