"""What modules produced is measured on the selected steps: the l2, and counts where it is not finite, by path and call."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from trainings import Repeated, build_trainer

from msprobe.errors import NothingSelected
from msprobe.host.attachment import running
from msprobe.testing import capture


@dataclasses.dataclass
class Answer:
    sample: torch.Tensor
    extra: tuple


class Nested(torch.nn.Module):
    """Returns a dataclass with a tuple in it, as diffusers' and transformers' modules do."""

    def forward(self, x):
        return Answer(sample=x * 2, extra=(x.sum(), {"mask": x > 0}))


class Network(torch.nn.Module):
    """Two calls of one layer, a module with a nested output, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(self.linear.weight)
        self.nested = Nested()
        self.block = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        torch.nn.init.eye_(self.block[0].weight)
        self.block.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            fixed = self.block(x)
        hidden = self.linear(self.linear(x)) + fixed
        return {"loss": self.nested(hidden).sample.sum()}


def tensors_of(records, role="module.output"):
    return [record for record in records if type(record).__name__ == "TensorRecord" and record.role == role]


def train(folder, steps=2, model=None, dataset=None, **settings):
    with capture(**settings) as records:
        trainer = build_trainer(folder, model=model or Network(), dataset=dataset, steps=steps, optimizer="SGD", lr=0.0)
        trainer.train()
    return records, trainer


def test_each_tensor_of_an_output_has_its_path_call_and_l2(tmp_path):
    records, _ = train(tmp_path, steps=1, tensors=["module.output"])
    found = {(record.name, record.call, record.path): record for record in tensors_of(records)}
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert found["linear", 0, ""].l2 == pytest.approx(float(x.norm()), rel=1e-6)
    assert found["linear", 1, ""].l2 == pytest.approx(float(x.norm()), rel=1e-6)
    assert found["nested", 0, "sample"].l2 == pytest.approx(float((4 * x).norm()), rel=1e-6)
    assert found["nested", 0, "extra[0]"].l2 == pytest.approx(float((2 * x).sum()), rel=1e-6)
    mask = found["nested", 0, "extra[1].mask"]
    assert mask.l2 is None
    assert "bool" in mask.skipped
    assert {name for name, _, _ in found} == {"linear", "nested", "block", "block.0"}


def test_the_order_of_execution_is_numbered_over_modules_and_tensors(tmp_path):
    records, _ = train(tmp_path, steps=1, tensors=["module.output"])
    modules = [(record.seq, record.name) for record in records if type(record).__name__ == "ModuleRecord"]
    tensors = [(record.seq, record.name) for record in tensors_of(records)]
    numbers = [seq for seq, _ in modules + tensors]
    assert sorted(numbers) == list(range(len(numbers)))
    assert [name for _, name in sorted(tensors)][:4] == ["block.0", "block", "linear", "linear"]


def test_leaf_selects_modules_without_children_and_a_glob_selects_by_path(tmp_path):
    leaves, _ = train(tmp_path / "leaf", steps=1, tensors=["module.output:@leaf"])
    assert {record.name for record in tensors_of(leaves)} == {"linear", "nested", "block.0"}
    globbed, _ = train(tmp_path / "glob", steps=1, tensors=["module.output:block*"])
    assert {record.name for record in tensors_of(globbed)} == {"block", "block.0"}


def test_steps_that_are_not_selected_carry_no_hook(tmp_path):
    seen = []

    class Looking(Network):
        def forward(self, x):
            seen.append(len(self.block[0]._forward_hooks))
            return super().forward(x)

    with capture(tensors=["module.output:block.0"], steps="1,4:5") as records:
        trainer = build_trainer(tmp_path, model=Looking(), steps=6, lr=0.0)
        trainer.train()
    assert {record.step for record in tensors_of(records)} == {1, 4}
    assert seen[2] == seen[3] == seen[5] == 0
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_counted_where_it_first_appears(tmp_path, bad):
    dataset = Repeated([{"x": torch.tensor([3.0, bad])}], 1)
    records, _ = train(tmp_path, dataset=dataset, tensors=["module.output:linear"])
    first = tensors_of(records)[0]
    counts = {"nan": first.nan, "posinf": first.posinf, "neginf": first.neginf}
    expected = torch.nn.functional.linear(torch.tensor([[3.0, bad]]), torch.eye(2))
    assert counts == {
        "nan": int(expected.isnan().sum()),
        "posinf": int(expected.isposinf().sum()),
        "neginf": int(expected.isneginf().sum()),
    }
    assert math.isfinite(first.l2)


def test_recording_every_output_leaves_the_training_bit_identical(on_and_off):
    settings = json.dumps({"steps": 6, "optimizer": "AdamW", "options": {"grad_clip": {"max_norm": 1.0}}})
    _, on = on_and_off("train_known.py", settings, environment={"MSPROBE_TENSORS": "module.output\nparam.grad"})
    outputs = [record for record in on.records() if record["kind"] == "tensor" and record["role"] == "module.output"]
    assert len(outputs) == 6


def test_a_pattern_that_selects_nothing_ends_the_script_before_training_with_the_names_that_come_near(tmp_path, capfd):
    with pytest.raises(NothingSelected) as raised:
        train(tmp_path, steps=1, tensors=["module.output:lineal", "param.grad:block.*"])
    assert raised.value.code == 2
    assert "module.output:lineal selects nothing in this model; near it are linear" in capfd.readouterr().err
    assert not running()


def test_the_summary_names_the_first_module_output_that_was_not_finite(zygote, tmp_path):
    run = zygote.run(
        "train_not_finite.py", folder=tmp_path, trace=True, environment={"MSPROBE_TENSORS": "module.output\nparam.grad"}
    ).check()
    page = subprocess.run([sys.executable, "-m", "msprobe", "summary", str(run.trace())], capture_output=True, text=True, check=True).stdout
    text = " ".join(page.split())
    assert "Step 2: the loss was NaN" in text
    assert "first module output that was not finite is that of body.inner (call 0): 1 NaN among 4 values" in text
    assert "run again" not in text
