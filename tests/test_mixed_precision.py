"""Mixed precision through ModelScope's own processor and through a user's: true norms, true outcomes, and fp16 that stays on."""

import math

import pytest
import torch
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook
from modelscope.trainers.trainer import EpochBasedTrainer
from processors import Do, Given, Install, Update, ones, record
from trainings import Known, Repeated, enable_amp_on_cpu

from msprobe.host.attach import attachment_of
from msprobe.host.hooks import TraceOptimizerProcessor

INF = float("inf")


@pytest.fixture
def amp(monkeypatch):
    """Return a function that makes ModelScope's own mixed precision work on CPU until the test ends."""
    from torch.cuda import amp as switches

    monkeypatch.setattr(switches, "GradScaler", switches.GradScaler)
    monkeypatch.setattr(switches, "autocast", switches.autocast)
    return enable_amp_on_cpu


def examples(*values):
    return Repeated([{"x": torch.tensor(value)} for value in values])


def half(folder, **settings):
    """Record a training in ModelScope's own mixed precision."""
    return record(folder, trainer_arguments={"use_fp16": True}, **settings)


def scaled(folder, init_scale=1024.0, **settings):
    """Record a training by a user's processor that scales the loss, and leaves it to `scaler.step` to unscale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def update(trainer):
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    return record(folder, callbacks=[Install(Update(update, scaler))], **settings)


class WithOptimizer(EpochBasedTrainer):
    """A trainer whose optimizer is made by the model."""

    def build_optimizer(self, *arguments, **keywords):
        return self.model.make_optimizer()


# Norms


@pytest.mark.parametrize("options", [{}, {"grad_clip": {"max_norm": 1.0}}], ids=["unclipped", "clipped"])
def test_norms_are_unscaled_where_the_processor_unscales(tmp_path, amp, options):
    amp(init_scale=1024.0)
    recorded = half(tmp_path, options=options)
    assert recorded.model.processor == "TorchAMPOptimizerProcessor"
    assert recorded.before_clip() == [5.0] * 3
    assert recorded.l2("linear.weight") == [5.0] * 3
    assert [norm.optimizer_params for norm in recorded.grad_norms()] == [5.0] * 3
    assert [norm.clip_returned for norm in recorded.grad_norms()] == ([5.0] * 3 if options else [None] * 3)
    assert recorded.scales() == [(1024.0, 1024.0)] * 3
    assert [len(phases) for phases in recorded.phases("unscale")] == [1] * 3
    assert [len(phases) for phases in recorded.phases("scaler_update")] == [1] * 3
    assert [norms.point for norms in recorded.norms] == ["after_unscale"] * 3


def test_norms_are_unscaled_where_nobody_unscales(tmp_path):
    recorded = scaled(tmp_path)
    assert recorded.before_clip() == [5.0] * 3
    assert recorded.l2("linear.weight") == [5.0] * 3
    assert [norm.optimizer_params for norm in recorded.grad_norms()] == [5.0] * 3
    assert recorded.scales() == [(1024.0, 1024.0)] * 3
    assert recorded.outcomes() == ["done"] * 3


def test_the_loss_is_unscaled(tmp_path, amp):
    amp(init_scale=1024.0)
    model = Known()
    torch.nn.init.ones_(model.linear.weight)
    recorded = half(tmp_path, model=model, lr=0.0)
    assert [step.loss for step in recorded.steps] == [{"loss": 7.0}] * 3


def test_norms_of_accumulated_gradients(tmp_path, amp):
    amp(init_scale=1024.0)
    recorded = half(tmp_path, steps=4, options={"cumulative_iters": 2, "grad_clip": {"max_norm": 1.0}})
    assert recorded.before_clip() == [None, 5.0, None, 5.0]
    assert recorded.outcomes() == ["none", "done", "none", "done"]
    assert [step.loss_scale is None for step in recorded.steps] == [True, False, True, False]


class Stray(Given):
    """A model with a parameter that the optimizer does not own."""

    def make_optimizer(self):
        return torch.optim.SGD([self.tensors.owned], lr=0.1)


def test_a_gradient_that_clipping_sees_still_scaled_is_said_and_not_counted_scaled(tmp_path, amp):
    amp(init_scale=1024.0)
    model = Stray(owned=torch.tensor([3.0, 4.0]), stray=torch.tensor([6.0, 8.0]))
    options = {"grad_clip": {"max_norm": 1.0}}
    recorded = half(tmp_path, model=model, dataset=ones(1), trainer_class=WithOptimizer, options=options)
    (norm,) = recorded.grad_norms()
    seen_by_torch = math.hypot(5.0, 10.0 * 1024)
    coefficient = 1.0 / (seen_by_torch + 1e-6)
    assert norm.before_clip == pytest.approx(math.hypot(5.0, 10.0), rel=1e-12)
    assert norm.clip_returned == pytest.approx(seen_by_torch, rel=1e-6)
    assert norm.after_clip == pytest.approx(math.hypot(5.0, 10.0) * coefficient, rel=1e-6)
    assert norm.optimizer_params == 5.0
    assert norm.optimizer_params_after == pytest.approx(5.0 * coefficient, rel=1e-6)
    (event,) = [event for event in recorded.events if event.code == "clip_saw_scaled"]
    assert event.data == {"parameters": ["tensors.stray"], "count": 1}
    assert event.step == recorded.steps[0].step
    assert (recorded.l2("tensors.owned"), recorded.l2("tensors.stray")) == ([5.0], [10.0])


def test_an_ordinary_mixed_precision_training_has_no_such_event(tmp_path, amp):
    amp()
    assert half(tmp_path, options={"grad_clip": {"max_norm": 1.0}}).events == []


def test_the_finite_part_of_a_scaled_gradient_is_unscaled(tmp_path):
    recorded = scaled(tmp_path, dataset=examples([INF, 3.0]))
    (tensor,) = recorded.tensors
    assert (tensor.posinf, tensor.nan, tensor.l2) == (1, 0, 3.0)
    assert recorded.l2("linear.weight") == [INF]


# Skipped updates


class Weights(Hook):
    """Notes the weights after every iteration."""

    def __init__(self):
        self.seen = []

    def after_train_iter(self, trainer):
        self.seen.append([parameter.detach().clone() for parameter in trainer.model.parameters()])


def test_a_skipped_update_is_not_counted_as_a_step(tmp_path, amp):
    amp(init_scale=65536.0)
    weights = Weights()
    recorded = half(tmp_path, dataset=examples([INF, 1.0], [3.0, 4.0], [3.0, 4.0]), callbacks=[weights])
    assert recorded.outcomes() == ["skipped", "done", "done"]
    assert recorded.scales() == [(65536.0, 32768.0)] + [(32768.0, 32768.0)] * 2
    assert [bool(seen[0].any()) for seen in weights.seen] == [False, True, True]
    end = recorded.end
    assert (end.steps, end.optimizer_steps, end.skipped_steps, end.unapplied_micro_steps) == (3, 2, 1, 0)
    (event,) = [event for event in recorded.events if event.code == "step_skipped"]
    assert (event.step, event.data) == (recorded.steps[0].step, {"before": 65536.0, "after": 32768.0})
    assert recorded.before_clip()[1:] == [5.0, 5.0]
    assert recorded.before_clip()[0] == INF


def test_a_skip_is_recognised_at_a_fixed_scale(tmp_path, amp):
    amp()
    hooks = [{"type": "TorchAMPOptimizerHook", "loss_scale": 64.0}]
    recorded = record(tmp_path, dataset=examples([3.0, 4.0], [INF, 1.0], [3.0, 4.0]), hooks=hooks)
    assert recorded.outcomes() == ["done", "skipped", "done"]
    assert recorded.scales() == [(64.0, 64.0)] * 3
    assert [recorded.before_clip()[index] for index in (0, 2)] == [5.0, 5.0]
    assert (recorded.end.optimizer_steps, recorded.end.skipped_steps) == (2, 1)


def test_a_changed_scale_alone_is_no_skip(tmp_path, amp):
    amp(init_scale=1024.0, growth_interval=1)
    recorded = half(tmp_path)
    assert recorded.scales() == [(1024.0, 2048.0), (2048.0, 4096.0), (4096.0, 8192.0)]
    assert recorded.outcomes() == ["done"] * 3
    assert recorded.before_clip() == [5.0] * 3


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam], ids=["AdamW", "Adam"])
def test_optimizers_of_every_kind_are_unscaled_and_skipped(tmp_path, kind, optimizer):
    class OfItsKind(Known):
        called = 0

        def make_optimizer(self):
            made = optimizer(self.parameters(), lr=0.1, **{kind: True})
            made.register_step_pre_hook(self.count)
            return made

        def count(self, *arguments):
            self.called += 1

    model = OfItsKind()
    weights = Weights()
    data = examples([3.0, 4.0], [INF, 1.0], [3.0, 4.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(trainer):
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    recorded = record(
        tmp_path, model=model, dataset=data, callbacks=[Install(Update(update, scaler)), weights], trainer_class=WithOptimizer
    )
    assert model.called == (3 if kind == "fused" else 2), "a fused optimizer is called even where it must skip"
    assert recorded.outcomes() == ["done", "skipped", "done"]
    assert [recorded.before_clip()[index] for index in (0, 2)] == [5.0, 5.0]
    assert [recorded.l2("linear.weight")[index] for index in (0, 2)] == [5.0, 5.0]
    assert torch.equal(weights.seen[0][0], weights.seen[1][0])
    assert not torch.equal(weights.seen[1][0], weights.seen[2][0])
    assert recorded.scales() == [(1024.0, 1024.0), (1024.0, 512.0), (512.0, 512.0)]
    assert (recorded.end.optimizer_steps, recorded.end.skipped_steps) == (2, 1)


def test_a_scale_that_sank_to_zero_loses_no_step(tmp_path):
    recorded = scaled(tmp_path, init_scale=1e-44, dataset=examples(*[[INF, 1.0]] * 8))
    assert recorded.outcomes() == ["skipped"] * 8
    assert recorded.steps[-1].loss_scale.before == 0.0
    assert not any(math.isfinite(norm) for norm in recorded.before_clip())
    assert "probe_error" not in recorded.codes()


# The scaler itself


def test_a_scaler_replaced_in_mid_run_is_followed(tmp_path, amp):
    amp(init_scale=1024.0)

    def replace(trainer):
        trainer.get_hook(OptimizerHook)[0].processor.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    recorded = half(tmp_path, callbacks=[Do(replace, 1)], options={"grad_clip": {"max_norm": 1.0}})
    assert [step.loss_scale.before for step in recorded.steps] == [1024.0, 8.0, 8.0]
    assert recorded.before_clip() == [5.0] * 3


def test_a_scaler_that_is_kept_elsewhere_is_found(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(trainer):
        trainer.optimizer.zero_grad()
        scaler.scale(trainer.model.forward(torch.tensor([[3.0, 4.0]]))["loss"]).backward()
        scaler.step(trainer.optimizer)
        scaler.update()

    recorded = record(tmp_path, callbacks=[Install(Update(update))])
    assert recorded.before_clip() == [5.0] * 3
    assert [step.loss_scale.before for step in recorded.steps] == [1024.0] * 3


def test_a_disabled_scaler_leaves_no_trace(tmp_path):
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def update(trainer):
        scaler.unscale_(trainer.optimizer)
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    recorded = record(tmp_path, callbacks=[Install(Update(update, scaler))])
    assert [step.loss_scale for step in recorded.steps] == [None] * 3
    assert recorded.phases("unscale") == recorded.phases("scaler_update") == [[]] * 3
    assert recorded.before_clip() == [5.0] * 3
    assert recorded.outcomes() == ["done"] * 3


def test_a_second_unscale_by_the_script_is_its_own_affair(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(trainer):
        scaler.unscale_(trainer.optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(trainer.optimizer)
        assert trainer.model.linear.weight.grad.tolist() == [[3.0, 4.0]]
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    assert record(tmp_path, callbacks=[Install(Update(update, scaler))]).before_clip() == [5.0] * 3


def test_half_precision_weights_raise_as_without_msprobe(tmp_path, amp):
    amp()
    expected = pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$")
    recorded = half(tmp_path, model=Known(dtype=torch.float16), expect=expected)
    assert recorded.end.reason == "exception"
    assert (recorded.end.steps, recorded.end.optimizer_steps) == (0, 0)
    (step,) = recorded.steps
    assert step.complete is False
    names = [phase.name for phase in step.phases]
    assert names.index("forward") < names.index("backward") < names.index("unscale")
    assert all(phase.start_ns + phase.host_ns <= step.wall_ns for phase in step.phases)
    (event,) = [event for event in recorded.events if event.code == "exception"]
    assert (event.data["type"], event.data["phase"]) == ("ValueError", "unscale")
    assert event.data["text"] == "Attempting to unscale FP16 gradients."
    assert [parameter.dtype for parameter in recorded.model.parameters] == ["float16"]


# fp16 stays on


def test_mixed_precision_is_as_much_on_as_without_msprobe(on_and_off):
    off, on = on_and_off("train_half.py")  # which compares all that the program saved, and the order of the hooks
    state = torch.load(off.folder / "state.pt", weights_only=False)
    assert state["dtypes"] == ["torch.bfloat16"] * 4
    assert state["scalings"] == 4
    assert state["processor"] == "TorchAMPOptimizerProcessor"
    assert [found[1:] for found in state["while_training"]] == [[True, "TorchAMPOptimizerProcessor"]] * 4
    assert state["while_training"][0][0][:3] == ["TorchAMPOptimizerHook", "OptimizerHook", "Asking"]
    steps = [entry for entry in on.records() if entry["kind"] == "step"]
    assert [step["optimizer_step"] for step in steps] == ["skipped", "done", "done", "done"]


class TooEarly(Hook):
    """Wraps the processor before mixed precision has put in its own: what msprobe must not do."""

    PRIORITY = 0

    def register_processor(self, trainer):
        hook = trainer.get_hook(OptimizerHook)[0]
        hook.set_processor(TraceOptimizerProcessor(hook.processor, attachment_of(trainer)))


@pytest.mark.parametrize(("callbacks", "dtype"), [([], "torch.bfloat16"), ([TooEarly()], "torch.float32")], ids=["as-built", "too-early"])
def test_a_processor_wrapped_too_early_would_lose_mixed_precision_and_be_noticed(tmp_path, amp, callbacks, dtype):
    amp()
    dtypes = []
    model = Known()
    model.linear.register_forward_hook(lambda module, inputs, output: dtypes.append(str(output.dtype)))
    recorded = half(tmp_path, model=model, callbacks=callbacks)
    assert dtypes == [dtype] * 3
    assert (recorded.model.processor == "TorchAMPOptimizerProcessor") is (dtype == "torch.bfloat16")
