"""Trainings that do things in unusual ways: msprobe lets each of them run as it does alone, and records what there is."""

import copy
import functools
import gc
import threading
import time
import weakref

import numpy
import pytest
import torch
from modelscope.trainers.trainer import EpochBasedTrainer
from processors import Do, Install, Update
from trainings import Known, Repeated, build_trainer

from msprobe.testing import capture


def steps_of(records):
    return [record for record in records if type(record).__name__ == "StepRecord"]


def events_of(records, code):
    return [record for record in records if type(record).__name__ == "EventRecord" and record.code == code]


def weight_after(folder, **settings):
    """Train `Known` as told without msprobe and return the final weight."""
    trainer = build_trainer(folder, **settings)
    trainer.train()
    return trainer.model.linear.weight.detach().clone()


def plain_update(trainer):
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def test_clipping_called_by_keyword_is_seen_and_clips(tmp_path):
    def update(trainer):
        torch.nn.utils.clip_grad_norm_(parameters=trainer.model.parameters(), max_norm=1.0)
        plain_update(trainer)

    with capture() as records:
        trainer = build_trainer(tmp_path, callbacks=[Install(Update(update))])
        trainer.train()
    assert torch.equal(trainer.model.linear.weight, weight_after(tmp_path / "off", callbacks=[Install(Update(update))]))
    assert [step.grad_norm.before_clip for step in steps_of(records)] == pytest.approx([5.0] * 3)
    assert [step.grad_norm.max_norm for step in steps_of(records)] == [1.0] * 3


class TupleTrainer(EpochBasedTrainer):
    """Keeps its outputs as a tuple."""

    def train_step(self, model, inputs):
        super().train_step(model, inputs)
        self.train_outputs = (self.train_outputs["loss"],)


class TupleProcessor(Update):
    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        trainer.train_outputs[0].backward()
        self.update(trainer)


def test_outputs_that_are_no_dict_have_no_losses_and_train_on(tmp_path):
    with capture() as records:
        build_trainer(tmp_path, trainer_class=TupleTrainer, callbacks=[Install(TupleProcessor(plain_update))]).train()
    assert [step.loss for step in steps_of(records)] == [{}] * 3
    assert [step.grad_norm.before_clip for step in steps_of(records)] == pytest.approx([5.0] * 3)


class Counting(torch.optim.SGD):
    """An optimizer whose zero_grad says how many parameters it cleared."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        return sum(len(group["params"]) for group in self.param_groups)


class Partial(torch.optim.SGD):
    """An optimizer whose zero_grad is a descriptor of another kind."""

    zero_grad = functools.partialmethod(torch.optim.SGD.zero_grad, set_to_none=True)


@pytest.mark.parametrize(("optimizer_class", "answer"), [(Counting, 1), (Partial, None)])
def test_an_overridden_zero_grad_answers_as_it_does_alone(tmp_path, optimizer_class, answer):
    answers = []

    def update(trainer):
        trainer.optimizer.step()
        answers.append(trainer.optimizer.zero_grad())

    model = Known()
    own = (optimizer_class(model.parameters(), lr=0.1), None)
    with capture() as records:
        build_trainer(tmp_path, model=model, callbacks=[Install(Update(update))], trainer_arguments={"optimizers": own}).train()
    assert answers == [answer] * 3
    assert all("zero_grad" in [phase.name for phase in step.phases] for step in steps_of(records))


class OwnScaler:
    """A scaler of a script's own, with just the methods that its processor calls."""

    def __init__(self):
        self._per_optimizer_states = {}

    def scale(self, loss):
        return loss * 2.0

    def step(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 2.0
        optimizer.step()

    def update(self):
        pass


def test_a_scaler_of_the_scripts_own_works_as_alone(tmp_path):
    scaler = OwnScaler()

    def update(trainer):
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    with capture() as records:
        trainer = build_trainer(tmp_path, callbacks=[Install(Update(update, scaler))])
        trainer.train()
    assert torch.equal(trainer.model.linear.weight, weight_after(tmp_path / "off", callbacks=[Install(Update(update, scaler))]))
    assert len(steps_of(records)) == 3


def test_an_optimizer_that_was_replaced_is_not_kept_alive(tmp_path):
    alive = []

    def replace(trainer):
        gc.collect()
        alive.append(sum(reference() is not None for reference in old))
        old.append(weakref.ref(trainer.optimizer))
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    old = []
    with capture() as records:
        build_trainer(tmp_path, steps=5, callbacks=[Do(replace, 1, 2, 3, 4)]).train()
    assert alive[-1] <= 1  # the one of the first step, which the scheduler holds
    assert len(events_of(records, "new_optimizer")) == 4


class SkipsFailures(EpochBasedTrainer):
    """Goes on with the next batch when one does not fit."""

    def train_step(self, model, inputs):
        if self.iter in (1, 3):
            raise torch.OutOfMemoryError("too large")
        super().train_step(model, inputs)

    def train_loop(self, data_loader):
        self.invoke_hook("before_run")
        self.invoke_hook("before_train_epoch")
        for index, batch in enumerate(data_loader):
            self.data_batch, self._inner_iter = batch, index
            try:
                self.invoke_hook("before_train_iter")
                self.train_step(self.model, batch)
                self.invoke_hook("after_train_iter")
            except torch.OutOfMemoryError:
                pass
            self._iter += 1
        self.invoke_hook("after_train_epoch")
        self.invoke_hook("after_run")


def test_an_iteration_that_the_script_skips_is_a_step_broken_off(tmp_path):
    with capture() as records:
        build_trainer(tmp_path, steps=5, trainer_class=SkipsFailures).train()
    assert [(step.iter, step.complete) for step in steps_of(records)] == [(0, True), (1, False), (2, True), (3, False), (4, True)]
    (end,) = [record for record in records if type(record).__name__ == "EndRecord"]
    assert end.steps == 3


class Recursive(torch.nn.Module):
    """Calls itself twice, for 20 ms each time."""

    def forward(self, x, depth=2):
        time.sleep(0.02)
        return self(x, depth - 1) if depth else x


class Shares(Known):
    """Has a child that runs on its own and inside another one."""

    def __init__(self):
        super().__init__()
        self.recursive = Recursive()
        self.inner = torch.nn.Identity()
        self.outer = torch.nn.Sequential(self.inner)

    def forward(self, x):
        return super().forward(self.outer(self.inner(self.recursive(x))))


def test_a_module_that_calls_itself_is_timed_as_a_whole_at_every_step(tmp_path):
    with capture() as records:
        build_trainer(tmp_path, model=Shares()).train()
    modules = [record for record in records if type(record).__name__ == "ModuleRecord"]
    for step in range(3):
        (recursive,) = [module for module in modules if module.step == step and module.name == "recursive"]
        assert recursive.host_ns >= 60e6
        assert {module.name for module in modules if module.step == step} == {"recursive", "inner", "outer", "linear"}


def test_numbers_of_numpy_in_an_optimizer_are_recorded_as_numbers(tmp_path):
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float64(0.1), weight_decay=numpy.float64(0.5))
    with capture() as records:
        build_trainer(tmp_path, model=model, trainer_arguments={"optimizers": (optimizer, None)}).train()
    (described,) = [record for record in records if type(record).__name__ == "ModelRecord"]
    (group,) = described.optimizers[0].groups
    assert (group.lr, group.options["weight_decay"]) == (0.1, 0.5)


def test_what_the_scripts_hooks_copy_or_script_of_the_model_carries_no_hook(tmp_path):
    seen = []

    def look(trainer):
        twin = copy.deepcopy(trainer.model)
        torch.jit.script(twin.linear)
        seen.append([len(module._forward_hooks) for model in (trainer.model, twin) for module in model.modules()])

    with capture(tensors=["module.output"]):
        build_trainer(tmp_path, callbacks=[Do(look, 0, 1, 2)]).train()
    assert seen == [[0] * 4] * 3


class ByName(torch.nn.Module):
    """A model with a child of TorchScript's."""

    def __init__(self):
        super().__init__()
        self.scripted = torch.jit.script(torch.nn.ReLU())
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.linear(self.scripted(x)).sum()}


def test_a_child_of_torchscript_is_passed_over(tmp_path):
    with capture(tensors=["module.output"]) as records:
        build_trainer(tmp_path, model=ByName(), dataset=Repeated([{"x": torch.ones(2)}], 2)).train()
    assert {record.name for record in records if type(record).__name__ == "ModuleRecord"} == {"linear"}


def test_a_training_in_another_thread_goes_on_unrecorded(tmp_path, capfd):
    """What is watched belongs to the whole process, so that one training at a time is recorded."""
    results = []

    def train_beside(trainer):
        other = build_trainer(tmp_path / "other", steps=4)
        thread = threading.Thread(target=other.train)
        thread.start()
        thread.join()
        results.append(other.model.linear.weight.detach().clone())

    with capture() as records:
        build_trainer(tmp_path / "one", callbacks=[Do(train_beside, 1)]).train()
    assert len(steps_of(records)) == 3
    assert torch.equal(results[0], weight_after(tmp_path / "off", steps=4))
    assert "in another thread" in capfd.readouterr().err
