"""`msprobe trace`: the script sees what plain python shows it, and every way of starting gives the same trace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CLEAN_ENVIRONMENT, PROGRAMS, strict_records

PLAIN = PROGRAMS / "plain_program.py"
BIN = Path(sys.executable).parent


def run(*command, folder, environment=None, **options):
    """Run a command in a folder; the interpreter's own folder is first in PATH, as in an activated environment."""
    variables = {**CLEAN_ENVIRONMENT, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **(environment or {})}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False, **options
    )


def trace(*words, folder, environment=None, **options):
    return run(sys.executable, "-m", "msprobe", "trace", *words, folder=folder, environment=environment, **options)


def own_lines(text):
    return [line for line in text.splitlines() if line.startswith("msprobe:")]


def other_lines(text):
    return [line for line in text.splitlines() if not line.startswith("msprobe:")]


def python_and_traced(*words, folder, environment=None, **options):
    """Run something with python, and the same under `msprobe trace`."""
    plain = run(sys.executable, *words, folder=folder, environment=environment, **options)
    traced = trace(*words, folder=folder, environment=environment, **options)
    return plain, traced


def assert_same(plain, traced):
    assert traced.returncode == plain.returncode
    assert traced.stdout == plain.stdout
    assert other_lines(traced.stderr) == plain.stderr.splitlines()


# What the script sees


def test_a_script_sees_what_plain_python_shows_it(tmp_path):
    plain, traced = python_and_traced(PLAIN, "--lr", "1e-5", folder=tmp_path)
    assert_same(plain, traced)
    seen = json.loads(traced.stdout)
    assert seen["argv"] == [str(PLAIN), "--lr", "1e-5"]
    assert seen["path"][0] == str(PROGRAMS)
    assert seen["main"]["__file__"] == str(PLAIN)


@pytest.mark.parametrize("option", ["--help", "-h", "-o", "--out", "--name", "-q", "-m", "--", "--version", "--strict"])
def test_an_option_after_the_script_is_the_scripts(option, tmp_path):
    plain, traced = python_and_traced(PLAIN, option, "value", folder=tmp_path)
    assert_same(plain, traced)
    assert json.loads(traced.stdout)["argv"][1:] == [option, "value"]


def test_a_double_dash_before_the_script_is_optional(tmp_path):
    assert trace("--name", "one", "--", PLAIN, "x", folder=tmp_path).stdout == trace("--name", "two", PLAIN, "x", folder=tmp_path).stdout


def test_a_module_with_a_relative_import_runs(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "answer.py").write_text("ANSWER = 42\n")
    (package / "train.py").write_text("import sys\nfrom .answer import ANSWER\nprint(ANSWER, sys.argv, __package__, sys.path[0])\n")
    plain, traced = python_and_traced("-m", "package.train", "-m", "--epochs=2", folder=tmp_path)
    assert_same(plain, traced)
    assert traced.stdout.startswith("42 ")


def test_standard_input_reaches_the_script(tmp_path):
    plain, traced = python_and_traced(PLAIN, "--read", folder=tmp_path, input="a line\n")
    assert_same(plain, traced)
    assert json.loads(traced.stdout)["input"] == "a line\n"


def test_a_program_on_standard_input_runs(tmp_path):
    plain, traced = python_and_traced("-", "x", folder=tmp_path, input="import sys; print(sys.argv)\n")
    assert_same(plain, traced)
    assert traced.stdout == "['-', 'x']\n"


def test_a_folder_with_a_main_module_runs(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys; print('main', sys.argv, __name__)\n")
    plain, traced = python_and_traced("app", "1", folder=tmp_path)
    assert_same(plain, traced)


def test_flags_of_the_interpreter_reach_the_script(tmp_path):
    plain = run(sys.executable, "-O", "-X", "dev", PLAIN, folder=tmp_path)
    traced = run(sys.executable, "-O", "-X", "dev", "-m", "msprobe", "trace", PLAIN, folder=tmp_path)
    assert json.loads(traced.stdout)["flags"] == json.loads(plain.stdout)["flags"]


def test_a_command_in_front_of_the_script_runs(tmp_path):
    plain = run("python", "-X", "utf8", PLAIN, "x", folder=tmp_path)
    traced = trace("python", "-X", "utf8", PLAIN, "x", folder=tmp_path)
    assert_same(plain, traced)


def test_tracing_a_trace_is_tracing(tmp_path):
    plain = run("python", PLAIN, "x", folder=tmp_path)
    traced = trace("msprobe", "trace", "python", PLAIN, "x", folder=tmp_path)
    assert_same(plain, traced)
    first, last = own_lines(traced.stderr)
    assert "recording to" in first
    assert "no ModelScope trainer ran" in last


def test_the_second_name_of_the_command_is_the_same(tmp_path):
    done = run("modelscope-probe", "trace", PLAIN, "x", folder=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["argv"] == [str(PLAIN), "x"]


# How it ends


@pytest.mark.parametrize("end", ["0", "3", "text", "exception", "killed"])
def test_the_exit_status_is_the_scripts(end, tmp_path):
    plain, traced = python_and_traced(PLAIN, "--end", end, folder=tmp_path)
    assert_same(plain, traced)


def test_a_missing_script_is_reported_by_python(tmp_path):
    plain, traced = python_and_traced("missing.py", "--x", folder=tmp_path)
    assert traced.returncode == 2
    assert "can't open file" in traced.stderr
    assert_same(plain, traced)
    assert not (tmp_path / "msprobe-runs").exists()


def test_a_missing_command_is_one_line(tmp_path):
    done = trace("no-such-command", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "msprobe: no-such-command: there is no such script or command\n"


@pytest.mark.parametrize("words", [[], ["--"], ["-m"], ["-q"]])
def test_nothing_to_run_is_one_line(words, tmp_path):
    done = trace(*words, folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "nothing to run" in line


def test_a_program_that_never_trains_ends_with_a_line_and_leaves_no_folder(tmp_path):
    done = trace(PLAIN, folder=tmp_path)
    first, last = own_lines(done.stderr)
    assert first.startswith(f"msprobe: recording to {tmp_path / 'msprobe-runs'}/")
    assert "no ModelScope trainer ran" in last
    assert done.stderr.splitlines() == [first, "a line for stderr", last]
    assert list((tmp_path / "msprobe-runs").iterdir()) == []


@pytest.mark.parametrize("option", ["-q", "--quiet"])
def test_quiet_says_nothing(option, tmp_path):
    done = trace(option, PLAIN, folder=tmp_path)
    assert done.stderr == "a line for stderr\n"
    assert list((tmp_path / "msprobe-runs").iterdir()) == []


def test_children_of_the_program_say_nothing(tmp_path):
    child = f"import subprocess, sys, os; subprocess.run([sys.executable, {str(PLAIN)!r}]); os.fork() or os._exit(0)"
    done = trace("python", "-c", child, folder=tmp_path)
    assert sum("no ModelScope trainer ran" in line for line in own_lines(done.stderr)) == 1


# Where the trace goes


def test_out_and_name_say_where(tmp_path):
    keeps = tmp_path / "keeps.py"
    keeps.write_text("import os; open(os.path.join(os.environ['MSPROBE_RUN_DIR'], 'kept'), 'w')\n")
    trace("--out", "some/where", "--name", "mine", keeps, folder=tmp_path)
    trace("--out", "some/where", "--name", "mine", keeps, folder=tmp_path)
    trace("--out", "some/where", keeps, folder=tmp_path)
    named, second, dated = sorted(
        (tmp_path / "some" / "where").iterdir(), key=lambda folder: (not folder.name.startswith("mine"), folder.name)
    )
    assert (named.name, second.name) == ("mine", "mine-2")
    assert dated.name.endswith("-keeps")


def test_an_environment_variable_says_where(tmp_path):
    keeps = tmp_path / "keeps.py"
    keeps.write_text("import os; open(os.path.join(os.environ['MSPROBE_RUN_DIR'], 'kept'), 'w')\n")
    trace(keeps, folder=tmp_path, environment={"MSPROBE_OUT": str(tmp_path / "there"), "MSPROBE_NAME": "mine"})
    assert (tmp_path / "there" / "mine" / "kept").exists()


@pytest.mark.parametrize("name", ["a/b", "/abs", "..", ".", ""])
def test_a_name_that_is_no_folder_name_is_refused(name, tmp_path):
    done = trace("--name", name, PLAIN, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_stops_before_the_script_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in ("file", "file/below", "/proc/none"):
        done = trace("--out", place, PLAIN, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert "cannot be written" in line
        assert place in line


# Real trainings: slow, since every process imports ModelScope


def without_times(record):
    """Return a step without what differs between two runs of the same training."""
    step = {key: value for key, value in record.items() if not key.endswith("_ns") and key != "memory"}
    step["phases"] = [{key: value for key, value in phase.items() if not key.endswith("_ns")} for phase in record["phases"]]
    return step


@pytest.fixture(scope="module")
def plain_training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return run(sys.executable, PROGRAMS / "train_quietly.py", "--steps", "3", folder=folder)


@pytest.fixture(scope="module")
def traced_training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    return trace("--name", "run", PROGRAMS / "train_quietly.py", "--steps", "3", folder=folder), folder


def steps_in(folder):
    (path,) = folder.rglob("rank00000.jsonl")
    return [without_times(record) for record in strict_records(path) if record["kind"] == "step"]


def test_a_traced_training_prints_and_ends_as_it_does_alone(plain_training, traced_training):
    done, folder = traced_training
    assert plain_training.returncode == 7
    assert done.returncode == 7
    assert done.stdout == plain_training.stdout
    assert "weights " in done.stdout
    (line,) = [line for line in own_lines(done.stderr) if "recorded 3 step(s)" in line]
    assert "no ModelScope trainer ran" not in done.stderr
    assert str(folder / "msprobe-runs" / "run") in line
    assert len(steps_in(folder)) == 3


TORCHRUN = ["torchrun", "--nproc-per-node", "1", "--master-port", "29653"]
WAYS = {
    "python": ["trace", "python", "{script}"],
    "torchrun": ["trace", *TORCHRUN, "{script}"],
    "in-torchrun": [*TORCHRUN, "-m", "msprobe", "trace", "{script}"],
    "enable": ["python", "{script}", "--enable"],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_starting_gives_the_same_steps(way, plain_training, traced_training, tmp_path):
    words = [word.format(script=PROGRAMS / "train_quietly.py") for word in WAYS[way]]
    start = trace if words[0] == "trace" else run
    done = start(*words[words[0] == "trace" :], "--steps", "3", folder=tmp_path)
    # torchrun has an exit status and a report of its own for a worker that fails.
    assert done.returncode == (1 if "torchrun" in words else 7)
    assert done.stdout == plain_training.stdout
    assert steps_in(tmp_path) == steps_in(traced_training[1])
    recorded = [line for line in own_lines(done.stderr) if "recorded 3 step(s)" in line]
    assert len(recorded) == 1
    assert "no ModelScope trainer ran" not in done.stderr
