"""The gradient norms of every update, before and after clipping, as ModelScope's own trainers make them."""

import contextlib
import math
import warnings

import pytest
import torch
from conftest import strict_records
from modelscope.trainers.hooks.optimizer.base import OptimizerProcessor
from processors import Given, Install, KeepingGradients, Update, ones, record
from trainings import Known, Repeated, build_trainer

import msprobe


def given(folder, gradients, steps=1, **settings):
    return record(folder, model=Given(**gradients), dataset=ones(steps), **settings)


# Clipping


def test_clipping_shows_the_norm_before_and_after(tmp_path):
    for norm in record(tmp_path, options={"grad_clip": {"max_norm": 1.0}}).grad_norms():
        assert (norm.before_clip, norm.clip_returned, norm.optimizer_params) == (5.0, 5.0, 5.0)
        assert norm.after_clip == pytest.approx(0.99999982, abs=1e-6)
        assert norm.optimizer_params_after == pytest.approx(0.99999982, abs=1e-6)
        assert (norm.clipped, norm.max_norm, norm.norm_type) == (True, 1.0, 2.0)


@pytest.mark.parametrize("spelling", ["inf", math.inf], ids=["string", "float"])
def test_clipping_by_the_largest_element(tmp_path, spelling):
    # The configuration is JSON, so a float cannot come from there: both spellings reach the hook directly.
    trainer = build_trainer(tmp_path, options={"grad_clip": {"max_norm": 1.0, "norm_type": "inf"}})
    trainer.cfg.train.optimizer.options.grad_clip.norm_type = spelling
    with msprobe.testing.capture() as records:
        trainer.train()
    norms = [entry.grad_norm for entry in records if hasattr(entry, "grad_norm")]
    assert len(norms) == 3
    for norm in norms:
        assert (norm.before_clip, norm.clip_returned, norm.norm_type, norm.clipped) == (4.0, 4.0, math.inf, True)
        assert norm.after_clip == pytest.approx(1.0, abs=1e-6)
    per_parameter = [entry.l2 for entry in records if hasattr(entry, "ids")]
    assert per_parameter == [[5.0]] * 3, "a parameter's own norm is its l2, whatever clipping uses"


def test_a_threshold_above_the_norm_clips_nothing(tmp_path):
    for norm in record(tmp_path, options={"grad_clip": {"max_norm": 10.0}}).grad_norms():
        assert (norm.before_clip, norm.after_clip, norm.clip_returned, norm.clipped) == (5.0, 5.0, 5.0, False)


def test_without_clipping_there_is_no_norm_after(tmp_path):
    for norm in record(tmp_path).grad_norms():
        assert (norm.before_clip, norm.optimizer_params, norm.norm_type) == (5.0, 5.0, 2.0)
        assert norm.clip_returned is norm.after_clip is norm.clipped is norm.max_norm is norm.optimizer_params_after is None


@pytest.mark.parametrize("clip", [{}, {"grad_clip": {"max_norm": 0.5}}, {"grad_clip": {"max_norm": 0.5, "norm_type": 3.0}}], ids=str)
def test_norms_equal_a_float64_computation_from_the_gradients_themselves(tmp_path, clip):
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    model.forward = lambda x: {"loss": torch.nn.Sequential.forward(model, x).square().mean()}
    data = Repeated([{"x": torch.randn(20, generator=torch.Generator().manual_seed(seed))} for seed in range(8)])
    kept = KeepingGradients()
    recorded = record(tmp_path, model=model, dataset=data, callbacks=[Install(kept)], options={"cumulative_iters": 2, **clip})
    order = clip.get("grad_clip", {}).get("norm_type", 2.0)
    found = [norm for norm in recorded.grad_norms() if norm is not None]
    assert len(found) == len(kept.kept) == 4
    for number, gradients in enumerate(kept.kept):
        exact = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
        total = torch.cat([gradient.double().ravel() for gradient in gradients.values()])
        assert found[number].before_clip == pytest.approx(float(torch.linalg.vector_norm(total, order)), rel=1e-6)
        for name, value in exact.items():
            assert recorded.l2(name)[number] == pytest.approx(value, rel=1e-6)


# Accumulation


def test_the_norm_is_of_the_accumulated_gradient_and_stands_at_the_update(tmp_path):
    recorded = record(tmp_path, steps=8, options={"cumulative_iters": 4, "grad_clip": {"max_norm": 1.0}})
    assert recorded.before_clip() == [None, None, None, 5.0] * 2
    assert [len(phases) for phases in recorded.phases("backward")] == [1] * 8
    assert [len(phases) for phases in recorded.phases("clip_grads")] == [0, 0, 0, 1] * 2


def test_a_parameters_norm_under_accumulation_is_not_that_of_an_increment(tmp_path):
    recorded = record(tmp_path, steps=4, options={"cumulative_iters": 2})  # each increment is [3, 4] / 2, of norm 2.5
    assert [norms.step - recorded.steps[0].step for norms in recorded.norms] == [1, 3]
    assert recorded.l2("linear.weight") == [5.0, 5.0]


# Parameters without a gradient


def test_a_parameter_without_gradient_is_null_and_not_zero(tmp_path):
    recorded = given(tmp_path, {"used": torch.tensor([3.0, 4.0]), "unused": None}, steps=2, options={"grad_clip": {"max_norm": 10.0}})
    assert recorded.l2("tensors.unused") == [None, None]
    assert recorded.l2("tensors.used") == [5.0, 5.0]
    assert recorded.before_clip() == [5.0, 5.0]


def test_a_gradient_of_zeros_is_zero_and_not_null(tmp_path):
    recorded = given(tmp_path, {"used": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)})
    assert recorded.l2("tensors.zero") == [0.0]


class OfItsInput(torch.nn.Module):
    """A model whose loss depends on its input alone."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return {"loss": x.requires_grad_().sum()}


@pytest.mark.parametrize("options", [{}, {"grad_clip": {"max_norm": 1.0}}], ids=["unclipped", "clipped"])
def test_no_gradient_at_all_has_no_norm(tmp_path, options):
    for norm in record(tmp_path, model=OfItsInput(), options=options).grad_norms():
        assert norm.before_clip is norm.after_clip is norm.optimizer_params is norm.optimizer_params_after is None
        assert norm.clip_returned is norm.clipped is None


class PartlyFrozen(torch.nn.Module):
    """A frozen part under no_grad, and a trained one of gradient [3, 4]."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(2, 2, bias=False)
        self.frozen.requires_grad_(False)
        torch.nn.init.eye_(self.frozen.weight)
        self.trained = Known()

    def forward(self, x):
        with torch.no_grad():
            features = self.frozen(x)
        return self.trained.forward(features)


def test_a_frozen_part_has_no_gradient_and_says_so(tmp_path):
    recorded = record(tmp_path, model=PartlyFrozen(), options={"grad_clip": {"max_norm": 1.0}})
    assert {parameter.name: parameter.requires_grad for parameter in recorded.model.parameters} == {
        "frozen.weight": False,
        "trained.linear.weight": True,
    }
    assert recorded.l2("frozen.weight") == [None] * 3
    assert recorded.l2("trained.linear.weight") == [5.0] * 3
    assert recorded.before_clip() == [5.0] * 3
    assert not recorded.tensors
    flags = {name: parameter.requires_grad for name, parameter in recorded.trainer.model.named_parameters()}
    assert flags == {"frozen.weight": False, "trained.linear.weight": True}
    assert recorded.trainer.model.frozen.weight.grad is None


def test_a_tied_parameter_counts_once(tmp_path):
    model = torch.nn.Module()
    model.one = torch.nn.Linear(2, 1, bias=False)
    model.two = torch.nn.Linear(2, 1, bias=False)
    model.two.weight = model.one.weight
    model.forward = lambda x: {"loss": model.one(x).sum() / 2 + model.two(x).sum() / 2}
    recorded = record(tmp_path, model=model, steps=1)
    assert [(parameter.name, parameter.tied) for parameter in recorded.model.parameters] == [("one.weight", ["two.weight"])]
    assert (recorded.before_clip(), recorded.l2("one.weight")) == ([5.0], [5.0])


# Types, and numbers out of the ordinary


def test_parameters_of_several_types_have_one_norm(tmp_path):
    types = {"in32": torch.float32, "in_bf16": torch.bfloat16, "in16": torch.float16, "in64": torch.float64}
    recorded = given(tmp_path, {name: torch.tensor([3.0, 4.0], dtype=dtype) for name, dtype in types.items()})
    assert recorded.before_clip() == [10.0]
    assert [recorded.l2(f"tensors.{name}") for name in types] == [[5.0]] * 4
    assert {parameter.name: parameter.dtype for parameter in recorded.model.parameters} == {
        "tensors.in32": "float32",
        "tensors.in_bf16": "bfloat16",
        "tensors.in16": "float16",
        "tensors.in64": "float64",
    }


def test_half_precision_gradients_whose_norm_torch_overflows(tmp_path):
    gradients = {f"part{number}": torch.full((36,), 10000.0, dtype=torch.float16) for number in range(4)}
    torch.manual_seed(0)
    trainer = build_trainer(tmp_path, model=Given(**gradients), dataset=ones(1), options={"grad_clip": {"max_norm": 1.0}})
    msprobe.enable(out=str(tmp_path / "runs"), name="half", strict=True, quiet=True)
    try:
        trainer.train()
    finally:
        msprobe.disable()
    (step,) = [entry for entry in strict_records(tmp_path / "runs" / "half" / "rank00000.jsonl") if entry["kind"] == "step"]
    norm = step["grad_norm"]
    assert norm["before_clip"] == pytest.approx(120000.0, rel=1e-3)
    assert norm["clip_returned"] == "Infinity"
    assert norm["after_clip"] == 0.0  # torch divided by that infinity
    assert norm["clipped"] is True


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (torch.full((16,), 1e-4, dtype=torch.float16), 4e-4),
        (torch.full((16, 100), 10.0, dtype=torch.float16), 400.0),
        (torch.full((100,), 1e20), 1e21),
        (torch.full((100,), 1e-30), 1e-29),
    ],
    ids=["tiny-half", "half", "huge", "tiny"],
)
def test_a_norm_out_of_the_types_own_range(tmp_path, gradient, expected):
    recorded = given(tmp_path, {"weight": gradient})
    assert recorded.before_clip() == [pytest.approx(expected, rel=0.01)]
    assert recorded.before_clip() == [pytest.approx(float(gradient.double().norm()), rel=1e-6)]


def test_a_gradient_that_is_not_finite_is_counted(tmp_path):
    recorded = given(tmp_path, {"bad": torch.tensor([math.nan, math.inf, -math.inf, 3.0, 4.0]), "good": torch.tensor([3.0, 4.0])}, lr=0.0)
    assert math.isnan(recorded.before_clip()[0])
    assert math.isnan(recorded.l2("tensors.bad")[0])
    assert recorded.l2("tensors.good") == [5.0]
    (tensor,) = recorded.tensors
    assert (tensor.name, tensor.nan, tensor.posinf, tensor.neginf, tensor.l2, tensor.numel) == ("tensors.bad", 1, 1, 1, 5.0, 5)
    assert "nonfinite" in recorded.codes()


def test_a_sparse_gradient_is_coalesced(tmp_path):
    model = torch.nn.Module()
    model.table = torch.nn.Embedding(3, 4, sparse=True)
    model.forward = lambda x: {"loss": model.table(x).sum()}
    recorded = record(tmp_path, model=model, dataset=Repeated([{"x": torch.tensor([1, 1])}], 2))
    assert (recorded.before_clip(), recorded.l2("table.weight")) == ([4.0, 4.0], [4.0, 4.0])


def test_a_gradient_without_a_norm_says_why(tmp_path):
    class Ghost(Known):
        """A model with a parameter whose data is nowhere."""

        def __init__(self):
            super().__init__()
            self.ghost = torch.nn.Parameter(torch.empty(2, device="meta"))

    def update(trainer):
        trainer.model.ghost.grad = torch.empty_like(trainer.model.ghost)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    recorded = record(tmp_path, model=Ghost(), steps=1, callbacks=[Install(Update(update))])
    assert recorded.before_clip() == [None]
    assert (recorded.l2("linear.weight"), recorded.l2("ghost")) == ([5.0], [None])
    (tensor,) = recorded.tensors
    assert (tensor.name, tensor.l2) == ("ghost", None)
    assert "meta" in tensor.skipped


# What a script may hand to the clipping call


class ClippingItself(OptimizerProcessor):
    """Clips by torch's own function, with parameters in whatever form a script hands them over."""

    def __init__(self, choose):
        self.choose = choose
        self.gradients = []
        self.returned = []

    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        trainer.train_outputs["loss"].backward()
        self.returned.append(torch.nn.utils.clip_grad_norm_(self.choose(trainer.model), 1.0))
        self.gradients.append(trainer.model.linear.weight.grad.clone())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def exhausted(model):
    parameters = model.parameters()
    list(parameters)
    return parameters


FORMS = {
    "generator": lambda model: model.parameters(),
    "filter": lambda model: filter(lambda parameter: parameter.requires_grad, model.parameters()),
    "list": lambda model: list(model.parameters()),
    "tensor": lambda model: model.linear.weight,
}


def clip_in_form(folder, form, traced):
    processor = ClippingItself(form)
    trainer = build_trainer(folder, steps=2, callbacks=[Install(processor)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with msprobe.testing.capture() if traced else contextlib.nullcontext([]) as records:
            trainer.train()
    empty = [str(warning.message) for warning in caught if "generator" in str(warning.message)]
    return processor, empty, [entry.grad_norm for entry in records if hasattr(entry, "grad_norm")]


@pytest.mark.parametrize("form", FORMS)
def test_clipping_acts_as_without_msprobe_on_parameters_in_any_form(tmp_path, form):
    off, *_ = clip_in_form(tmp_path / "off", FORMS[form], traced=False)
    on, empty, norms = clip_in_form(tmp_path / "on", FORMS[form], traced=True)
    assert [float(value) for value in on.returned] == [5.0, 5.0]
    assert all(torch.equal(left, right) for left, right in zip(off.gradients, on.gradients, strict=True))
    assert float(on.gradients[0].norm()) == pytest.approx(1.0, rel=1e-6)
    assert empty == []
    assert [(norm.before_clip, norm.clip_returned, norm.clipped) for norm in norms] == [(5.0, 5.0, True)] * 2


def test_an_exhausted_generator_keeps_torchs_own_behaviour(tmp_path):
    off, off_warnings, _ = clip_in_form(tmp_path / "off", exhausted, traced=False)
    on, on_warnings, norms = clip_in_form(tmp_path / "on", exhausted, traced=True)
    assert [float(value) for value in on.returned] == [float(value) for value in off.returned] == [0.0, 0.0]
    assert on_warnings == off_warnings
    assert all(torch.equal(left, right) for left, right in zip(off.gradients, on.gradients, strict=True))
    assert [(norm.before_clip, norm.clip_returned, norm.optimizer_params) for norm in norms] == [(None, 0.0, 5.0)] * 2


def test_parts_clipped_one_after_the_other_are_measured_before_the_first(tmp_path):
    def update(trainer):
        for part in trainer.model.tensors.values():
            torch.nn.utils.clip_grad_norm_([part], 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    gradients = {"one": torch.tensor([3.0, 4.0]), "two": torch.tensor([6.0, 8.0])}
    recorded = given(tmp_path, gradients, callbacks=[Install(Update(update))])
    (norm,) = recorded.grad_norms()
    assert norm.before_clip == norm.optimizer_params == pytest.approx(math.sqrt(125), rel=1e-12)
    assert norm.after_clip == norm.optimizer_params_after == pytest.approx(math.sqrt(2), rel=1e-6)
    assert (norm.clip_returned, norm.clipped) == (5.0, True)
    assert (recorded.l2("tensors.one"), recorded.l2("tensors.two")) == ([5.0], [10.0])
