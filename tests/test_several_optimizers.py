"""Several optimizers in one training, and optimizers that come and go: each update carries its own optimizer and norm."""

import pytest
import torch
from modelscope.trainers.hooks.optimizer.base import OptimizerProcessor
from processors import Do, Given, Install, Update, ones, record
from trainings import Known

D = torch.tensor([3.0, 4.0])
G = torch.tensor([6.0, 8.0])


class Adversarial(OptimizerProcessor):
    """Steps a discriminator at every iteration and a generator at every second one, each on a loss of its own.

    The discriminator's backward leaves gradients in the generator too, as where a script forgets to detach; the generator's are cleared
    before its own backward.
    """

    def __init__(self, model, clip=None, scaler=None, scaler_takes=("d", "g")):
        self.model = model
        self.d = torch.optim.SGD([model.tensors.d], lr=0.5)
        self.g = torch.optim.SGD([model.tensors.g], lr=0.25)
        self.clip = clip
        self.scaler = scaler
        self.scaler_takes = scaler_takes

    def step(self, name, loss):
        optimizer = getattr(self, name)
        optimizer.zero_grad()
        takes = self.scaler is not None and name in self.scaler_takes
        (self.scaler.scale(loss) if takes else loss).backward()
        if self.clip and name in self.clip:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        if takes:
            self.scaler.step(optimizer)
        else:
            optimizer.step()

    def backward(self, trainer, loss_keys, cumulative_iters, grad_clip):
        d, g = self.model.tensors.d, self.model.tensors.g
        self.step("d", (d * self.model.gradients["d"]).sum() + g.sum())
        if trainer.iter % 2:
            self.step("g", (g * self.model.gradients["g"]).sum())
        if self.scaler is not None and (trainer.iter % 2 or "d" in self.scaler_takes):
            self.scaler.update()


def adversarial(folder, d=D, g=G, **processor):
    model = Given(d=d, g=g)
    update = Adversarial(model, **processor)
    optimizers = (update.d, torch.optim.lr_scheduler.StepLR(update.d, 1000))
    callbacks = [Install(update)]
    return record(folder, model=model, dataset=ones(4), callbacks=callbacks, trainer_arguments={"optimizers": optimizers})


def norms_of(recorded, optimizer):
    return [update.grad_norm.optimizer_params for step in recorded.steps for update in step.updates if update.optimizer == optimizer]


def test_each_update_has_its_optimizer_and_its_norm(tmp_path):
    recorded = adversarial(tmp_path)
    assert [[update.optimizer for update in step.updates] for step in recorded.steps] == [[0], [0, 1], [0], [0, 1]]
    assert norms_of(recorded, 0) == [5.0] * 4
    assert norms_of(recorded, 1) == [10.0] * 2
    assert all(update.outcome == "done" for step in recorded.steps for update in step.updates)
    assert [step.grad_norm.optimizer for step in recorded.steps] == [0] * 4, "the step's own fields are the trainer's optimizer's"
    assert recorded.end.optimizer_steps == 6


def test_a_parameters_norm_is_the_one_of_its_own_optimizers_update(tmp_path):
    recorded = adversarial(tmp_path)
    assert recorded.l2("tensors.d") == [5.0] * 4
    assert [recorded.l2("tensors.g")[index] for index in (1, 3)] == [10.0, 10.0]


def test_phases_say_whose_they_are(tmp_path):
    recorded = adversarial(tmp_path)
    assert [[phase.optimizer for phase in phases] for phases in recorded.phases("optimizer_step")] == [[0], [0, 1], [0], [0, 1]]
    assert [[phase.optimizer for phase in phases] for phases in recorded.phases("zero_grad")] == [[0], [0, 1], [0], [0, 1]]
    assert [len(phases) for phases in recorded.phases("backward")] == [1, 2, 1, 2]


def test_an_optimizer_that_the_trainer_does_not_know_is_announced_once(tmp_path):
    recorded = adversarial(tmp_path)
    assert [(info.id, info.class_) for info in recorded.model.optimizers] == [(0, "SGD")]
    (event,) = [event for event in recorded.events if event.code == "new_optimizer"]
    assert (event.data["id"], event.data["class"], event.data["groups"][0]["lr"]) == (1, "SGD", 0.25)


def test_clipping_belongs_to_the_optimizer_whose_parameters_it_took(tmp_path):
    recorded = adversarial(tmp_path, clip="d")
    for step in recorded.steps:
        by_optimizer = {update.optimizer: update.grad_norm for update in step.updates}
        assert (by_optimizer[0].before_clip, by_optimizer[0].clipped) == (5.0, True)
        assert by_optimizer[0].optimizer_params_after == pytest.approx(1.0, rel=1e-6)
        if 1 in by_optimizer:
            assert by_optimizer[1].optimizer_params == 10.0
            assert by_optimizer[1].clipped is by_optimizer[1].max_norm is by_optimizer[1].after_clip is None


def test_one_scaler_for_both(tmp_path):
    recorded = adversarial(tmp_path, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert norms_of(recorded, 0) == [5.0] * 4
    assert norms_of(recorded, 1) == [10.0] * 2
    scales = [(update.loss_scale.before, update.loss_scale.after) for step in recorded.steps for update in step.updates]
    assert scales == [(1024.0, 1024.0)] * 6


def test_one_optimizer_skips_and_the_other_does_not(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = adversarial(tmp_path, g=torch.tensor([float("inf"), 8.0]), scaler=scaler)
    outcomes = [[update.outcome for update in step.updates] for step in recorded.steps]
    assert outcomes == [["done"], ["done", "skipped"], ["done"], ["done", "skipped"]]
    assert (recorded.end.optimizer_steps, recorded.end.skipped_steps) == (4, 2)


@pytest.mark.parametrize("clip", [None, "d"], ids=["unclipped", "clipped"])
def test_an_optimizer_without_a_scaler_beside_one_with(tmp_path, clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = adversarial(tmp_path, scaler=scaler, scaler_takes="g", clip=clip)
    assert norms_of(recorded, 0) == [5.0] * 4
    assert norms_of(recorded, 1) == [10.0] * 2
    assert [[update.loss_scale is None for update in step.updates] for step in recorded.steps] == [[True], [True, False]] * 2
    assert recorded.l2("tensors.d") == [5.0] * 4


def test_an_optimizer_replaced_in_mid_run_is_followed(tmp_path):
    def replace(trainer):
        trainer.optimizer = torch.optim.Adam(trainer.model.parameters(), lr=0.01)

    recorded = record(tmp_path, steps=4, callbacks=[Do(replace, 2)], options={"grad_clip": {"max_norm": 1.0}})
    assert [[update.optimizer for update in step.updates] for step in recorded.steps] == [[0], [0], [1], [1]]
    assert recorded.before_clip() == [5.0] * 4
    assert recorded.outcomes() == ["done"] * 4
    assert [step.lr for step in recorded.steps] == [[0.1], [0.1], [0.01], [0.01]]
    for name in ("optimizer_step", "zero_grad"):
        assert [[phase.optimizer for phase in phases] for phases in recorded.phases(name)] == [[0], [0], [1], [1]]
    (event,) = [event for event in recorded.events if event.code == "new_optimizer"]
    assert (event.step, event.data["class"]) == (recorded.steps[2].step, "Adam")


def test_two_updates_by_one_optimizer_in_one_step(tmp_path):
    def update(trainer):
        trainer.optimizer.step()
        trainer.model.linear.weight.grad *= 2
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    recorded = record(tmp_path, callbacks=[Install(Update(update))])
    assert norms_of(recorded, 0) == [5.0, 10.0] * 3
    assert recorded.before_clip() == [5.0] * 3
    assert recorded.end.optimizer_steps == 6


def test_an_optimizer_of_parameters_outside_the_model(tmp_path):
    outside = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([outside], lr=0.1)

    def update(trainer):
        (outside * G).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    recorded = record(tmp_path, model=Known(), callbacks=[Install(Update(update))])
    assert norms_of(recorded, 1) == [10.0] * 3
    assert norms_of(recorded, 0) == [5.0] * 3
    assert recorded.before_clip() == [5.0] * 3
