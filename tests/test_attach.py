"""Attaching: what is put in for a training comes out again, whatever happens, and what is recorded is each training once."""

import copy
import importlib
import pickle
import re

import pytest
import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook, OptimizerProcessor
from modelscope.trainers.trainer import EpochBasedTrainer
from recorded import events_of, of_kind, steps_of
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizer_module
from trainings import Known, Repeated, build_trainer, enable_amp_on_cpu, three_four

import msprobe.testing
from msprobe.host import seams

SCALER_METHODS = ("unscale_", "step", "update")


class OwnSGD(torch.optim.SGD):
    """An optimizer whose class has its own zero_grad."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)


def own_optimizer(model):
    optimizer = OwnSGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1000)


def rows(trainer):
    """Return the state of every row of the table in host/seams.py, in a form that compares by identity or plain value."""
    modules = [module for module in trainer.model.modules() if module is not trainer.model]
    processors = [hook.processor for hook in trainer._hooks if isinstance(hook, OptimizerHook)]
    hook_dicts = [name for name in vars(torch.nn.Module()) if "hook" in name]
    parameter_hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {
        "`EpochBasedTrainer` `train`": vars(EpochBasedTrainer)["train"],
        "the trainer `invoke_hook` (instance)": sorted(vars(trainer)),
        "the trainer `_hooks` (one `TraceHook` more)": [type(hook).__name__ for hook in trainer._hooks],
        "each `OptimizerHook` `processor` (wrapped)": [(type(processor), sorted(vars(processor))) for processor in processors],
        "`torch.optim.Optimizer`, `torch.nn.Module` `zero_grad`": (
            vars(torch.optim.Optimizer)["zero_grad"],
            vars(torch.nn.Module)["zero_grad"],
            sorted(vars(trainer.optimizer)),
        ),
        "the optimizer's classes that override it `zero_grad`": vars(OwnSGD)["zero_grad"],
        "`torch.optim.optimizer` global step pre- and post-hook": [
            dict(optimizer_module._global_optimizer_pre_hooks),
            dict(optimizer_module._global_optimizer_post_hooks),
            dict(trainer.optimizer._optimizer_step_pre_hooks),
            dict(trainer.optimizer._optimizer_step_post_hooks),
        ],
        "`torch.autograd` `backward`": torch.autograd.backward,
        "`OptimizerProcessor` `clip_grads`": vars(OptimizerProcessor)["clip_grads"],
        "`torch.nn.utils`, `torch.nn.utils.clip_grad` `clip_grad_norm_`": [torch.nn.utils.clip_grad_norm_, clip_grad.clip_grad_norm_],
        "the scaler's classes `unscale_`, `step`, `update`": [vars(torch.amp.GradScaler)[name] for name in SCALER_METHODS],
        "`torch.nn.functional` the loss functions": {name: value for name, value in vars(torch.nn.functional).items() if callable(value)},
        "the model's children forward hooks": [dict(getattr(module, name) or {}) for module in modules for name in hook_dicts]
        + [getattr(parameter, name, None) for parameter in trainer.model.parameters() for name in parameter_hooks],
    }


def table_rows():
    """Return the first two columns of the table that says what is ever touched."""
    lines = [line for line in seams.__doc__.splitlines() if line.startswith("| ")][2:]
    return [" ".join(cell.strip() for cell in line.strip("|").split("|")[:2]) for line in lines]


def test_every_row_of_the_table_is_looked_at(tmp_path):
    trainer = build_trainer(tmp_path)
    trainer.train()
    assert sorted(rows(trainer)) == sorted(table_rows())


class Failing(Hook):
    """Raises, or does something else, at a stage of an iteration."""

    def __init__(self, stage, act, iteration=1):
        self.iteration = iteration
        self.act = act
        setattr(self, stage, self.run)

    def run(self, trainer):
        if trainer.iter == self.iteration:
            self.act(trainer)


class Planted(RuntimeError):
    pass


def fail(*unused, **unused_too):
    raise Planted("planted")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise Planted("planted")


class FailingModel(Known):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        if self.place == "forward":
            fail()
        output = self.linear(x)
        return {"loss": (FailsInBackward.apply(output) if self.place == "backward" else output).sum()}


def failing_settings(place):
    """Return settings with which a training raises `Planted` at that place, in its second iteration."""
    model = FailingModel(None)
    settings = {"model": model, "options": {"grad_clip": {"max_norm": 1.0}}}

    def arm(trainer):
        model.place = place
        if place == "optimizer_step":
            trainer.optimizer.register_step_pre_hook(fail)

    hook = Failing("after_train_iter" if place == "hook" else "before_train_iter", fail if place == "hook" else arm)
    return {**settings, "callbacks": [hook]}


PLACES = ["forward", "backward", "optimizer_step", "hook"]


@pytest.fixture
def amp(monkeypatch):
    from torch.cuda import amp

    monkeypatch.setattr(amp, "GradScaler", amp.GradScaler)  # put back after the test
    monkeypatch.setattr(amp, "autocast", amp.autocast)
    enable_amp_on_cpu()


SETTINGS = {
    "base": lambda: {"options": {"grad_clip": {"max_norm": 1.0}}},
    "amp": lambda: {"options": {"grad_clip": {"max_norm": 1.0}}, "trainer_arguments": {"use_fp16": True}},
    "own-optimizer": lambda: {"model": (model := Known()), "trainer_arguments": {"optimizers": own_optimizer(model)}},
}


@pytest.mark.usefixtures("amp")
@pytest.mark.parametrize("settings", SETTINGS)
def test_after_train_everything_is_as_without_msprobe(settings, tmp_path):
    untraced = build_trainer(tmp_path / "off", **SETTINGS[settings]())
    untraced.train()
    without = rows(untraced)
    trainer = build_trainer(tmp_path / "on", **SETTINGS[settings]())
    during = []
    trainer.register_hook(Failing("before_train_epoch", lambda trainer: during.append(rows(trainer)), iteration=0))
    with msprobe.testing.capture() as records:
        trainer.train()
        enabled = rows(trainer)
    disabled = rows(trainer)
    assert len(steps_of(records)) == 3
    assert enabled.pop("`EpochBasedTrainer` `train`") is not without["`EpochBasedTrainer` `train`"]
    hooks = "the trainer `_hooks` (one `TraceHook` more)"
    assert "TraceHook" in during[0][hooks]
    assert [name for name in enabled[hooks] if name != "Failing"] == without[hooks]
    for row in enabled.keys() - {hooks}:
        assert enabled[row] == without[row], row
    for row in disabled.keys() - {hooks}:
        assert disabled[row] == without[row], row


@pytest.mark.usefixtures("amp")
def test_while_a_backward_runs_every_row_is_in_place(tmp_path):
    """The tests of removal would also pass if nothing were ever put in."""
    seen = {}

    class LooksInBackward(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            seen.update(rows(trainer))
            return gradient

    in_forward = {}

    class Looked(Known):
        def forward(self, x):
            in_forward.update(rows(trainer))
            return {"loss": LooksInBackward.apply(self.linear(x)).sum()}

    model = Looked()
    trainer = build_trainer(tmp_path, model=model, trainer_arguments={"use_fp16": True, "optimizers": own_optimizer(model)})
    with msprobe.testing.capture():
        trainer.train()
    after = rows(trainer)
    # The model's children carry hooks only while forward runs, and the loss functions are watched only in that of a diffusion model.
    only_in_forward = ["`torch.nn.functional` the loss functions", "the model's children forward hooks"]
    assert [row for row in after if seen[row] == after[row]] == only_in_forward
    assert in_forward[only_in_forward[1]] != after[only_in_forward[1]]


@pytest.mark.parametrize("place", PLACES)
def test_after_an_exception_everything_is_as_without_msprobe(place, tmp_path):
    untraced = build_trainer(tmp_path / "off", **failing_settings(place))
    with pytest.raises(Planted):
        untraced.train()
    without = rows(untraced)
    trainer = build_trainer(tmp_path / "on", **failing_settings(place))
    with msprobe.testing.capture() as records, pytest.raises(Planted):
        trainer.train()
    after = rows(trainer)
    if place == "optimizer_step":  # the planted hook stays, and is another object in each
        for found in (without, after):
            assert [list(entry.values()) for entry in found.pop("`torch.optim.optimizer` global step pre- and post-hook")] == [
                [],
                [],
                [fail],
                [],
            ]
    assert after == without
    assert [step.complete for step in steps_of(records)] == [True, False]


# Enabling and disabling


class CountsForward(Known):
    def __init__(self):
        super().__init__()
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return super().forward(x)


def test_enabling_more_than_once_records_once(tmp_path):
    with msprobe.testing.capture() as records:
        msprobe.enable()
        trainer = build_trainer(tmp_path, model=CountsForward())
        msprobe.enable()
        importlib.reload(msprobe)
        msprobe.enable()
        trainer.train()
        msprobe.disable()
        build_trainer(tmp_path / "unseen").train()
    assert [step.step for step in steps_of(records)] == [0, 1, 2]
    assert trainer.model.forwards == 3
    assert len(of_kind(records, "module")) == 3


def test_enabling_again_after_disabling_records_the_next_training(tmp_path):
    with msprobe.testing.capture() as first:
        assert msprobe.is_enabled()
        build_trainer(tmp_path / "one").train()
        msprobe.disable()
        assert not msprobe.is_enabled()
        build_trainer(tmp_path / "unseen").train()
    with msprobe.testing.capture() as second:
        build_trainer(tmp_path / "two", steps=2).train()
    assert (len(steps_of(first)), len(steps_of(second))) == (3, 2)
    assert not msprobe.is_enabled()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_trainer_may_be_built_before_or_after_enabling(moment, tmp_path):
    trainer = build_trainer(tmp_path) if moment == "before" else None
    with msprobe.testing.capture() as records:
        (trainer or build_trainer(tmp_path)).train()
    assert len(steps_of(records)) == 3


def test_steps_of_several_trainers_never_repeat(tmp_path):
    with msprobe.testing.capture() as records:
        for number in range(3):
            build_trainer(tmp_path / str(number), steps=2).train()
    assert [(step.train, step.step, step.iter) for step in steps_of(records)] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 2, 0),
        (1, 3, 1),
        (2, 4, 0),
        (2, 5, 1),
    ]
    assert [model.train for model in of_kind(records, "model")] == [0, 1, 2]
    assert [(end.train, end.steps) for end in of_kind(records, "end")] == [(0, 2), (1, 2), (2, 2)]


def test_enabling_elsewhere_in_mid_training_takes_effect_with_the_next(tmp_path):
    def move(trainer):
        msprobe.enable(run_dir=tmp_path / "other" / "moved")

    with msprobe.testing.capture() as records:
        build_trainer(tmp_path / "one", callbacks=[Failing("after_train_iter", move)]).train()
        build_trainer(tmp_path / "two", steps=2).train()
    assert len(steps_of(records)) == 3
    assert of_kind(records, "end")[0].reason == "finished"
    assert len(list(msprobe.read(tmp_path / "other" / "moved").steps())) == 2


def test_a_setting_that_cannot_be_had_leaves_the_running_trace_as_it_is(tmp_path):
    (tmp_path / "file").touch()
    with msprobe.testing.capture() as records:
        with pytest.raises(msprobe.UsageError):
            msprobe.enable(run_dir=tmp_path / "file" / "below")
        build_trainer(tmp_path / "one").train()
    assert len(steps_of(records)) == 3


def twice_trained(folder):
    trainer = build_trainer(folder)
    trainer.train()
    trainer._epoch = 0
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    return caught.value


def test_modelscopes_own_error_at_a_second_train_reaches_the_user(tmp_path):
    # ModelScope gives the trainer a second OptimizerHook, and its backward finds the graph gone.
    alone = twice_trained(tmp_path / "off")
    with msprobe.testing.capture() as records:
        traced = twice_trained(tmp_path / "on")
    assert "backward through the graph a second time" in str(alone)
    assert (type(traced), str(traced)) == (type(alone), str(alone))
    assert [(end.train, end.reason) for end in of_kind(records, "end")] == [(0, "finished"), (1, "exception")]


def weights_of(trainer):
    return trainer.model.linear.weight.detach().tolist(), type(trainer.optimizer).__name__, trainer.optimizer.state_dict()


class DisablesInTrainStep(EpochBasedTrainer):
    def train_step(self, model, inputs):
        if self.iter == 1:
            msprobe.disable()
        return super().train_step(model, inputs)


def test_disabling_in_train_step_takes_effect_at_once_and_changes_nothing(tmp_path):
    untraced = build_trainer(tmp_path / "off", steps=5, trainer_class=DisablesInTrainStep)
    untraced.train()
    trainer = build_trainer(tmp_path / "on", steps=5, trainer_class=DisablesInTrainStep)
    with msprobe.testing.capture() as records:
        trainer.train()
    assert weights_of(trainer) == weights_of(untraced)
    assert rows(trainer) == rows(untraced)
    assert [step.complete for step in steps_of(records)] == [True, False]
    assert of_kind(records, "end")[0].reason == "disabled"
    assert records[-1] is of_kind(records, "end")[0]


@pytest.mark.parametrize("stage", ["before_run", "before_train_epoch", "before_train_iter", "after_train_iter"])
def test_disabling_in_a_hook_takes_effect_when_the_stages_hooks_have_run(stage, tmp_path):
    calls = []

    class Last(Hook):
        PRIORITY = 100

        def before_train_iter(self, trainer):
            calls.append(("before", trainer.iter, trainer))

        def after_train_iter(self, trainer):
            calls.append(("after", trainer.iter, trainer))

    def settings():
        return {"steps": 4, "callbacks": [Failing(stage, lambda trainer: msprobe.disable(), iteration=1 if "iter" in stage else 0), Last()]}

    untraced = build_trainer(tmp_path / "off", **settings())
    untraced.train()
    trainer = build_trainer(tmp_path / "on", **settings())
    with msprobe.testing.capture() as records:
        trainer.train()
    assert weights_of(trainer) == weights_of(untraced)
    assert rows(trainer) == rows(untraced)
    # Every hook was called as often as without msprobe: nothing left ModelScope's list while it was walked.
    assert [call[:2] for call in calls if call[2] is trainer] == [call[:2] for call in calls if call[2] is untraced]
    expected = {"before_run": [], "before_train_epoch": [], "before_train_iter": [True, False], "after_train_iter": [True, True]}
    assert [step.complete for step in steps_of(records)] == expected[stage]
    assert of_kind(records, "end")[0].reason == "disabled"


def test_a_trainer_with_its_own_invoke_hook_keeps_it(tmp_path):
    stages = []

    class Announces(EpochBasedTrainer):
        def invoke_hook(self, fn_name):
            stages.append(fn_name)
            super().invoke_hook(fn_name)

    build_trainer(tmp_path / "off", trainer_class=Announces).train()
    alone, stages[:] = list(stages), []
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path / "on", trainer_class=Announces).train()
    assert stages == alone
    assert len(steps_of(records)) == 3
    assert all("backward" in [phase.name for phase in step.phases] for step in steps_of(records))


# Copies


class KnowsTrainer(Repeated):
    """A dataset that holds its trainer, as some of ModelScope's do."""

    trainer = None


class TakesCopies(Hook):
    """Copies the trainer in mid-training, before it holds a graph, which cannot be copied."""

    def __init__(self, *ways):
        self.ways = ways

    def before_train_iter(self, trainer):
        ways, self.ways = self.ways, ()
        COPIES.extend([way(trainer) for way in ways])


COPIES = []


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def test_a_trainer_copied_in_mid_training_is_a_plain_trainer(tmp_path):
    COPIES.clear()
    dataset = KnowsTrainer(three_four(1).examples, 3)
    with msprobe.testing.capture() as records:
        trainer = build_trainer(tmp_path, dataset=dataset, callbacks=[TakesCopies(copy.deepcopy, through_pickle)])
        dataset.trainer = trainer
        trainer.train()
    copies = list(COPIES)
    assert len(copies) == 2
    for copied in copies:
        assert type(copied) is EpochBasedTrainer
        assert copied.invoke_hook.__func__ is EpochBasedTrainer.invoke_hook
        assert copied.train_dataset.trainer is copied
        assert type(next(hook for hook in copied._hooks if isinstance(hook, OptimizerHook)).processor) is OptimizerProcessor
        assert not [hook for hook in copied._hooks if type(hook).__module__.startswith("msprobe")]
        copied.invoke_hook("before_train_epoch")
        assert b"msprobe.host" not in pickle.dumps(copied)
    assert len(steps_of(records)) == 3
    assert events_of(records, "probe_error") == []


def test_a_copy_that_trains_on_is_recorded_as_a_training_of_its_own(tmp_path):
    COPIES.clear()
    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, callbacks=[TakesCopies(copy.deepcopy)]).train()
        (copied,) = COPIES
        # train() will give it these two anew.
        copied._hooks = [hook for hook in copied._hooks if type(hook).__name__ not in ("OptimizerHook", "LrSchedulerHook")]
        copied._epoch = copied._iter = 0
        copied.train()
    assert [end.steps for end in of_kind(records, "end")] == [3, 3]
    assert [step.step for step in steps_of(records)] == list(range(6))


# The hook in the script's own hands


def test_a_trace_hook_in_the_script_enables_and_leaves_no_entry(zygote, tmp_path):
    off = zygote.run("train_with_checkpoint.py", "none", folder=tmp_path / "off").check()
    saved = {path.relative_to(off.folder) for path in (off.folder / "folder" / "work").rglob("*") if ".log" not in path.name}
    assert any(path.name == "configuration.json" for path in saved)
    for way in ("callback", "configuration", "trace"):
        on = zygote.run("train_with_checkpoint.py", way, folder=tmp_path / way, trace=way == "trace").check()
        assert [record["kind"] for record in on.records()].count("step") == 3
        assert {path.relative_to(on.folder) for path in (on.folder / "folder" / "work").rglob("*") if ".log" not in path.name} == saved
        configuration = (on.folder / "folder" / "work" / "output" / "configuration.json").read_text()
        assert "TraceHook" not in configuration
        assert configuration.replace(str(on.folder), "") == (
            off.folder / "folder" / "work" / "output" / "configuration.json"
        ).read_text().replace(str(off.folder), "")
        states = sorted(path for path in saved if path.name.endswith("_trainer_state.pth"))
        assert states
        for path in states:
            before, after = (torch.load(folder / path, weights_only=False) for folder in (off.folder, on.folder))
            assert keys_of(after) == keys_of(before)
            assert any("BestCkptSaverHook" in key for key in before["meta"])
        assert hook_list(on) == hook_list(off)


def keys_of(value):
    """Return the keys of nested dicts."""
    return {key: keys_of(entry) for key, entry in value.items()} if isinstance(value, dict) else type(value).__name__


def hook_list(run):
    """Return ModelScope's printed list of hooks."""
    printed = re.search(r"Stage: before_run.*?Stage: after_run:.*?-{10}", run.stdout + run.stderr, re.DOTALL)
    return printed.group(0)
