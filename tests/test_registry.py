"""ModelScope's registry of hooks: one more name in it, and nothing else changed."""

import importlib

import pytest
from modelscope.trainers.hooks.builder import HOOKS
from modelscope.trainers.hooks.hook import Hook
from modelscope.trainers.hooks.optimizer.base import OptimizerHook, OptimizerProcessor
from modelscope.trainers.trainer import EpochBasedTrainer
from modelscope.utils.registry import build_from_cfg
from trainings import build_trainer

import msprobe.testing
from msprobe.host.hooks import register_trace_hook


def registered():
    return HOOKS.modules["default"]


@pytest.fixture
def unregistered(monkeypatch):
    """A registry in which nobody has put a TraceHook yet."""
    monkeypatch.setitem(HOOKS.modules, "default", {name: cls for name, cls in registered().items() if name != "TraceHook"})


@pytest.mark.usefixtures("unregistered")
def test_the_hook_is_registered_once_however_often_msprobe_is_enabled():
    before = dict(registered())
    with msprobe.testing.capture():
        msprobe.enable()
        importlib.reload(msprobe)
        msprobe.enable()
        register_trace_hook()
    assert registered() == {**before, "TraceHook": msprobe.TraceHook}


@pytest.mark.usefixtures("unregistered")
def test_importing_registers_nothing():
    importlib.reload(msprobe)
    assert "TraceHook" not in registered()


@pytest.mark.usefixtures("unregistered")
def test_modelscope_builds_the_hook_by_its_name():
    register_trace_hook()
    assert type(build_from_cfg({"type": "TraceHook"}, HOOKS)) is msprobe.TraceHook


@pytest.mark.usefixtures("unregistered")
def test_a_class_of_that_name_stays_and_both_are_named(tmp_path):
    @HOOKS.register_module(module_name="TraceHook")
    class Theirs(Hook):
        pass

    train = vars(EpochBasedTrainer)["train"]
    with pytest.raises(msprobe.HostError) as caught:
        msprobe.enable(out=tmp_path)
    message = str(caught.value)
    assert f"{Theirs.__module__}.{Theirs.__qualname__}" in message
    assert "msprobe.host.hooks.TraceHook" in message
    assert "\n" not in message
    assert registered()["TraceHook"] is Theirs
    assert not msprobe.is_enabled()
    assert vars(EpochBasedTrainer)["train"] is train
    assert list(tmp_path.iterdir()) == []


def test_modelscopes_own_hook_and_processor_are_unchanged(tmp_path):
    before = [registered()["OptimizerHook"], dict(vars(OptimizerHook)), dict(vars(OptimizerProcessor))]
    with msprobe.testing.capture():
        trainer = build_trainer(tmp_path)
        trainer.train()
        assert trainer.get_hook(OptimizerHook)  # found by exact class, as AMP looks for it
    assert [registered()["OptimizerHook"], dict(vars(OptimizerHook)), dict(vars(OptimizerProcessor))] == before


def test_a_traced_script_may_register_a_class_of_that_name(on_and_off):
    off, on = on_and_off("train_with_own_trace_hook.py")
    assert "the script's own hook 2" in off.stdout
    assert [record["kind"] for record in on.records()].count("step") == 3
