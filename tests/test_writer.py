"""Writing records: whole lines whatever happens, and a disk that is full costs the trace and never the training."""

import contextlib
import errno
import json
import os
import subprocess

import pytest
from comparison import assert_same, modelscope_logs, without_times
from conftest import strict_records

from msprobe.schema import EventRecord
from msprobe.trace.writer import TraceWriter, open_rank_file


def record(number, text="text"):
    return EventRecord(code="test", level="info", at_ns=number, message=text)


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def writer(tmp_path, warnings):
    writer = TraceWriter(tmp_path / "rank00000.jsonl", warnings.append)
    yield writer
    writer.close()


def numbers(path):
    return [line["at_ns"] for line in strict_records(path)]


def test_a_record_is_one_write_of_one_line(writer, monkeypatch):
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: (written.append(bytes(data)), write(descriptor, data))[1])
    for number in range(3):
        writer.write(record(number, "two\nlines, 学习, \u2028"))
    assert len(written) == 3
    assert all(line.endswith(b"}\n") and line.count(b"\n") == 1 for line in written)
    assert numbers(writer.path) == [0, 1, 2]


def test_every_record_is_on_disk_before_the_next(writer):
    for number in range(5):
        writer.write(record(number))
        assert numbers(writer.path)[-1] == number


def test_an_existing_file_is_never_written_into(tmp_path, warnings):
    (tmp_path / "rank00003.jsonl").write_text("somebody's\n")
    writer = open_rank_file(tmp_path, 3, warnings.append)
    writer.write(record(0))
    assert writer.path.name == f"rank00003-{os.getpid()}.jsonl"
    assert numbers(writer.path) == [0]
    assert (tmp_path / "rank00003.jsonl").read_text() == "somebody's\n"


def test_a_forked_child_writes_nothing(writer):
    writer.write(record(0))
    child = os.fork()
    if child == 0:
        writer.write(record(1))
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.write(record(2))
    assert numbers(writer.path) == [0, 2]
    assert writer.dropped == 0


def test_programs_that_the_training_starts_do_not_inherit_the_file(writer):
    writer.write(record(0))
    listing = subprocess.run(["sh", "-c", "ls -l /proc/self/fd"], capture_output=True, text=True, close_fds=False, check=True)
    assert str(writer.path) not in listing.stdout


def test_the_files_permissions_follow_the_umask(tmp_path, warnings):
    before = os.umask(0o027)
    try:
        writer = TraceWriter(tmp_path / "file", warnings.append)
    finally:
        os.umask(before)
    assert writer.path.stat().st_mode & 0o777 == 0o640


def fail_writes(monkeypatch, number, takes=0):
    """Have every write fail with that error after having taken so many bytes once."""
    write = os.write
    left = [takes]

    def failing(descriptor, data):
        if left[0]:
            taken, left[0] = write(descriptor, data[: left[0]]), 0
            return taken
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", failing)


@pytest.mark.parametrize("takes", [0, 10], ids=["nothing", "a-piece"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT])
def test_what_cannot_be_written_is_counted_and_said_once_with_the_reason(number, takes, writer, warnings, monkeypatch):
    writer.write(record(0))
    with monkeypatch.context() as patch:
        fail_writes(patch, number, takes)
        for failed in range(3):
            writer.write(record(100 + failed))
    assert writer.dropped == 3
    (warning,) = warnings
    assert str(writer.path) in warning
    assert os.strerror(number) in warning
    writer.write(record(1))  # there is space again
    assert numbers(writer.path) == [0, 1]
    assert len(warnings) == 1


def test_a_torn_line_that_cannot_be_taken_back_is_the_last(writer, monkeypatch):
    writer.write(record(0))

    def refuses(descriptor, size):
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        fail_writes(patch, errno.ENOSPC, 10)
        patch.setattr(os, "ftruncate", refuses)
        writer.write(record(1))
    writer.write(record(2))
    first, torn = writer.path.read_bytes().split(b"\n")
    assert json.loads(first)["at_ns"] == 0
    assert len(torn) == 10
    assert writer.dropped == 2


def test_a_folder_that_is_gone_is_said_once(tmp_path, warnings):
    writer = TraceWriter(tmp_path / "gone" / "rank00000.jsonl", warnings.append)
    for number in range(3):
        writer.write(record(number))
    (warning,) = warnings
    assert "No such file" in warning
    assert writer.dropped == 3


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_same_but_the_trace(off, on):
    import torch

    off.check()
    on.check()
    assert_same(torch.load(off.folder / "state.pt", weights_only=False), torch.load(on.folder / "state.pt", weights_only=False))
    assert off.stdout == on.stdout
    assert without_times(off.stderr) == without_times(on.stderr)
    assert modelscope_logs(off.folder) == modelscope_logs(on.folder)


STEPS = 60


def test_a_disk_that_fills_up_costs_the_trace_and_not_the_training(zygote, tmp_path):
    settings = json.dumps({"steps": STEPS})
    off = zygote.run("train_known.py", "state.pt", settings, folder=tmp_path / "off" / "run")
    with small_disk(tmp_path / "disk", "32k") as disk:
        environment = {"MSPROBE_OUT": str(disk)}
        on = zygote.run("train_known.py", "state.pt", settings, folder=tmp_path / "on" / "run", trace=True, environment=environment)
        assert_same_but_the_trace(off, on)
        (path,) = disk.glob("*/rank00000.jsonl")
        records = strict_records(path)
    warnings = [line for line in on.stderr.splitlines() if line.startswith("msprobe:") and "recorded" not in line]
    (warning,) = warnings
    assert str(path) in warning
    assert "No space left on device" in warning
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert 0 < len(steps) < STEPS
    assert steps == list(range(len(steps)))


def test_a_limit_on_file_size_costs_the_trace_and_not_the_training(zygote, tmp_path):
    off = zygote.run("train_limited.py", "state.pt", folder=tmp_path / "off" / "run")
    on = zygote.run("train_limited.py", "state.pt", folder=tmp_path / "on" / "run", trace=True)
    assert_same_but_the_trace(off, on)
    records = on.records()
    (warning,) = [line for line in on.stderr.splitlines() if line.startswith("msprobe:") and "recorded" not in line]
    assert "File too large" in warning
    end = records[-1]
    kinds = [record["kind"] for record in records]
    # Per step a module, a norms and a step record; besides them the header, the model, four stages, and the end.
    assert end["kind"] == "end"
    assert end["dropped_records"] == 3 * STEPS + 6 - (len(records) - 1)
    assert end["dropped_records"] > 0
    assert 0 < kinds.count("step") < STEPS


def test_an_existing_trace_that_turns_into_a_folder_is_no_error_of_the_training(zygote, tmp_path):
    folder = tmp_path / "shared"
    (folder / "rank00000.jsonl").mkdir(parents=True)
    run = zygote.run("train_known.py", "state.pt", folder=tmp_path / "run", trace=True, environment={"MSPROBE_RUN_DIR": str(folder)})
    run.check()
    (path,) = [path for path in folder.iterdir() if path.is_file()]
    assert strict_records(path)[-1]["reason"] == "finished"
