"""Run folders: whose they are, what they are called, and that no run ever writes into another's."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CLEAN_ENVIRONMENT, PROGRAMS, strict_records

from msprobe.errors import UsageError
from msprobe.trace.folder import check_writable, join_run_folder, make_run_folder, rank_of, script_stem

ALONE = {}


def launched(rank, **more):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "node7", "MASTER_PORT": "29500", **more}


def test_a_folder_has_the_time_and_the_scripts_name(tmp_path):
    folder = make_run_folder(tmp_path / "deep" / "down", None, "train", ALONE)
    assert folder.parent == tmp_path / "deep" / "down"
    date, time, stem = folder.name.split("-")
    assert (len(date), len(time), stem) == (8, 6, "train")
    assert list(folder.iterdir()) == []


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    names = [make_run_folder(tmp_path, "mine", "train", ALONE).name for _ in range(4)]
    assert names == ["mine", "mine-2", "mine-3", "mine-4"]


def make_one(out):
    return make_run_folder(Path(out), "same", "train", ALONE).name


def test_processes_that_want_one_name_at_once_get_folders_of_their_own(tmp_path):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        names = pool.map(make_one, [str(tmp_path)] * 40, chunksize=1)
    assert sorted(names, key=lambda name: (len(name), name)) == ["same", *(f"same-{number}" for number in range(2, 41))]


@pytest.mark.parametrize("name", ["mine", None])
def test_the_ranks_of_a_launch_share_a_folder(name, tmp_path):
    first = make_run_folder(tmp_path, name, "train", launched(0))
    assert make_run_folder(tmp_path, name, "train", launched(1)) == first
    assert first.is_dir()


def test_the_next_launch_of_the_same_name_gets_its_own_folder(tmp_path):
    folders = []
    for _ in range(2):
        for rank in range(2):
            folders.append(make_run_folder(tmp_path, None, "train", launched(rank)))
            (folders[-1] / f"rank{rank:05d}.jsonl").touch()
    assert folders[0] == folders[1]
    assert folders[2] == folders[3]
    assert folders[0] != folders[2]


def test_what_a_launcher_calls_itself_keeps_launches_apart(tmp_path):
    folders = {
        make_run_folder(tmp_path, None, "train", launched(0, **more))
        for more in (
            {},
            {"MASTER_PORT": "29501"},
            {"MASTER_ADDR": "10.0.0.2"},
            {"TORCHELASTIC_RUN_ID": "job-17"},
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
        )
    }
    assert len(folders) == 5
    assert any("job-17" in folder.name for folder in folders)
    assert all(folder.parent == tmp_path for folder in folders)


@pytest.mark.parametrize("run_id", ["../../etc", "a/b", "..", "/abs", "x\0y", "a b\nc"])
def test_a_launchers_name_never_leads_elsewhere(run_id, tmp_path):
    folder = make_run_folder(tmp_path, None, "train", launched(0, TORCHELASTIC_RUN_ID=run_id))
    assert folder.parent == tmp_path


def test_one_process_under_torchrun_is_a_launch_too(tmp_path):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "4711"}
    assert "4711" in make_run_folder(tmp_path, None, "train", environment).name


@pytest.mark.parametrize(
    ("argv", "stem"),
    [
        (["/home/me/train.py"], "train"),
        (["fine tune (2).py"], "fine-tune-2"),
        (["微调.py"], "微调"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
        (["a\udcffb.py"], "a-b"),
    ],
)
def test_the_scripts_name_becomes_part_of_a_folder_name(argv, stem):
    assert script_stem(argv) == stem


@pytest.mark.parametrize("variables", [{}, {"RANK": "x", "WORLD_SIZE": ""}])
def test_no_launcher_is_rank_0_of_1(variables):
    assert rank_of(variables) == (0, 1, 0)


def test_places_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    attempts = [
        lambda: make_run_folder(tmp_path / "file", None, "train", ALONE),
        lambda: make_run_folder(tmp_path / "file" / "below", None, "train", ALONE),
        lambda: make_run_folder(Path("/proc/none"), None, "train", ALONE),
        lambda: join_run_folder(tmp_path / "file"),
        lambda: join_run_folder(Path("/proc/none")),
        lambda: check_writable(tmp_path / "absent"),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert "--out" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_of_the_wanted_name_is_in_nobodys_way(tmp_path):
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(UsageError, match="File exists"):
        make_run_folder(tmp_path, "mine", "train", ALONE)
    assert (tmp_path / "mine").read_text() == "a file"


# What processes of a training do with it


def test_workers_that_load_data_write_nothing(on_and_off):
    loader = {"batch_size_per_gpu": 1, "workers_per_gpu": 2, "shuffle": False}
    _, on = on_and_off("train_known.py", json.dumps({"steps": 6, "dataloader": loader}))
    assert [path.name for path in on.trace().iterdir()] == ["rank00000.jsonl"]
    records = on.records()
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(6))
    assert [record["kind"] for record in records].count("run") == 1


def test_a_forked_child_that_trains_has_a_file_of_its_own(zygote, tmp_path):
    run = zygote.run("train_forked.py", folder=tmp_path / "run").check()
    folders = sorted((run.folder / "msprobe-runs").iterdir())
    assert len(folders) == 2
    steps = []
    for folder in folders:
        records = strict_records(folder / "rank00000.jsonl")
        steps.append([record["step"] for record in records if record["kind"] == "step"])
        assert records[-1]["reason"] == "finished"
    assert sorted(steps) == [[0, 1, 2], [0, 1, 2, 3]]


def test_a_second_training_process_of_one_rank_gets_a_file_beside_the_first(zygote, tmp_path):
    shared = {"MSPROBE_RUN_DIR": str(tmp_path / "shared")}
    for name in ("one", "two"):
        zygote.run("train_known.py", "state.pt", folder=tmp_path / name, trace=True, environment=shared).check()
    names = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert len(names) == 2
    assert "rank00000.jsonl" in names
    for name in names:
        assert strict_records(tmp_path / "shared" / name)[-1]["reason"] == "finished"


def test_any_name_and_argument_survives_in_an_ascii_locale(tmp_path):
    folder = tmp_path / "微调 🤖"
    folder.mkdir()
    environment = {**CLEAN_ENVIRONMENT, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["--steps", "2", "学习".encode(), "🎉".encode(), b"\xff\xfe"]
    command = [sys.executable, "-m", "msprobe", "trace", str(PROGRAMS / "train_quietly.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr.decode(errors="replace")
    (path,) = (folder / "msprobe-runs").glob("*/rank00000.jsonl")
    records = strict_records(path)
    # What the system handed over as bytes comes back as those bytes.
    assert [
        os.fsencode(word) if word.isascii() else word.encode("utf-8", "surrogateescape") for word in records[0]["argv"][3:]
    ] == arguments[2:]
    assert records[0]["cwd"].encode("utf-8", "surrogateescape").decode() == str(folder)
    assert [record["step"] for record in records if record["kind"] == "step"] == [0, 1]
    reading = subprocess.run(
        [sys.executable, "-m", "msprobe", "summary", "--json"], cwd=folder, env=environment, capture_output=True, timeout=120, check=False
    )
    assert reading.returncode == 0, reading.stderr
    json.loads(reading.stdout)
