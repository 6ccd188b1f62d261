"""What fails in the training reaches the user as it is and stands in the trace; what fails in msprobe never reaches the training."""

import contextlib
import signal

import pytest
import torch
from conftest import PROGRAMS, strict_records
from modelscope.trainers.hooks.hook import Hook
from recorded import events_of, label, of_kind, steps_of
from test_attach import rows
from test_launch import trace
from trainings import Known, Repeated, build_trainer, three_four

import msprobe.testing


class Planted(RuntimeError):
    pass


class Nested(torch.nn.Module):
    """A model whose inner layer's inner layer can fail."""

    def __init__(self, error=None, at=1):
        super().__init__()
        self.outer = torch.nn.Sequential(torch.nn.Identity(), Touchy(error, at))
        self.linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return {"loss": self.linear(self.outer(x)).sum()}


class Touchy(torch.nn.Module):
    def __init__(self, error, at):
        super().__init__()
        self.error = error
        self.at = at
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.error is not None and self.calls > self.at:
            raise self.error
        return x


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value, error):
        context.error = error
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        if context.error is not None:
            raise context.error
        return gradient, None


class BackwardFails(Known):
    def __init__(self, error):
        super().__init__()
        self.error = error
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return {"loss": FailsInBackward.apply(self.linear(x), self.error if self.calls > 1 else None).sum()}


class Fails(Hook):
    """Raises an error at a stage, in its second iteration if that is a stage of one."""

    def __init__(self, stage, error):
        setattr(self, stage, self.fail)
        self.error = error
        self.is_of_iteration = "iter" in stage

    def fail(self, trainer):
        if trainer.iter == 1 or not self.is_of_iteration:
            raise self.error


class ItemFails(Repeated):
    def __init__(self, error):
        super().__init__(three_four(1).examples, 3)
        self.error = error

    def __getitem__(self, index):
        if index == 1:
            raise self.error
        return super().__getitem__(index)


class FailingSGD(torch.optim.SGD):
    error = None
    place = ""
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.place == "step" and self.calls > 1:
            raise self.error
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        if self.place == "zero_grad" and self.calls > 1:
            raise self.error
        super().zero_grad(set_to_none)


def optimizing(place, error):
    model = Known()
    optimizer = FailingSGD(model.parameters(), lr=0.1)
    optimizer.place, optimizer.error = place, error
    return {"model": model, "trainer_arguments": {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1000))}}


# What fails -> the settings of the training, the phase and the innermost module that the event must name.
PLACES = {
    "forward": (lambda error: {"model": Nested(error)}, "forward", "outer.1"),
    "backward": (lambda error: {"model": BackwardFails(error)}, "backward", None),
    "clipping": (lambda error: {"options": {"grad_clip": {"max_norm": 1.0}}}, "clip_grads", None),
    "step": (lambda error: optimizing("step", error), "optimizer_step", None),
    "zero_grad": (lambda error: optimizing("zero_grad", error), "zero_grad", None),
    "hook": (lambda error: {"callbacks": [Fails("after_train_iter", error)]}, "Fails", None),
    "hook-before": (lambda error: {"callbacks": [Fails("before_train_iter", error)]}, "Fails", None),
    "dataset": (lambda error: {"dataset": ItemFails(error)}, "data_load", None),
}


def clipping_fails(monkeypatch, error):
    from torch.nn.utils import clip_grad

    calls = []

    def clip_grad_norm_(parameters, max_norm, **keywords):
        calls.append(max_norm)
        if len(calls) > 1:
            raise error

    monkeypatch.setattr(clip_grad, "clip_grad_norm_", clip_grad_norm_)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_reaches_the_user_as_it_is_and_is_recorded(place, tmp_path, monkeypatch):
    error = Planted("planted in the training\nwith a second line")
    settings, phase, module = PLACES[place]
    if place == "clipping":
        clipping_fails(monkeypatch, error)
    with msprobe.testing.capture() as records:
        trainer = build_trainer(tmp_path, **settings(error))
        with pytest.raises(Planted) as caught:
            trainer.train()
    assert caught.value is error
    assert str(error) == "planted in the training\nwith a second line"
    assert (error.__cause__, error.__context__, getattr(error, "__notes__", None)) == (None, None, None)
    (event,) = events_of(records, "exception")
    assert (event.level, event.train) == ("error", 0)
    assert (event.data["type"], event.data["phase"], event.data["module"]) == ("Planted", phase, module)
    assert "planted in the training" in event.message
    assert "\n" not in event.message
    steps = steps_of(records)
    if place == "dataset":  # its second step had not begun
        assert [step.complete for step in steps] == [True]
    else:
        assert [step.complete for step in steps] == [True, False]
        assert event.step == 1
        assert phase in [label(item) for item in steps[1].phases]
        assert all(0 <= item.start_ns <= item.start_ns + item.host_ns <= steps[1].wall_ns for item in steps[1].phases)
    (end,) = of_kind(records, "end")
    assert (end.reason, end.steps) == ("exception", 1)
    assert events_of(records, "probe_error") == []


@pytest.mark.parametrize("stage", ["before_run", "before_train_epoch", "after_train_epoch", "after_run"])
def test_an_exception_outside_steps_names_its_stage(stage, tmp_path):
    error = Planted("planted")
    with msprobe.testing.capture() as records, pytest.raises(Planted):
        build_trainer(tmp_path, callbacks=[Fails(stage, error)]).train()
    (event,) = events_of(records, "exception")
    assert event.data["phase"] == stage
    assert event.step is None
    assert of_kind(records, "end")[0].reason == "exception"


def test_running_out_of_memory_is_recorded_with_its_module(tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with msprobe.testing.capture() as records, pytest.raises(torch.OutOfMemoryError) as caught:
        build_trainer(tmp_path, model=Nested(error)).train()
    assert caught.value is error
    (event,) = events_of(records, "exception")
    assert (event.data["type"], event.data["phase"], event.data["module"]) == ("OutOfMemoryError", "forward", "outer.1")
    assert "Tried to allocate 2.00 GiB" in event.message


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_is_passed_on_too(kind, tmp_path):
    error = kind("planted")
    with msprobe.testing.capture() as records:
        trainer = build_trainer(tmp_path, model=Nested(error))
        with pytest.raises(kind) as caught:
            trainer.train()
    assert caught.value is error
    (end,) = of_kind(records, "end")
    assert end.reason == ("interrupted" if kind is KeyboardInterrupt else "exception")
    assert [step.complete for step in steps_of(records)] == [True, False]


@pytest.mark.parametrize("place", ["forward", "hook", "interrupt", "exit"])
def test_a_failing_program_ends_as_it_does_alone(place, zygote, tmp_path):
    off = zygote.run("train_failing.py", place, folder=tmp_path / "off")
    on = zygote.run("train_failing.py", place, folder=tmp_path / "on", trace=True)
    assert off.status == on.status == (7 if place == "exit" else 1)
    assert off.stdout == on.stdout
    last = {"forward": "ValueError: planted in forward", "hook": "ValueError: planted in a hook", "interrupt": "KeyboardInterrupt"}
    if place in last:
        ours = [line for line in on.stderr.splitlines() if not line.startswith("msprobe:")]
        assert off.stderr.splitlines()[-1] == ours[-1] == last[place]
    records = on.records()
    assert records[-1]["reason"] == ("interrupted" if place == "interrupt" else "exception")
    assert [record["complete"] for record in records if record["kind"] == "step"] == [True, False]


def test_ctrl_c_in_a_traced_program_ends_it_by_the_signal(tmp_path):
    done = trace("--name", "run", PROGRAMS / "train_failing.py", "interrupt", folder=tmp_path)
    assert done.returncode == -signal.SIGINT  # what a shell shows as 130
    assert "KeyboardInterrupt" in done.stderr
    records = strict_records(tmp_path / "msprobe-runs" / "run" / "rank00000.jsonl")
    assert records[-1]["reason"] == "interrupted"


def test_a_module_whose_failure_the_model_catches_does_not_hide_the_next(tmp_path):
    class Falls(torch.nn.Module):
        def forward(self, x):
            raise Planted("caught by the model")

    class FallsBack(Known):
        def __init__(self):
            super().__init__()
            self.fancy = Falls()

        def forward(self, x):
            with contextlib.suppress(Planted):
                return {"loss": self.fancy(x)}
            return super().forward(x)

    with msprobe.testing.capture() as records:
        build_trainer(tmp_path, model=FallsBack()).train()
    names = [(module.step, module.name) for module in of_kind(records, "module") if module.name == "linear"]
    assert names == [(0, "linear"), (1, "linear"), (2, "linear")]


# Failures of msprobe itself


class Broken(Exception):
    pass


def breaks(*arguments, **keywords):
    raise Broken("inside msprobe")


def train(folder):
    trainer = build_trainer(folder, steps=4, options={"grad_clip": {"max_norm": 1.0}, "cumulative_iters": 2})
    trainer.train()
    return trainer


def state(trainer):
    return trainer.model.linear.weight.detach().tolist(), trainer.optimizer.state_dict(), trainer.iter, torch.get_rng_state().tolist()


def test_a_measurement_that_fails_costs_values_and_not_the_training(tmp_path, monkeypatch, capfd):
    alone = train(tmp_path / "off")
    from msprobe.capture import reduce

    original, calls = reduce.put_norms, []

    def put_norms(*arguments, **keywords):
        calls.append(1)
        return breaks() if len(calls) == 1 else original(*arguments, **keywords)

    monkeypatch.setattr(reduce, "put_norms", put_norms)
    capfd.readouterr()
    with msprobe.testing.capture(strict=False) as records:
        traced = train(tmp_path / "on")
    assert state(traced) == state(alone)
    assert rows(traced) == rows(alone)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("msprobe:")]
    assert "Broken: inside msprobe" in line
    assert "the training goes on" in line
    (event,) = events_of(records, "probe_error")
    assert event.step == 1
    assert "inside msprobe" in event.message
    steps = steps_of(records)
    assert [step.complete for step in steps] == [True] * 4
    assert steps[3].grad_norm.before_clip == pytest.approx(5.0, rel=1e-6)
    assert of_kind(records, "end")[0].reason == "finished"


BREAKABLE = [
    "msprobe.capture.session.StepDraft",
    "msprobe.capture.session.ParameterTable",
    "msprobe.capture.session.Selection",
    "msprobe.capture.session.Planner",
    "msprobe.capture.session.WeightWatch",
    "msprobe.capture.session.StepWriter",
    "msprobe.capture.session.clock_for",
    "msprobe.capture.spans.Spans.begin",
    "msprobe.capture.spans.Spans.finish",
    "msprobe.capture.modules.Call",
    "msprobe.capture.modules._candidates",
    "msprobe.capture.publishing.Publisher.add",
    "msprobe.capture.publishing.Publisher.finish",
    "msprobe.capture.ledger.Ledger.count",
    "msprobe.capture.ledger.Ledger.end_record",
    "msprobe.capture.updates.StepUpdates.clip_begins",
    "msprobe.capture.updates.StepUpdates.optimizer_step_begins",
    "msprobe.capture.readback.Readback.put",
    "msprobe.capture.recorder.open_rank_file",
    "msprobe.capture.recorder.Recorder.write",
    "msprobe.capture.recorder.Recorder.event",
    "msprobe.trace.writer.encode",
    "msprobe.host.environment.describe_device",
    "msprobe.host.attachment.unwrapped_model",
    "msprobe.host.attachment.Attachment._describe",
    "msprobe.host.attachment.Session",
    "msprobe.host.hooks.bracket",
    "msprobe.host.hooks.priority_of",
    "msprobe.host.seams.RunSeams.install",
    "msprobe.host.seams.scaler_of",
    "msprobe.host.seams.scaler_classes",
]


@pytest.mark.parametrize("target", BREAKABLE)
def test_whatever_breaks_inside_msprobe_the_training_is_the_same(target, tmp_path, monkeypatch):
    alone = train(tmp_path / "off")
    monkeypatch.setattr(target, breaks)
    with contextlib.suppress(msprobe.TraceError), msprobe.testing.capture(strict=False):
        traced = train(tmp_path / "on")
    monkeypatch.undo()
    assert state(traced) == state(alone)
    assert rows(traced) == rows(alone)


def test_a_strict_run_raises_what_breaks_inside_msprobe(tmp_path, monkeypatch):
    monkeypatch.setattr("msprobe.capture.updates.StepUpdates.clip_begins", breaks)
    with msprobe.testing.capture() as records:
        trainer = build_trainer(tmp_path, options={"grad_clip": {"max_norm": 1.0}})
        with pytest.raises(Broken):
            trainer.train()
    assert of_kind(records, "end")[0].reason == "exception"


def test_a_training_whose_folder_was_removed_goes_on(zygote, tmp_path):
    off = zygote.run("train_failing.py", "no-folder", folder=tmp_path / "off").check()
    on = zygote.run("train_failing.py", "no-folder", folder=tmp_path / "on", trace=True).check()
    assert off.stdout == on.stdout
