"""What a step says of its update: outcome, loss, learning rate, accumulation, and what clearing the gradients looked like."""

import contextlib
import itertools
import json
import warnings

import pytest
import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerProcessor
from processors import Given, Install, Update, ones, record
from trainings import Known, Repeated, build_trainer

import msprobe


def test_micro_steps_have_no_update_and_the_rest_is_counted(tmp_path):
    recorded = record(tmp_path, steps=5, options={"cumulative_iters": 2})
    assert recorded.outcomes() == ["none", "done", "none", "done", "none"]
    assert recorded.grad_norms()[0] is None
    assert [(step.accumulation.index, step.accumulation.size) for step in recorded.steps] == [(0, 2), (1, 2), (0, 2), (1, 2), (0, 2)]
    end = recorded.end
    assert (end.steps, end.optimizer_steps, end.skipped_steps, end.unapplied_micro_steps) == (5, 2, 0, 1)


def test_a_whole_number_of_windows_leaves_nothing_unapplied(tmp_path):
    end = record(tmp_path, steps=6, options={"cumulative_iters": 3}).end
    assert (end.optimizer_steps, end.unapplied_micro_steps) == (2, 0)


class Two(torch.nn.Module):
    """A model whose loss is 2.0 at any weight, with a gradient of zeros; it can hold a second loss, of 3.0."""

    def __init__(self, second=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.second = second

    def forward(self, x):
        nothing = (self.weight * 0).sum()
        return {"loss": 2.0 + nothing, **({self.second: 3.0 + (self.weight * 0).sum()} if self.second else {})}


def test_the_loss_is_the_models_and_not_the_divided_one(tmp_path):
    recorded = record(tmp_path, model=Two(), steps=8, options={"cumulative_iters": 4})
    assert [step.loss for step in recorded.steps] == [{"loss": 2.0}] * 8


def test_every_loss_key_is_recorded(tmp_path):
    recorded = record(tmp_path, model=Two("other"), options={"loss_keys": ["loss", "other"]})
    assert [step.loss for step in recorded.steps] == [{"loss": 2.0, "other": 3.0}] * 3
    assert [[phase.loss_key for phase in phases] for phases in recorded.phases("backward")] == [["loss", "other"]] * 3


def test_the_learning_rate_is_the_one_that_the_update_used(tmp_path):
    class Rates(OptimizerProcessor):
        """Notes the rate at the moment of each update."""

        def __init__(self):
            self.seen = []

        def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
            super().backward(trainer, loss_keys, cumulative_iters, grad_clip)
            self.seen.append(trainer.optimizer.param_groups[0]["lr"])

    rates = Rates()
    recorded = record(
        tmp_path,
        steps=6,
        callbacks=[Install(rates)],
        options={"cumulative_iters": 2},
        scheduler={"type": "StepLR", "step_size": 1, "gamma": 0.5, "options": {"by_epoch": False}},
    )
    assert [step.lr for step in recorded.steps] == [[rate] for rate in rates.seen]
    at_updates = [step.lr[0] for step in recorded.steps if step.optimizer_step == "done"]
    assert at_updates == pytest.approx([0.1, 0.025, 0.00625], rel=1e-12)


def test_every_group_has_its_learning_rate(tmp_path):
    model = Given(one=torch.tensor([3.0, 4.0]), two=torch.tensor([6.0, 8.0]))
    optimizer = torch.optim.SGD(
        [{"params": [model.tensors.one], "lr": 0.5}, {"params": [model.tensors.two], "lr": torch.tensor(0.25)}], lr=1.0
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    recorded = record(tmp_path, model=model, dataset=ones(1), trainer_arguments={"optimizers": (optimizer, scheduler)})
    assert [step.lr for step in recorded.steps] == [[0.5, 0.25]]


# Learning-rate schedulers and their warnings


class WrongOrder(Hook):
    """Steps the scheduler before the optimizer, once."""

    PRIORITY = 0

    def after_train_iter(self, trainer):
        if trainer.iter == 0:
            trainer.lr_scheduler.step()


def schedule(folder, created, traced, callbacks=None):
    """Train with a scheduler made before or after msprobe was enabled; return the learning rates, weights and warnings."""
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        if traced and created == "after":
            stack.enter_context(msprobe.testing.capture())
        model = Known()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if traced and created == "before":
            stack.enter_context(msprobe.testing.capture())
        trainer = build_trainer(
            folder, model=model, trainer_arguments={"optimizers": (optimizer, scheduler)}, callbacks=callbacks, epochs=2
        )
        trainer.train()
    about = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message) or "overridden" in str(warning.message)]
    return optimizer.param_groups[0]["lr"], model.linear.weight.detach(), about, optimizer


@pytest.mark.parametrize("created", ["before", "after"])
def test_no_scheduler_warning_is_added(tmp_path, created):
    rate_off, weight_off, warnings_off, _ = schedule(tmp_path / "off", created, traced=False)
    rate_on, weight_on, warnings_on, optimizer = schedule(tmp_path / "on", created, traced=True)
    assert warnings_off == warnings_on == []
    assert rate_on == rate_off == 0.1 * 0.25
    assert torch.equal(weight_on, weight_off)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("created", ["before", "after"])
def test_a_scheduler_in_the_wrong_order_still_warns(tmp_path, created):
    *_, warnings_off, _ = schedule(tmp_path / "off", created, traced=False, callbacks=[WrongOrder()])
    *_, warnings_on, _ = schedule(tmp_path / "on", created, traced=True, callbacks=[WrongOrder()])
    assert len(warnings_on) == 1
    assert warnings_on == warnings_off


# Clearing the gradients


class Clearing(OptimizerProcessor):
    """Clears gradients at the start or the end of its backward, by the optimizer or by the model."""

    def __init__(self, when, whose, set_to_none):
        self.when = when
        self.whose = whose
        self.set_to_none = set_to_none
        self.left = []

    def clear(self, trainer, when):
        if when == self.when:
            getattr(trainer, self.whose).zero_grad(set_to_none=self.set_to_none)

    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        self.clear(trainer, "start")
        trainer.train_outputs["loss"].backward()
        trainer.optimizer.step()
        self.clear(trainer, "end")
        gradient = trainer.model.linear.weight.grad
        self.left.append(None if gradient is None else gradient.tolist())


@pytest.mark.parametrize(("when", "whose", "set_to_none"), [*itertools.product(["start", "end"], ["optimizer", "model"], [True, False])])
def test_the_gradient_is_read_before_it_is_cleared(tmp_path, when, whose, set_to_none):
    processor = Clearing(when, whose, set_to_none)
    recorded = record(tmp_path, callbacks=[Install(processor)])
    assert recorded.before_clip() == [5.0] * 3
    assert recorded.l2("linear.weight") == [5.0] * 3
    expected = [[3.0, 4.0]] if when == "start" else None if set_to_none else [[0.0, 0.0]]
    assert processor.left == [expected] * 3
    for phases in recorded.phases("zero_grad"):
        (phase,) = phases
        assert phase.set_to_none is set_to_none
        assert phase.optimizer == (0 if whose == "optimizer" else None)


def test_clearing_says_to_none_where_the_call_does_not(tmp_path):
    assert [[phase.set_to_none for phase in phases] for phases in record(tmp_path).phases("zero_grad")] == [[True]] * 3


# Steps that no call of `optimizer.step` makes, and steps of other kinds


def test_a_closure_is_called_as_often_as_without_msprobe(tmp_path):
    def train(folder, traced):
        calls = []

        def update(trainer):
            def closure():
                calls.append(1)
                loss = (trainer.model.linear.weight - torch.tensor([[1.0, 2.0]])).square().sum()
                trainer.optimizer.zero_grad()
                loss.backward()
                return loss

            calls.append(float(trainer.optimizer.step(closure).detach()))

        model = Known()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        arguments = {"optimizers": (optimizer, scheduler)}
        trainer = build_trainer(folder, model=model, steps=2, trainer_arguments=arguments, callbacks=[Install(Update(update))])
        with msprobe.testing.capture() if traced else contextlib.nullcontext([]) as records:
            trainer.train()
        return calls, model.linear.weight.detach(), [entry for entry in records if hasattr(entry, "optimizer_step")]

    calls_off, weight_off, _ = train(tmp_path / "off", traced=False)
    calls_on, weight_on, steps = train(tmp_path / "on", traced=True)
    assert calls_on == calls_off
    assert torch.equal(weight_on, weight_off)
    assert [step.optimizer_step for step in steps] == ["done", "done"]
    assert [sum(phase.name == "optimizer_step" for phase in step.phases) for step in steps] == [1, 1]


def test_a_nonfinite_loss_is_recorded_and_said_once(tmp_path):
    model = Known()
    model.forward = lambda x: {"loss": model.linear(x).sum() * float(x[0, 0])}
    examples = [{"x": torch.tensor(values)} for values in ([3.0, 4.0], [float("nan"), 4.0], [float("nan"), 4.0])]
    recorded = record(tmp_path, model=model, dataset=Repeated(examples))
    losses = [step.loss["loss"] for step in recorded.steps]
    assert losses[0] == 0.0
    assert losses[1] != losses[1]
    said = [event for event in recorded.events if event.code == "nonfinite" and event.data["what"] == "loss"]
    assert [event.step for event in said] == [recorded.steps[1].step]


def test_accumulation_with_a_rest_is_bit_identical(on_and_off):
    _, on = on_and_off("train_known.py", json.dumps({"steps": 5, "optimizer": "Adam", "options": {"cumulative_iters": 2}}))
    steps = [entry for entry in on.records() if entry["kind"] == "step"]
    assert [step["optimizer_step"] for step in steps] == ["none", "done", "none", "done", "none"]
