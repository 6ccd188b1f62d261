"""Two processes that train one model: a file each in one folder, names without wrappers, norms of the averaged gradients."""

import itertools
import re
import socket

import pytest
from conftest import PROGRAMS, strict_records
from test_launch import own_lines, trace

import msprobe

STEPS = 20


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    launcher = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = trace("--name", "both", *launcher, PROGRAMS / "train_distributed.py", "--clip", folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done, folder / "msprobe-runs" / "both"


@pytest.fixture(scope="module")
def ranks(launched):
    return [strict_records(launched[1] / f"rank{rank:05d}.jsonl") for rank in range(2)]


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def test_each_rank_has_a_file_in_one_folder(launched, ranks):
    _, folder = launched
    assert sorted(path.name for path in folder.iterdir()) == ["rank00000.jsonl", "rank00001.jsonl"]
    for rank, records in enumerate(ranks):
        (header,) = of_kind(records, "run")
        assert (header["rank"], header["world_size"], header["local_rank"], header["run_id"]) == (rank, 2, rank, "both")
        assert [step["step"] for step in of_kind(records, "step")] == list(range(STEPS))
        assert (records[-1]["reason"], records[-1]["steps"]) == ("finished", STEPS)
    assert ranks[0][0]["pid"] != ranks[1][0]["pid"]


def test_names_have_no_wrapper_in_them(ranks):
    for records in ranks:
        (model,) = of_kind(records, "model")
        assert model["model_class"] == "Logged"
        assert [parameter["name"] for parameter in model["parameters"]] == ["linear.weight"]
        assert {record["name"] for record in of_kind(records, "module")} == {"linear"}


def test_norms_are_those_of_the_averaged_gradients_on_every_rank(ranks):
    # Alone, the one rank's gradient would have norm 10 and the other's 0; what the optimizer takes is [3, 4].
    for records in ranks:
        for step in of_kind(records, "step"):
            assert step["grad_norm"]["before_clip"] == pytest.approx(5.0, rel=1e-6)
            assert step["grad_norm"]["after_clip"] == pytest.approx(1.0, rel=1e-5)
        assert [norms["l2"] for norms in of_kind(records, "norms")] == [[pytest.approx(5.0, rel=1e-6)]] * STEPS


def test_losses_are_each_ranks_own(ranks):
    first, second = (([step["loss"]["loss"] for step in of_kind(records, "step")]) for records in ranks)
    assert first[0] == second[0] == 0
    assert all(later < earlier for earlier, later in itertools.pairwise(first))
    assert set(second) == {0}


def test_the_launch_says_once_where_the_trace_is(launched):
    done, folder = launched
    assert sum("recorded" in line and str(folder) in line for line in own_lines(done.stderr)) == 1
    assert "no ModelScope trainer ran" not in done.stderr
    # Two processes write to one stdout, and now and then into one line.
    assert sorted(re.findall(r"weights (\d)", done.stdout)) == ["0", "1"]


def test_the_reader_hands_out_both_ranks(launched):
    run = msprobe.read(launched[1])
    assert len(list(run.steps())) == 2 * STEPS
