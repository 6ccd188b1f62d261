"""Phases: every moment of a step is in the span of what ran then, and the spans fit together."""

import itertools
import time

import pytest
import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook, OptimizerProcessor
from recorded import children, end_of, events_of, index_of_hook, label, leaves, of_kind, steps_of
from trainings import Known, Repeated, build_trainer, enable_amp_on_cpu, evaluating, three_four

import msprobe.testing

NAP_NS = 50_000_000
STEPS = 4


def nap():
    time.sleep(NAP_NS / 1e9)


class NapsInForward(Known):
    def forward(self, x):
        nap()
        return super().forward(x)


class NapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        nap()
        return gradient


class NapsInBackward(Known):
    def forward(self, x):
        return {"loss": NapInBackward.apply(self.linear(x)).sum()}


class NapsInStep(torch.optim.SGD):
    def step(self, closure=None):
        nap()
        return super().step(closure)


class NapsInZeroGrad(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        nap()
        super().zero_grad(set_to_none)


class NapsInItem(Repeated):
    def __getitem__(self, index):
        nap()
        return super().__getitem__(index)


class Drowsy(Hook):
    """Naps at the stages it is told."""

    def __init__(self, *stages):
        for stage in stages:
            setattr(self, stage, lambda trainer: nap())


def with_optimizer(optimizer_class):
    model = Known()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return {"model": model, "trainer_arguments": {"optimizers": (optimizer, scheduler)}}


def record(folder, steps=STEPS, **settings):
    trainer = build_trainer(folder, steps=steps, **settings)
    with msprobe.testing.capture() as records:
        trainer.train()
    return records


def slow_clipping(monkeypatch):
    from torch.nn.utils import clip_grad

    original = clip_grad.clip_grad_norm_

    def clip_grad_norm_(parameters, *arguments, **keywords):
        nap()
        return original(parameters, *arguments, **keywords)

    monkeypatch.setattr(clip_grad, "clip_grad_norm_", clip_grad_norm_)


PLACES = {
    "forward": lambda: {"model": NapsInForward()},
    "backward": lambda: {"model": NapsInBackward()},
    "clip_grads": lambda: {"options": {"grad_clip": {"max_norm": 1.0}}},
    "optimizer_step": lambda: with_optimizer(NapsInStep),
    "zero_grad": lambda: with_optimizer(NapsInZeroGrad),
    "data_load": lambda: {"dataset": NapsInItem(three_four(1).examples, STEPS)},
    "Drowsy": lambda: {"callbacks": [Drowsy("after_train_iter")]},
}


@pytest.mark.parametrize("place", PLACES)
def test_what_takes_time_shows_in_its_own_span_and_in_no_other(place, tmp_path, monkeypatch):
    if place == "clip_grads":
        slow_clipping(monkeypatch)
    steps = steps_of(record(tmp_path, **PLACES[place]()))
    assert len(steps) == STEPS
    shortest = {}
    for step in steps:
        spent = {}
        for leaf in leaves(step):
            spent[label(leaf)] = spent.get(label(leaf), 0) + leaf.host_ns
        for name, nanoseconds in spent.items():
            shortest[name] = min(nanoseconds, shortest.get(name, nanoseconds))
    # The shortest of several steps: another process may keep this one waiting anywhere, but not at one place every time.
    assert shortest.pop(place) >= NAP_NS
    assert {name: nanoseconds for name, nanoseconds in shortest.items() if nanoseconds >= NAP_NS} == {}


def test_a_hook_in_before_train_iter_has_its_time(tmp_path):
    for step in steps_of(record(tmp_path, callbacks=[Drowsy("before_train_iter")])):
        phase = step.phases[index_of_hook(step, "Drowsy", "before_train_iter")]
        assert phase.host_ns >= NAP_NS
        assert phase.parent is None


def test_spans_nest_and_siblings_do_not_overlap(tmp_path):
    steps = steps_of(record(tmp_path, options={"grad_clip": {"max_norm": 1.0}, "cumulative_iters": 2}))
    for step in steps:
        for index, phase in enumerate(step.phases):
            assert phase.parent is None or phase.parent < index
        for parent in (None, *range(len(step.phases))):
            inside = children(step, parent)
            lower, upper = (0, step.wall_ns) if parent is None else (step.phases[parent].start_ns, end_of(step.phases[parent]))
            for phase in inside:
                assert lower <= phase.start_ns
                lower = end_of(phase)
            assert lower <= upper
        assert sum(phase.host_ns for phase in children(step, None)) <= step.wall_ns
        assert sum(phase.host_ns for phase in leaves(step)) + step.probe_ns <= step.wall_ns


def test_the_steps_of_an_epoch_tile_time(tmp_path):
    steps = steps_of(record(tmp_path, epochs=2))
    assert [step.epoch for step in steps] == [0] * STEPS + [1] * STEPS
    for one, next_one in itertools.pairwise(steps):
        if one.epoch == next_one.epoch:
            assert one.start_ns + one.wall_ns == next_one.start_ns
        else:
            assert one.start_ns + one.wall_ns < next_one.start_ns


def test_a_step_holds_its_phases_in_the_order_in_which_they_run(tmp_path):
    (step,) = steps_of(record(tmp_path, steps=1, options={"grad_clip": {"max_norm": 1.0}}))
    top = [label(phase) for phase in children(step, None)]
    assert top[0] == "data_load"
    assert top.index("forward") < top.index("LrSchedulerHook")
    inside = children(step, index_of_hook(step, "OptimizerHook"))
    assert [phase.name for phase in inside] == ["backward", "clip_grads", "optimizer_step", "zero_grad"]
    assert inside[0].loss_key == "loss"
    assert [phase.optimizer for phase in inside[2:]] == [0, 0]
    assert inside[3].set_to_none is True


def test_accumulation_clips_steps_and_clears_only_when_it_updates(tmp_path):
    steps = steps_of(record(tmp_path, options={"grad_clip": {"max_norm": 1.0}, "cumulative_iters": 2}))
    names = [[phase.name for phase in children(step, index_of_hook(step, "OptimizerHook"))] for step in steps]
    assert names == [["backward"], ["backward", "clip_grads", "optimizer_step", "zero_grad"]] * 2
    assert [(step.accumulation.index, step.accumulation.size) for step in steps] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def restore_later(monkeypatch):
    """Have what `enable_amp_on_cpu` replaces put back after the test."""
    from torch.cuda import amp

    monkeypatch.setattr(amp, "GradScaler", amp.GradScaler)
    monkeypatch.setattr(amp, "autocast", amp.autocast)


def test_mixed_precision_unscales_clips_steps_updates_and_clears(tmp_path, monkeypatch):
    restore_later(monkeypatch)
    enable_amp_on_cpu()
    records = record(tmp_path, options={"grad_clip": {"max_norm": 1.0}}, trainer_arguments={"use_fp16": True})
    assert of_kind(records, "model")[0].processor == "TorchAMPOptimizerProcessor"
    expected = ["backward", "unscale", "clip_grads", "optimizer_step", "scaler_update", "zero_grad"]
    for step in steps_of(records):
        assert [phase.name for phase in children(step, index_of_hook(step, "OptimizerHook"))] == expected


@pytest.mark.filterwarnings("ignore")
def test_a_disabled_scaler_has_no_phases(tmp_path):
    # Without an accelerator torch's GradScaler turns itself off: its unscale_ and update do nothing, its step is the optimizer's.
    records = record(tmp_path, trainer_arguments={"use_fp16": True})
    assert of_kind(records, "model")[0].processor == "TorchAMPOptimizerProcessor"
    for step in steps_of(records):
        assert [phase.name for phase in children(step, index_of_hook(step, "OptimizerHook"))] == ["backward", "optimizer_step", "zero_grad"]
        assert step.loss_scale is None
        assert step.optimizer_step == "done"


OUTSIDE_STEPS = ("before_run", "before_train_epoch", "after_train_epoch", "after_run")


def test_a_hook_outside_steps_shows_in_its_stage(tmp_path):
    records = record(tmp_path, callbacks=[Drowsy(*OUTSIDE_STEPS)])
    stages = of_kind(records, "stage")
    assert [stage.stage for stage in stages] == list(OUTSIDE_STEPS)
    assert [stage.after_step for stage in stages] == [None, None, STEPS - 1, STEPS - 1]
    for stage in stages:
        (drowsy,) = [hook for hook in stage.hooks if hook.hook == "Drowsy"]
        assert NAP_NS <= drowsy.host_ns <= stage.host_ns
        assert drowsy.priority == 50


def test_a_nap_between_epochs_is_in_no_step(tmp_path):
    records = record(tmp_path, epochs=2, callbacks=[Drowsy("after_train_epoch", "before_train_epoch")])
    second_epoch = next(step for step in steps_of(records) if step.epoch == 1)
    begun = [stage for stage in of_kind(records, "stage") if stage.stage == "before_train_epoch"][1]
    assert second_epoch.start_ns == begun.start_ns + begun.host_ns


class NapsInEvaluation(Known):
    def forward(self, x):
        if not self.training:
            nap()
        return super().forward(x)


def test_an_evaluation_in_mid_training_is_inside_its_hook(tmp_path):
    records = record(tmp_path, model=NapsInEvaluation(), **evaluating(by_epoch=False, interval=2))
    steps = steps_of(records)
    for step in steps:
        phase = step.phases[index_of_hook(step, "EvaluationHook")]
        if step.step % 2:
            assert phase.host_ns >= 2 * NAP_NS  # two examples
        else:
            assert phase.host_ns < 2 * NAP_NS
        # An evaluation makes ModelScope register its processors anew; the next step is seen as before.
        names = [inside.name for inside in children(step, index_of_hook(step, "OptimizerHook"))]
        assert names == ["backward", "optimizer_step", "zero_grad"]
    modules = of_kind(records, "module")
    assert [(module.step, module.name, module.call) for module in modules] == [(step, "linear", 0) for step in range(STEPS)]
    assert of_kind(records, "end")[0].steps == STEPS


class OwnProcessor(OptimizerProcessor):
    """A processor that somebody's hook puts in, as ModelScope's hooks for AMP and DeepSpeed do."""


class Swaps(Hook):
    """Puts its processor in whenever processors are registered: always, or as DeepSpeed's hook does, unless it is there."""

    def __init__(self, always):
        self.always = always
        self.swaps = 0

    def register_processor(self, trainer):
        for hook in trainer.get_hook(OptimizerHook):
            if self.always or not isinstance(hook.processor, OwnProcessor):
                hook.set_processor(OwnProcessor())
                self.swaps += 1


@pytest.mark.parametrize(("always", "swaps"), [(True, 3), (False, 1)], ids=["always", "unless-there"])
def test_a_processor_that_is_put_in_anew_by_an_evaluation_is_seen_too(always, swaps, tmp_path):
    hook = Swaps(always)
    records = record(tmp_path, callbacks=[hook], **evaluating(by_epoch=False, interval=2))
    assert of_kind(records, "model")[0].processor == "OwnProcessor"
    for step in steps_of(records):
        names = [inside.name for inside in children(step, index_of_hook(step, "OptimizerHook"))]
        assert names == ["backward", "optimizer_step", "zero_grad"]
    assert hook.swaps == swaps  # as often as without msprobe: at the begin, and at each of two evaluations


def test_an_evaluation_after_an_epoch_is_in_the_stage(tmp_path):
    records = record(tmp_path, epochs=2, model=NapsInEvaluation(), **evaluating(by_epoch=True, interval=1))
    stages = [stage for stage in of_kind(records, "stage") if stage.stage == "after_train_epoch"]
    assert len(stages) == 2
    for stage in stages:
        (evaluation,) = [hook for hook in stage.hooks if hook.hook == "EvaluationHook"]
        assert evaluation.host_ns >= 2 * NAP_NS
    assert len(steps_of(records)) == 2 * STEPS
    assert len(of_kind(records, "module")) == 2 * STEPS


def test_every_iteration_is_a_step_and_the_records_have_their_order(tmp_path):
    seen = []

    class Counts(Hook):
        def after_train_iter(self, trainer):
            seen.append((trainer.epoch, trainer.iter))

    records = record(tmp_path, epochs=2, callbacks=[Counts()])
    steps = steps_of(records)
    assert [(step.epoch, step.iter) for step in steps] == seen
    assert [step.step for step in steps] == list(range(2 * STEPS))
    kinds = [type(entry).__struct_config__.tag for entry in records]
    step_kinds = ["module", "norms", "step"] * STEPS
    epoch = ["stage", *step_kinds, "stage"]
    # The model is described last of all in before_run, while that stage is still running.
    assert kinds == ["run", "model", "stage", *epoch, *epoch, "stage", "end"]
    (end,) = of_kind(records, "end")
    assert (end.reason, end.steps, end.optimizer_steps, end.skipped_steps) == ("finished", 2 * STEPS, 2 * STEPS, 0)
    assert (end.unapplied_micro_steps, end.dropped_records) == (0, 0)
    assert end.probe_ns > 0
    assert events_of(records, "probe_error") == []


def test_micro_steps_that_were_never_applied_are_counted(tmp_path):
    records = record(tmp_path, steps=5, options={"cumulative_iters": 3})
    (end,) = of_kind(records, "end")
    assert (end.steps, end.optimizer_steps, end.unapplied_micro_steps) == (5, 1, 2)


def test_every_line_is_strict_json(zygote, tmp_path):
    run = zygote.run("train_known.py", "state.pt", folder=tmp_path / "run", trace=True).check()
    assert [record["kind"] for record in run.records()].count("step") == 3  # read by a parser that refuses NaN and torn lines
    (path,) = run.trace().iterdir()
    assert path.read_bytes().endswith(b"}\n")


def test_durations_do_not_follow_the_wall_clock(tmp_path, monkeypatch):
    now = time.time
    calls = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now() - 3600 * next(calls))  # jumps an hour back at every call
    steps = steps_of(record(tmp_path, model=NapsInForward()))
    for step in steps:
        assert NAP_NS <= step.wall_ns < 60e9
        assert all(0 <= phase.host_ns < 60e9 for phase in step.phases)
        assert step.probe_ns >= 0


def test_an_optimizer_that_calls_its_parents_step_updates_once(tmp_path):
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # torch hooks SGD's own step when the first one is made
    for step in steps_of(record(tmp_path, **with_optimizer(NapsInStep))):
        assert [phase.name for phase in step.phases].count("optimizer_step") == 1
        assert [update.outcome for update in step.updates] == ["done"]
