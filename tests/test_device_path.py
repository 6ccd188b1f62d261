"""The path of an accelerator: values and times are read a step later, and nothing on the way waits for the device.

A stand-in: there is no accelerator here, so the CPU plays one. Its events complete only when the test's device "catches up", its copies go
to ordinary memory. What is shown is msprobe's own logic; `scripts/gpu_check.py` shows the same on a real device.
"""

import itertools
from pathlib import Path

import pytest
import torch
from conftest import strict_records
from modelscope.trainers.hooks.hook import Hook
from trainings import build_trainer

from msprobe.capture import clock, memory, readback, session
from msprobe.testing import capture


class FakeDevice:
    """A device whose work completes only when it is told to catch up, or is waited for."""

    def __init__(self):
        self.ticks = itertools.count(1)
        self.done = 0
        self.recorded = 0
        self.waits = 0
        self.events = 0
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                device.events += 1
                self.tick = None

            def record(self, stream):
                assert stream == "the model's stream"
                self.tick = device.recorded = next(device.ticks)

            def query(self):
                return self.tick is not None and self.tick <= device.done

            def synchronize(self):
                device.waits += 1
                device.done = max(device.done, self.tick)

            def elapsed_time(self, end):
                assert self.query(), "read before the device got there"
                assert end.query(), "read before the device got there"
                return float(end.tick - self.tick)

        self.Event = Event

    def current_stream(self, device):
        return "the model's stream"

    def catch_up(self):
        self.done = self.recorded


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(clock, "device_module", lambda device: fake)
    monkeypatch.setattr(readback, "device_module", lambda device: fake)
    monkeypatch.setattr(readback, "is_host", lambda device: False)
    monkeypatch.setattr(readback, "pinned", lambda size, dtype: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(session, "clock_for", clock.DeviceClock)
    monkeypatch.setattr(session, "memory_reader", lambda device: memory._read_resident)
    return fake


class CatchUp(Hook):
    """Lets the device finish all that was queued at the beginning of the next iteration, as ModelScope's `loss.item()` does."""

    def __init__(self, device, seen):
        self.device = device
        self.seen = seen

    def before_train_iter(self, trainer):
        self.device.catch_up()
        self.seen.append(self._steps_on_disk())

    def _steps_on_disk(self):
        from msprobe.host import attach

        files = list(Path(attach._process.recorder.folder).glob("rank*.jsonl"))
        return [record["step"] for path in files for record in strict_records(path) if record["kind"] == "step"]


def test_a_step_is_published_one_step_later_and_never_waited_for(device, tmp_path):
    seen = []
    with capture() as records:
        build_trainer(tmp_path, steps=5, callbacks=[CatchUp(device, seen)]).train()
    steps = [record for record in records if type(record).__name__ == "StepRecord"]
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]
    assert seen == [[], [], [0], [0, 1], [0, 1, 2]]
    assert device.waits <= 2  # for the last step alone, when the training is over: its values and its end


def test_values_and_times_read_late_are_those_of_their_own_step(device, tmp_path):
    with capture() as records:
        trainer = build_trainer(tmp_path, steps=5, callbacks=[CatchUp(device, [])], options={"grad_clip": {"max_norm": 1.0}})
        trainer.train()
    steps = [record for record in records if type(record).__name__ == "StepRecord"]
    weight = torch.zeros(2, dtype=torch.float64)
    for step in steps:
        assert step.loss["loss"] == pytest.approx(float(weight @ torch.tensor([3.0, 4.0], dtype=torch.float64)), rel=1e-5, abs=1e-6)
        assert step.grad_norm.before_clip == pytest.approx(5.0, rel=1e-6)
        assert step.grad_norm.after_clip == pytest.approx(1.0, rel=1e-6)
        weight -= 0.1 * torch.tensor([0.6, 0.8], dtype=torch.float64)
        assert all(phase.device_ns > 0 for phase in step.phases)


def test_events_are_reused_once_their_step_is_published(device, tmp_path):
    with capture():
        build_trainer(tmp_path / "short", steps=4, callbacks=[CatchUp(device, [])]).train()
    short = device.events
    with capture():
        build_trainer(tmp_path / "long", steps=40, callbacks=[CatchUp(device, [])]).train()
    copies = 40 - 4  # each step's read-back has an event of its own
    assert device.events - short <= short + copies + 40


def test_a_device_that_never_catches_up_is_waited_for_so_that_only_the_newest_step_is_unread(device, tmp_path):
    seen = []

    class Looking(CatchUp):
        def before_train_iter(self, trainer):
            self.seen.append(self._steps_on_disk())

    with capture() as records:
        build_trainer(tmp_path, steps=5, callbacks=[Looking(device, seen)]).train()
    assert seen == [[], [], [0], [0, 1], [0, 1, 2]]
    assert device.waits >= 4
    steps = [record for record in records if type(record).__name__ == "StepRecord"]
    assert all(phase.device_ns > 0 for step in steps for phase in step.phases)


def test_marks_during_graph_capture_record_no_event(monkeypatch):
    fake = FakeDevice()
    fake.is_current_stream_capturing = lambda: True
    monkeypatch.setattr(clock, "device_module", lambda device: fake)
    assert clock.DeviceClock(torch.device("cpu")).mark().event is None
    assert fake.events == 0
