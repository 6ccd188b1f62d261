"""Modules: which calls of forward are recorded, and that the hooks on them stay out of the user's way."""

import contextlib
import copy
import io
import itertools

import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.trainer import EpochBasedTrainer
from recorded import events_of, of_kind, steps_of
from trainings import Known, build_trainer, evaluating, three_four

import msprobe.testing

STEPS = 3


class Parts(torch.nn.Module):
    """Children of the kinds that real models have: one called twice, one frozen, one entered by a method, one never called."""

    def __init__(self):
        super().__init__()
        self.twice = torch.nn.Identity()
        self.block = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(torch.nn.Identity()))
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.through_method = Entered()
        self.never = torch.nn.Identity()
        self.linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        with torch.no_grad():
            self.frozen(x)
        self.through_method.encode(x)
        return {"loss": self.linear(self.twice(self.block(self.twice(x)))).sum()}


class Entered(torch.nn.Module):
    """A module that is used through a method, so that hooks on it never fire."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Identity()

    def encode(self, x):
        return self.encoder(x)


CALLS = [("frozen", 0), ("through_method.encoder", 0), ("twice", 0), ("block", 0), ("twice", 1), ("linear", 0)]


class CallsTheModel(EpochBasedTrainer):
    """Enters the model by calling it, and not by `model.forward` as ModelScope does."""

    def train_step(self, model, inputs):
        model.train()
        self.train_outputs = model(**inputs)
        self.log_buffer.update({"loss": self.train_outputs["loss"].item()})


def calls_of(records, step):
    return [(record.name, record.call) for record in of_kind(records, "module") if record.step == step]


def test_the_children_that_are_called_are_recorded_with_the_number_of_the_call(tmp_path):
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=Parts()).train()
    for step in range(STEPS):
        assert calls_of(records, step) == CALLS
        modules = [record for record in of_kind(records, "module") if record.step == step]
        assert [module.seq for module in modules] == sorted(module.seq for module in modules)
        assert all(earlier.start_ns + earlier.host_ns <= later.start_ns for earlier, later in itertools.pairwise(modules))


def test_calling_the_model_gives_the_same_records_as_calling_its_forward(tmp_path):
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=Parts(), trainer_class=CallsTheModel).train()
    assert [calls_of(records, step) for step in range(STEPS)] == [CALLS] * STEPS


def test_an_evaluation_records_no_modules(tmp_path):
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=Parts(), **evaluating(by_epoch=False, interval=1)).train()
    assert [calls_of(records, step) for step in range(STEPS)] == [CALLS] * STEPS


class Averages(Hook):
    """Keeps a copy of the model, as an exponential moving average does, and uses and trains it in every iteration."""

    def __init__(self):
        self.copies = []

    def before_train_iter(self, trainer):
        if trainer.iter == 1:
            self.copies.append(copy.deepcopy(trainer.model))

    def after_train_iter(self, trainer):
        for model in self.copies:
            model(torch.ones(1, 2))["loss"].backward()


class UsesTheCopy(EpochBasedTrainer):
    copies = ()

    def train_step(self, model, inputs):
        super().train_step(model, inputs)
        for copied in self.copies:
            copied.forward(**inputs)["loss"].backward()


def test_a_copy_of_the_model_does_not_report_and_trains_on(tmp_path):
    averages = Averages()
    trainer = build_trainer(tmp_path, model=Parts(), trainer_class=UsesTheCopy, callbacks=[averages])
    trainer.copies = averages.copies
    with msprobe.testing.capture() as records:
        trainer.train()
    assert [calls_of(records, step) for step in range(STEPS)] == [CALLS] * STEPS
    (copied,) = averages.copies
    # Twice an iteration, in the two that it lived through: [3, 4] from the batch and [1, 1] from the hook.
    assert copied.linear.weight.grad.tolist() == [[8.0, 10.0]]
    assert copied.state_dict().keys() == Parts().state_dict().keys()
    torch.save(copied, io.BytesIO())
    assert events_of(records, "probe_error") == []


def test_a_model_saved_whole_loads_where_msprobe_is_not_installed(zygote, tmp_path):
    off = zygote.run("save_whole_model.py", "save", folder=tmp_path / "off").check()
    on = zygote.run("save_whole_model.py", "save", folder=tmp_path / "on", trace=True).check()
    assert len([record for record in on.records() if record["kind"] == "module"]) == STEPS
    (tmp_path / "load").mkdir()
    loaded = []
    for run in (off, on):
        (tmp_path / "load" / "model.pt").write_bytes((run.folder / "model.pt").read_bytes())
        loaded.append(zygote.run("save_whole_model.py", "load", folder=tmp_path / "load").check().stdout)
    assert loaded[0] == loaded[1]
    assert "['linear.weight']" in loaded[0]


def test_a_parameter_and_module_name_has_no_wrapper_in_it(tmp_path):
    class Wrapped(Known):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Module()
            self.inner.module = torch.nn.Identity()

        def forward(self, x):
            return super().forward(self.inner.module(x))

    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=Wrapped()).train()
    # A child that somebody named `module` is no wrapper.
    assert calls_of(records, 0) == [("inner.module", 0), ("linear", 0)]
    assert [parameter.name for parameter in of_kind(records, "model")[0].parameters] == ["linear.weight"]


def test_a_compiled_child_is_left_alone(tmp_path):
    model = Parts()
    model.twice._compiled_call_impl = model.twice._call_impl  # what torch's `module.compile()` leaves behind
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=model).train()
    assert calls_of(records, 0) == [call for call in CALLS if call[0] != "twice"]


def test_checkpointed_children_run_again_in_backward_without_counting_as_forward(tmp_path):
    class Recomputes(Known):
        def __init__(self):
            super().__init__()
            self.block = torch.nn.Sequential(torch.nn.Identity())

        def forward(self, x):
            x = x.clone().requires_grad_()
            return {"loss": self.linear(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)).sum()}

    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=Recomputes()).train()
    forward = [(record.name, record.call) for record in of_kind(records, "module") if record.step == 1 and not record.recompute]
    assert forward == [("block", 0), ("linear", 0)]
    assert len(steps_of(records)) == STEPS


def test_hooks_of_the_users_own_see_what_they_saw(tmp_path):
    def seen_by_hooks(folder, context):
        seen = []
        model = Parts()
        model.linear.register_forward_hook(lambda module, inputs, output: seen.append(output.tolist()))
        model.linear.register_full_backward_hook(lambda module, into, out: seen.append([gradient.tolist() for gradient in out]))
        trainer = build_trainer(folder, model=model, dataset=three_four(STEPS))
        with context:
            trainer.train()
        return seen

    alone = seen_by_hooks(tmp_path / "off", contextlib.nullcontext())
    assert seen_by_hooks(tmp_path / "on", msprobe.testing.capture()) == alone
    assert len(alone) == 2 * STEPS
