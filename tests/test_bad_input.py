"""Installs and places that msprobe cannot work with: one line that says what is wrong, and nothing half done."""

import json
import os
import subprocess
import sys

import pytest
from conftest import CLEAN_ENVIRONMENT
from test_launch import own_lines, trace

BROKEN_IMPORT = "cannot import name 'LargeList' from 'datasets'"


def python(code, folder, *path):
    environment = {**CLEAN_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def stub(folder, files):
    """Write a package `modelscope` that is found before the real one."""
    for name, text in files.items():
        path = folder / "stub" / "modelscope" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "stub"


TELL = """
import json, msprobe
try:
    msprobe.enable()
except msprobe.HostError as error:
    found = {"type": type(error).__name__, "text": str(error), "cause": [type(error.__cause__).__name__, str(error.__cause__)]}
    import torch
    from torch.optim import optimizer
    found["hooks"] = len(optimizer._global_optimizer_pre_hooks)
    print(json.dumps(found))
"""


def test_a_modelscope_that_cannot_be_imported_is_an_error_with_the_reason(tmp_path):
    path = stub(tmp_path, {"__init__.py": f"raise ImportError({BROKEN_IMPORT!r})"})
    done = python(TELL, tmp_path, path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["type"] == "HostError"
    assert BROKEN_IMPORT in found["text"]
    assert "\n" not in found["text"]
    assert found["cause"] == ["ImportError", BROKEN_IMPORT]
    assert found["hooks"] == 0
    assert not (tmp_path / "msprobe-runs").exists()


def test_no_modelscope_at_all_is_named(tmp_path):
    done = python("import sys; sys.modules['modelscope'] = None\n" + TELL, tmp_path)
    found = json.loads(done.stdout)
    assert "modelscope" in found["text"]
    assert found["cause"][0] == "ModuleNotFoundError"


def test_a_modelscope_from_before_processors_is_named_as_too_old(tmp_path):
    hooks = {f"trainers/hooks/{name}.py": "HOOKS = Hook = Priority = get_priority = None" for name in ("builder", "hook", "priority")}
    files = {"__init__.py": "", "trainers/__init__.py": "", "trainers/hooks/__init__.py": "", **hooks}
    done = python(TELL, tmp_path, stub(tmp_path, files))
    found = json.loads(done.stdout)
    assert "too old" in found["text"]
    assert "1.9.5" in found["text"]


TRIES = (
    "try:\n    import modelscope.trainers.trainer\nexcept ImportError as error:\n    print('script saw', error)\nprint('script ran on')\n"
)


def test_under_trace_the_script_runs_on_where_modelscope_cannot_be_imported(tmp_path):
    path = stub(tmp_path, {"__init__.py": f"raise ImportError({BROKEN_IMPORT!r})"})
    (tmp_path / "script.py").write_text(TRIES)
    done = trace("script.py", folder=tmp_path, environment={"PYTHONPATH": str(path)})
    assert done.returncode == 0
    assert done.stdout == f"script saw {BROKEN_IMPORT}\nscript ran on\n"
    assert "nothing was recorded" in own_lines(done.stderr)[-1]


def test_under_trace_the_script_runs_on_where_msprobe_cannot_be_enabled(tmp_path):
    files = {
        "__init__.py": "",
        "trainers/__init__.py": "",
        "trainers/trainer.py": "class EpochBasedTrainer:\n    pass\n",
        "trainers/hooks/__init__.py": f"raise ImportError({BROKEN_IMPORT!r})",
    }
    path = stub(tmp_path, files)
    (tmp_path / "script.py").write_text(TRIES)
    done = trace("script.py", folder=tmp_path, environment={"PYTHONPATH": str(path)})
    assert (done.returncode, done.stdout) == (0, "script ran on\n")
    (line,) = [line for line in own_lines(done.stderr) if "nothing is recorded" in line]
    assert BROKEN_IMPORT in line
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line]


def test_a_strict_trace_ends_where_msprobe_cannot_be_enabled(tmp_path):
    files = {
        "__init__.py": "",
        "trainers/__init__.py": "",
        "trainers/trainer.py": "",
        "trainers/hooks/__init__.py": f"raise ImportError({BROKEN_IMPORT!r})",
    }
    (tmp_path / "script.py").write_text("import modelscope.trainers.trainer\n")
    done = trace("--strict", "script.py", folder=tmp_path, environment={"PYTHONPATH": str(stub(tmp_path, files))})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("msprobe.errors.HostError: ")


# In this process, with the real ModelScope


@pytest.fixture
def installed():
    """What `enable()` would replace."""
    from modelscope.trainers.trainer import EpochBasedTrainer

    import msprobe

    before = vars(EpochBasedTrainer)["train"]
    assert not msprobe.is_enabled()
    yield
    assert not msprobe.is_enabled()
    assert vars(EpochBasedTrainer)["train"] is before


@pytest.mark.usefixtures("installed")
def test_a_modelscope_without_set_processor_is_refused(monkeypatch, tmp_path):
    from modelscope.trainers.hooks.optimizer.base import OptimizerHook

    import msprobe

    monkeypatch.delattr(OptimizerHook, "set_processor")
    with pytest.raises(msprobe.HostError) as caught:
        msprobe.enable(out=tmp_path)
    message = str(caught.value)
    from importlib.metadata import version

    assert version("modelscope") in message
    assert "1.9.5" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_installed(place, tmp_path):
    import msprobe

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(msprobe.UsageError) as caught:
        msprobe.enable(out=tmp_path / place)
    message = str(caught.value)
    assert place in message
    assert "cannot be written" in message
    assert "--out" in message
    assert "\n" not in message
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"name": "a/b"}, "a/b"),
        ({"name": ""}, "name"),
        ({"tensors": ["param.gard"]}, "param.gard"),
        ({"tensors": 3}, "tensors"),
        ({"steps": "every second"}, "every second"),
        ({"strict": "perhaps"}, "perhaps"),
        ({"out": 7}, "7"),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused(settings, word, tmp_path, monkeypatch):
    import msprobe

    monkeypatch.chdir(tmp_path)
    with pytest.raises(msprobe.UsageError) as caught:
        msprobe.enable(**settings)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_a_variable_that_makes_no_sense_is_named(tmp_path, monkeypatch):
    import msprobe

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSPROBE_STEPS", "every second")
    with pytest.raises(msprobe.UsageError, match="MSPROBE_STEPS"):
        msprobe.enable()
