from __future__ import annotations

import sys
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest
from invocation import invoke, strict

from msprobe.analysis import environment
from msprobe.errors import HostError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Nothing of ModelScope is imported unless a test says so."""
    monkeypatch.delenv("COLUMNS", raising=False)
    survey_of(monkeypatch, lambda: [])


def survey_of(monkeypatch, survey):
    module = ModuleType("msprobe.host.trainers")
    module.survey = survey
    monkeypatch.setitem(sys.modules, "msprobe.host.trainers", module)


def without(monkeypatch, *names):
    found = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda name: None if name in names else found(name))
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def text(capsys) -> str:
    outcome = invoke(capsys, "doctor")
    assert outcome.status == 0
    return " ".join(outcome.out.split())


def test_versions_are_those_of_the_installed_distributions(capsys):
    answer = strict(invoke(capsys, "doctor", "--json").out)
    assert answer["versions"]["rich"] == version("rich")
    assert answer["versions"]["msgspec"] == version("msgspec")
    assert answer["python"] == ".".join(map(str, sys.version_info[:3]))


def test_without_torch_and_modelscope_it_says_so_and_succeeds(capsys, monkeypatch):
    without(monkeypatch, "torch", "modelscope")
    out = text(capsys)
    assert "torch not installed" in out
    assert "no device can be asked for" in out
    assert "nothing can be recorded here: torch and modelscope not installed" in out


def test_a_broken_torch_is_an_answer_and_no_crash(capsys, monkeypatch):
    broken = ModuleType("torch")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(OSError("libcudart.so.12: cannot open"))
    monkeypatch.setitem(sys.modules, "torch", broken)
    assert "torch cannot list devices: OSError: libcudart.so.12" in text(capsys)


def test_trainers_are_listed_with_their_reasons(capsys, monkeypatch):
    found = [
        SimpleNamespace(name="EpochBasedTrainer", traceable=True, reason="trains by the common loop"),
        SimpleNamespace(name="OwnLoop", traceable=False, reason="has a train() of its own"),
        SimpleNamespace(name="Other", traceable=False, reason="has a train() of its own"),
    ]
    survey_of(monkeypatch, lambda: found)
    out = text(capsys)
    assert "1 trainer of 3 can be recorded." in out
    assert "not recorded: has a train() of its own OwnLoop, Other" in out
    assert "recorded: trains by the common loop EpochBasedTrainer" in out


def test_a_host_that_cannot_be_imported_is_a_line(capsys, monkeypatch):
    def survey():
        print("a library greets")
        raise HostError("ModelScope cannot be imported: No module named 'x'")

    survey_of(monkeypatch, survey)
    outcome = invoke(capsys, "doctor", "--json")
    assert strict(outcome.out)["trainer_problem"] == "ModelScope cannot be imported: No module named 'x'"
    assert "a library greets" in outcome.err


def test_a_name_clash_names_both_distributions_and_the_way_out(capsys, monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda name: "8.1" if name == "mindstudio-probe" else "1.0")
    out = text(capsys)
    assert "modelscope-probe and mindstudio-probe 8.1 both install the package and the command msprobe and overwrite each other" in out
    assert "separate environments" in out


def test_a_missing_boot_file_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(environment.site, "getsitepackages", lambda: [])
    monkeypatch.setattr(environment.site, "ENABLE_USER_SITE", False)
    assert "modelscope_probe.pth is not seen by this interpreter" in text(capsys)


def test_the_boot_file_is_found_where_the_interpreter_looks(capsys, monkeypatch, tmp_path):
    (tmp_path / "modelscope_probe.pth").write_text("")
    (tmp_path / "_modelscope_probe_boot.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment.site, "getsitepackages", lambda: [str(tmp_path)])
    assert f"modelscope_probe.pth is seen by this interpreter: {tmp_path}" in text(capsys)
