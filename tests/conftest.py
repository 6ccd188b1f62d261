"""Shared fixtures: a process to fork programs from, the tiny Stable Diffusion, and the comparison of a run with msprobe on and off."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
sys.path[:0] = [str(TESTS), str(PROGRAMS)]

CLEAN_ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("MSPROBE_")},
    "PYTHONPATH": str(PROGRAMS),
    "MODELSCOPE_LOG_LEVEL": "20",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Finished:
    """A program that has run: exit status (negative for a signal), what it printed, where it ran."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    def check(self):
        """Return this, or fail with the program's stderr."""
        assert self.status == 0, self.stderr[-4000:]
        return self

    def trace(self):
        """Return the path of the only run folder that the program left."""
        (folder,) = (self.folder / "msprobe-runs").iterdir()
        return folder

    def records(self, rank=0):
        """Return the records of a rank as plain dicts, read with the standard library and strictly."""
        return strict_records(self.trace() / f"rank{rank:05d}.jsonl")


def strict_records(path):
    """Read a trace file line by line with a parser that refuses what is not JSON."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = Path(path).read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    return [json.loads(line, parse_constant=refuse) for line in lines]


class Zygote:
    """Forks programs from a process that has done the slow imports (see zygote_server.py)."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(TESTS / "zygote_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=CLEAN_ENVIRONMENT,
        )
        self._answer("ready")

    def run(self, program, *arguments, folder, trace=False, environment=None):
        """Run a program of tests/programs (or any path) in `folder`, with msprobe as under `msprobe trace` or without."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        script = PROGRAMS / program
        request = {
            "argv": [str(script), *map(str, arguments)],
            "cwd": str(folder),
            "environment": environment or {},
            "stdout": str(folder / "stdout.txt"),
            "stderr": str(folder / "stderr.txt"),
            "trace": trace,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = os.waitstatus_to_exitcode(self._answer("status"))
        return Finished(status, (folder / "stdout.txt").read_text(), (folder / "stderr.txt").read_text(errors="replace"), folder)

    def _answer(self, key):
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict) and key in answer:
                return answer[key]
        raise AssertionError("the zygote is gone")

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def zygote():
    """A process to fork programs from."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def stable_diffusion(tmp_path_factory):
    """The folder that make_stable_diffusion.py writes: `model` and `pictures`."""
    folder = tmp_path_factory.mktemp("stable-diffusion")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_stable_diffusion.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def on_and_off(zygote, tmp_path):
    """Run a program twice in processes of their own, without and with msprobe, check that nothing differs, and return both runs.

    The program writes what must not differ (losses, parameters, optimizer state, random states) to the file that is its first argument.
    Compared besides: exit status, stdout, stderr but for msprobe's own lines, and ModelScope's log.
    """
    from comparison import assert_same_run

    def run(program, *arguments, environment=None):
        off = zygote.run(program, "state.pt", *arguments, folder=tmp_path / "off" / "run")
        on = zygote.run(program, "state.pt", *arguments, folder=tmp_path / "on" / "run", trace=True, environment=environment)
        off.check()
        on.check()
        assert_same_run(off, on)
        return off, on

    return run
