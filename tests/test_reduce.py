"""Norms of many tensors at once agree with float64, whatever the tensors' size, type, layout and range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe.capture import reduce


def norm(tensor, order=2.0):
    assert reduce.why_not_measurable(tensor) is None
    return float(reduce.norms([reduce.as_dense_real(tensor, order)], order)[0])


def exact(tensor, order=2.0):
    """Compute the norm in float64, piece by piece so that 10^8 elements fit, independently of torch's reductions of whole tensors."""
    flat = tensor.detach().reshape(-1)
    pieces = [flat[start : start + 2**20].double() for start in range(0, flat.numel(), 2**20)]
    if order == math.inf:
        return max(float(piece.abs().max()) for piece in pieces)
    return math.fsum(float((piece.abs() ** order).sum()) for piece in pieces) ** (1 / order)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 1023, 1024, 1025, 10**4, 10**6 + 7])
def test_norm_of_random_elements_equals_float64(numel, dtype):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert norm(tensor) == pytest.approx(exact(tensor), rel=1e-6)


@pytest.mark.parametrize("numel", [10**3, 10**5, 10**7])
@pytest.mark.parametrize("value", [0.1, 1.0, 3e-5, 12345.678])
def test_norm_of_equal_elements_equals_float64(numel, value):
    # Equal elements are the worst case: every rounding goes the same way.
    tensor = torch.full((numel,), value)
    assert norm(tensor) == pytest.approx(float(tensor[0].double()) * math.sqrt(numel), rel=1e-6)


def test_norm_of_a_hundred_million_elements_equals_float64():
    tensor = torch.full((10**8,), 0.1)
    assert norm(tensor) == pytest.approx(float(tensor[0].double()) * 1e4, rel=1e-6)
    assert abs(float(tensor.norm()) / 1e3 - 1) > 1e-6, "torch's own float32 norm is as good: this test shows nothing"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "arrange",
    [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:, ::3],
        lambda tensor: tensor[::2, 5:-5],
        lambda tensor: tensor.reshape(2, 30, 8, -1).to(memory_format=torch.channels_last),
        lambda tensor: tensor.reshape(2, 30, 8, -1).permute(3, 1, 0, 2),
        lambda tensor: tensor[:1].expand(7, -1),
        lambda tensor: tensor[0, 0],
    ],
    ids=["transposed", "strided", "sliced", "channels_last", "permuted", "expanded", "zero-dimensional"],
)
def test_norm_does_not_depend_on_the_layout(arrange, dtype):
    tensor = arrange(torch.randn(60, 160, generator=torch.Generator().manual_seed(1)).to(dtype))
    assert norm(tensor) == pytest.approx(exact(tensor), rel=1e-6)


def test_norms_of_a_mixed_list_stand_in_the_order_of_the_tensors():
    tensors = [
        torch.full((3000,), 2.0),
        torch.empty(0),
        torch.tensor([3.0, 4.0], dtype=torch.float64),
        torch.tensor(-7.0),
        torch.full((2048,), 1.0, dtype=torch.bfloat16),
        torch.zeros(5),
        torch.tensor([3.0, 4.0], dtype=torch.float16),
    ]
    found = reduce.norms(tensors).tolist()
    assert found == pytest.approx([2 * math.sqrt(3000), 0.0, 5.0, 7.0, math.sqrt(2048), 0.0, 5.0], rel=1e-6)


def test_a_list_of_the_same_sizes_is_measured_anew():
    for value in (1.0, 2.0):
        assert reduce.norms([torch.full((4096,), value), torch.full((16,), value)]).tolist() == [64 * value, 4 * value]


def test_no_tensor_has_no_norm():
    assert reduce.norms([]).tolist() == []


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.full((100,), 1e20), 1e21),
        (torch.full((4096,), 3e38), 3e38 * 64),
        (torch.full((16,), 1e-4, dtype=torch.float16), 4e-4),
        (torch.full((16, 100), 10.0, dtype=torch.float16), 400.0),
        (torch.full((36,), 10000.0, dtype=torch.float16), 60000.0),
        (torch.full((10000,), 1e-30), 1e-28),
        (torch.full((4,), 1e-44), 2e-44),
        (torch.full((4,), 1e200, dtype=torch.float64), 2e200),
        (torch.full((4,), 1e-200, dtype=torch.float64), 2e-200),
        (torch.zeros(5000), 0.0),
    ],
)
def test_norm_neither_overflows_nor_vanishes(tensor, expected):
    one_element = float(tensor.reshape(-1)[0].double()) or 1.0
    represented = one_element * math.sqrt(tensor.numel()) if expected else 0.0
    assert norm(tensor) == pytest.approx(represented, rel=1e-6)
    assert represented == pytest.approx(expected, rel=0.02)


def test_a_norm_is_not_finite_where_an_element_is_not():
    found = reduce.norms([torch.tensor([1.0, math.inf]), torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, math.inf]), torch.ones(4)])
    assert found[0] == math.inf
    assert found[1].isnan()
    assert found[2].isnan()
    assert found[3] == 2.0


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_norm_of_any_order_equals_float64(order, dtype):
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert norm(tensor, order) == pytest.approx(exact(tensor, order), rel=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_an_empty_tensor_has_norm_zero_in_any_order(order):
    assert norm(torch.empty(0, 3), order) == 0.0


def test_sparse_gradient_counts_an_index_once():
    embedding = torch.nn.Embedding(3, 4, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    gradient = embedding.weight.grad
    assert not gradient.is_coalesced()
    assert norm(gradient) == 4.0  # 2.83 over the values as they are
    assert not gradient.is_coalesced()


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("conjugated", [False, True], ids=["plain", "conjugated"])
def test_complex_norm_is_over_magnitudes(order, conjugated):
    tensor = torch.tensor([3 + 4j, 5 + 12j])
    expected = {1.0: 18.0, 2.0: math.hypot(5, 13), math.inf: 13.0}[order]
    assert norm(tensor.conj() if conjugated else tensor, order) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.ones(3, dtype=torch.int64), "int64"),
        (lambda: torch.ones(3, dtype=torch.bool), "bool"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout"),
        (lambda: type("DTensor", (torch.Tensor,), {})(torch.ones(2)), "DTensor"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8"),
    ],
    ids=["meta", "integer", "bool", "sparse-rows", "distributed", "float8"],
)
def test_what_has_no_norm_says_why(make, reason):
    assert reason in reduce.why_not_measurable(make())


def test_measuring_changes_nothing():
    tensor = torch.randn(3000, requires_grad=True)
    before = tensor.detach().clone()
    version = tensor._version
    norm(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert tensor.grad is None


def test_counts_of_what_is_not_finite():
    counts = reduce.count_nonfinite(torch.tensor([3.0, math.nan, math.inf, -math.inf, math.nan, 4.0]))
    assert (counts.nan, counts.posinf, counts.neginf, counts.finite_l2) == (2, 1, 1, 5.0)
    halves = reduce.count_nonfinite(torch.tensor([math.nan, 300.0, 400.0], dtype=torch.float16))
    assert (halves.nan, halves.posinf, halves.neginf, halves.finite_l2) == (1, 0, 0, 500.0)


@pytest.mark.parametrize(
    ("parts", "order", "whole"),
    [
        ([3.0, 4.0], 2.0, 5.0),
        ([3.0, 4.0], 1.0, 7.0),
        ([3.0, 4.0], math.inf, 4.0),
        ([3.0, 4.0], 3.0, 91 ** (1 / 3)),
        ([3.0, 0.0, 4.0], 0.0, 2.0),
        ([3.0, 4.0], -math.inf, 3.0),
        ([1e300, 1e300], 2.0, math.sqrt(2) * 1e300),
        ([1e-300, 1e-300], 2.0, math.sqrt(2) * 1e-300),
        ([0.0, 0.0], 2.0, 0.0),
        ([1.0, math.inf], 2.0, math.inf),
        ([1.0, math.inf], math.inf, math.inf),
    ],
)
def test_the_norm_of_a_whole_from_its_parts(parts, order, whole):
    assert reduce.compose(parts, order) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_one_part_that_is_nan_makes_the_whole_nan(order):
    assert math.isnan(reduce.compose([1.0, math.nan, math.inf], order))
    assert math.isnan(reduce.compose([math.nan, 1.0], order))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(finite, max_size=9), min_size=1, max_size=5), st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_parts_measured_and_composed_equal_the_whole(lists, order):
    tensors = [torch.tensor(values, dtype=torch.float32) for values in lists]
    whole = torch.cat(tensors).double()
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    expected = largest * exact(whole / largest, order) if largest else 0.0
    assert reduce.compose(reduce.norms(tensors, order).tolist(), order) == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5000), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.floats(-8, 4), st.integers(0, 2**31))
def test_any_size_and_magnitude_equals_float64(numel, dtype, exponent, seed):
    tensor = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10**exponent).to(dtype)
    expected = exact(tensor) if numel else 0.0
    assert norm(tensor) == pytest.approx(expected, rel=1e-6)
