from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import synthetic as made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invocation import ROOT, invoke, spawn, strict

from msprobe.commands import cli

VALUE = re.compile(rb'[:\[,]("[^"]*"|-?[0-9.]+|null|true|\[\]|\{\})(?=[,\]}])')
ODD_VALUES = [
    b"-1",
    b"0",
    b"9" * 24,
    b"null",
    b'"NaN"',
    b'"-Infinity"',
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"1e308",
    b'"\\u001b[2J"',
    b'"\\ud800"',
]
READING = [["summary"], ["show", "--step", "0"], ["hooks"]]


def test_help_lists_every_verb_with_a_line(capsys):
    outcome = invoke(capsys, "--help")
    assert outcome.status == 0
    for verb in ("trace", "summary", "show", "hooks", "doctor"):
        assert any(line.split()[:1] == [verb] and len(line.split()) > 3 for line in outcome.out.splitlines())


def test_no_verb_shows_the_help(capsys):
    assert invoke(capsys).out == invoke(capsys, "--help").out


def test_each_verb_has_help_of_its_own(capsys):
    for verb in ("summary", "show", "hooks", "doctor"):
        outcome = invoke(capsys, verb, "--help")
        assert outcome.status == 0
        assert "--json" in outcome.out


def test_the_version_is_that_of_the_distribution(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda: "1.2.3")
    outcome = invoke(capsys, "--version")
    assert (outcome.status, outcome.out) == (0, "msprobe 1.2.3\n")


@pytest.mark.parametrize("arguments", [["bogus"], ["summary", "--bogus"], ["show"], ["summary", "a", "b"], ["summary", "--rank", "x"]])
def test_wrong_usage_is_one_line_and_status_2(capsys, arguments):
    outcome = invoke(capsys, *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("msprobe: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("verb", READING)
def test_a_run_that_is_not_there_is_one_line_and_status_2(capsys, tmp_path, verb):
    outcome = invoke(capsys, *verb, tmp_path / "absent")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert "absent" in outcome.err


def test_a_message_never_spans_lines(capsys, tmp_path):
    outcome = invoke(capsys, "summary", tmp_path / "a\nb")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("verb", READING)
def test_json_is_strict_for_every_reading_verb(capsys, tmp_path, verb):
    outcome = invoke(capsys, *verb, made.write_run(tmp_path / "run", made.small_run()), "--json")
    assert outcome.status == 0
    assert isinstance(strict(outcome.out), dict)


def test_an_absurd_number_in_a_trace_is_one_line_and_status_2(capsys, tmp_path):
    data = made.lines([made.header(), made.model(), made.step(0), made.step(1)]).replace(b'"wall_ns":100000000', b'"wall_ns":' + b"9" * 400)
    outcome = invoke(capsys, "summary", made.write_run(tmp_path / "run", data))
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from([["summary"], ["show", "--step", "1"], ["hooks"], ["summary", "--json"]]))
def test_values_that_make_no_sense_never_end_in_a_traceback(capsys, tmp_path, random, verb):
    data = made.lines(made.small_run(2))
    for _ in range(3):
        start, end = random.choice([match.span(1) for match in VALUE.finditer(data)])
        data = data[:start] + random.choice(ODD_VALUES) + data[end:]
    outcome = invoke(capsys, *verb, made.write_run(tmp_path / "run", data))
    assert outcome.status in (0, 2)
    assert "Traceback" not in outcome.err


def test_an_interrupt_is_quiet_and_130(capsys, tmp_path, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert invoke(capsys, "summary") == (130, "", "")


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    folder = made.write_run(tmp_path / "run", made.small_run())
    code = f"import sys; from msprobe.commands.cli import main; sys.exit(main(['summary', {str(folder)!r}]))"
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    os.close(writing)
    assert process.stderr == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("verb", [*READING, ["show", "--step", "0", "--json"]])
def test_an_ascii_terminal_gets_escapes_instead_of_a_failure(tmp_path, verb):
    records = [made.header(), made.model(trainer="训练器", parameters=[made.parameter(0, "层\udc80")]), made.step(0), made.norms(0, (1.0,))]
    records[2].loss = {"损失_loss": 1.0}
    folder = made.write_run(tmp_path / "数据", records)
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = spawn("-m", "msprobe", *verb, folder, env=environment)
    assert (process.returncode, process.stderr) == (0, b"")
    process.stdout.decode("ascii")
    if "--json" in verb:
        assert strict(process.stdout.decode())["tensors"][0]["name"] == "层\udc80"
    if verb == ["summary"]:
        assert b"\\u8bad\\u7ec3\\u5668" in process.stdout


def test_unicode_names_are_shown_as_they_are(tmp_path):
    folder = made.write_run(tmp_path / "数据", [made.header(), made.model(trainer="训练器"), made.step(0), made.end(1)])
    process = spawn("-m", "msprobe", "summary", folder, env={"PYTHONIOENCODING": "utf-8"})
    assert "训练器" in process.stdout.decode("utf-8")


def test_reading_commands_load_neither_torch_nor_modelscope(tmp_path):
    folder = str(made.write_run(tmp_path / "run", made.small_run()))
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, modelscope=None, numpy=None)\n"
        "from msprobe.commands.cli import main\n"
        f"for verb in (['summary'], ['show', '--step', '0'], ['hooks']):\n    assert main([*verb, {folder!r}]) == 0\n"
        "assert 'msprobe.host' not in sys.modules, 'host'\n"
    )
    process = spawn("-c", code)
    assert process.returncode == 0, process.stderr


def test_help_does_not_load_the_verbs():
    process = spawn(
        "-c",
        "import sys; from msprobe.commands.cli import main; main(['--help']); print([m for m in ('rich', 'msgspec') if m in sys.modules])",
    )
    assert process.stdout.decode().splitlines()[-1] == "[]"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak of a process there")
def test_memory_does_not_grow_with_the_length_of_the_run(tmp_path):
    line = made.lines([made.step(7)])
    peaks = []
    for count in (2_000, 20_000):
        folder = made.write_run(tmp_path / f"run{count}", made.lines([made.header(), made.model()]) + line * count)
        # VmHWM, because the peak that getrusage tells includes this process's own at the time of the fork.
        code = (
            f"from msprobe.commands.cli import main; main(['summary', {str(folder)!r}])\n"
            "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
        )
        peaks.append(int(spawn("-c", code).stdout.split()[-1]))
    assert peaks[1] < 1.2 * peaks[0]
