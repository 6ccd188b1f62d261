from __future__ import annotations

import json
import math
import os

import pytest
import synthetic as made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msprobe import codec, schema
from msprobe.errors import TraceError
from msprobe.trace import lines as trace_lines
from msprobe.trace.reader import read

TRACE = made.lines(
    [made.header(cwd="/数据"), made.model(), made.norms(0), made.step(0), made.event(index=0, message="提示 🐱"), made.end(1)]
)


def damage_of(run):
    return [(damage.line, damage.at_tail) for damage in run.damage]


def good(data: bytes) -> int:
    """Count, with the standard parser, the lines that are whole JSON objects."""
    count = 0
    for line in data.split(b"\n"):
        try:
            count += isinstance(json.loads(line), dict)
        except ValueError:
            continue
    return count


def test_every_kind_is_handed_out_as_its_struct(tmp_path):
    records = made.small_run(2)
    run = read(made.write_run(tmp_path / "run", records))
    assert list(run.records()) == records
    by_kind = {
        schema.RunRecord: run.headers,
        schema.ModelRecord: run.models,
        schema.StepRecord: run.steps,
        schema.StageRecord: run.stages,
        schema.ModuleRecord: run.modules,
        schema.NormsRecord: run.norms,
        schema.EventRecord: run.events,
        schema.EndRecord: run.ends,
    }
    for kind, iterator in by_kind.items():
        assert list(iterator()) == [record for record in records if type(record) is kind], kind
    assert run.damage == []


def test_iterators_read_the_disk_anew_each_time(tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header(), made.step(0)])
    run = read(folder)
    assert [step.step for step in run.steps()] == [0]
    with (folder / "rank00000.jsonl").open("ab") as file:
        file.write(made.lines([made.step(1)]))
    assert [step.step for step in run.steps()] == [0, 1]


def test_ranks_and_later_processes_of_a_rank_are_read_in_order(tmp_path):
    for name in ("rank00010.jsonl", "rank00000-77.jsonl", "rank00002.jsonl", "rank00000.jsonl", "notes.jsonl", "rank1.txt"):
        made.write_run(tmp_path / "run", [made.header()], name)
    (tmp_path / "run" / "tensors").mkdir()
    run = read(tmp_path / "run")
    assert [file.name for file in run.files] == ["rank00000.jsonl", "rank00000-77.jsonl", "rank00002.jsonl", "rank00010.jsonl"]
    assert [file.rank for file in run.files] == [0, 0, 2, 10]


def test_a_single_file_is_a_run(tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header(), made.step(3)], "rank00001.jsonl")
    run = read(folder / "rank00001.jsonl")
    assert [step.step for step in run.steps()] == [3]
    assert run.files[0].rank == 1


def test_the_default_is_the_run_that_started_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, started in (("zz-old", 1), ("aa-new", 3), ("mm", 2)):
        made.write_run(tmp_path / "msprobe-runs" / name, [made.header(started_unix_ns=started)])
    (tmp_path / "msprobe-runs" / "empty").mkdir()
    os.utime(tmp_path / "msprobe-runs" / "zz-old" / "rank00000.jsonl", (2**31, 2**31))
    assert read().path.name == "aa-new"


@pytest.mark.parametrize("prepare", [lambda path: None, lambda path: (path / "msprobe-runs").mkdir()])
def test_without_any_run_the_error_says_what_was_looked_for(tmp_path, monkeypatch, prepare):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    with pytest.raises(TraceError, match=r"msprobe-runs.*rank\*\.jsonl.*msprobe trace"):
        read()


def test_what_is_no_run_is_refused_in_one_line_that_says_what_to_do(tmp_path):
    (tmp_path / "folder").mkdir()
    made.write_run(tmp_path / "parent" / "inner", [made.header()])
    for path, words in ((tmp_path / "folder", r"rank\*\.jsonl"), (tmp_path / "absent", "there is no"), (tmp_path / "parent", "inner")):
        with pytest.raises(TraceError, match=words) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_a_trace_error(tmp_path):
    folder = made.write_run(tmp_path / "run", [made.header()])
    (folder / "rank00000.jsonl").chmod(0)
    with pytest.raises(TraceError, match="Permission denied"):
        list(read(folder).records())


def test_nonfinite_numbers_come_back_as_floats(tmp_path):
    run = read(made.write_run(tmp_path / "run", [made.step(0, math.nan, grad_norm=made.norm(math.inf, -math.inf)), made.step(1, None)]))
    first, second = run.steps()
    assert math.isnan(first.loss["loss"])
    assert (first.grad_norm.before_clip, first.grad_norm.after_clip) == (math.inf, -math.inf)
    assert second.loss["loss"] is None


def test_a_cut_at_any_byte_loses_the_cut_line_only(tmp_path):
    for offset in range(len(TRACE) + 1):
        data = TRACE[:offset]
        run = read(made.write_run(tmp_path / "run", data))
        assert len(list(run.records())) == good(data), offset
        torn = bool(data) and good(data) < len(data.split(b"\n")) - data.endswith(b"\n")
        assert damage_of(run) == ([(data.count(b"\n") + 1, True)] if torn else []), offset


def test_a_blank_line_after_a_torn_one_is_no_damage_of_its_own(tmp_path):
    run = read(made.write_run(tmp_path / "run", TRACE[:-10] + b"\n\n"))
    assert len(list(run.records())) == 5
    assert damage_of(run) == [(6, True)]
    assert run.files[0].report.sentences() == [
        "rank00000.jsonl: line 6 cannot be read and was skipped (cut at the end of the file: the run was killed while writing)"
    ]


WRONG_TYPE = made.lines([made.end(1)]).replace(b'"steps":1', b'"steps":"many"')


@pytest.mark.parametrize(
    "line", [b"{broken\n", b"12\n", b"null\n", b"[]\n", b"{}\n", WRONG_TYPE, b"\x00\x00\x00\n", b'{"kind":7}\n', b"\xff\xfe\n"]
)
def test_a_bad_line_in_the_middle_is_skipped_and_not_called_a_cut(tmp_path, line):
    data = made.lines([made.header(), made.step(0)]) + line + made.lines([made.step(1)])
    run = read(made.write_run(tmp_path / "run", data))
    assert [step.step for step in run.steps()] == [0, 1]
    assert damage_of(run) == [(3, False)]
    assert "line 3 in the middle of the file cannot be read and was skipped (damaged" in run.files[0].report.sentences()[0]


def test_a_whole_line_of_the_wrong_type_at_the_end_is_not_called_a_cut(tmp_path):
    run = read(made.write_run(tmp_path / "run", TRACE + b"12\n"))
    list(run.records())
    assert damage_of(run) == [(7, False)]
    assert "cut at" not in run.files[0].report.sentences()[0]


def test_several_damaged_lines_are_told_in_one_sentence_with_their_count(tmp_path):
    data = made.lines([made.header()]) + b"x\n" + made.lines([made.step(0)]) + b"7\n" + made.lines([made.step(1)])[:-20]
    run = read(made.write_run(tmp_path / "run", data))
    assert len(list(run.records())) == 2
    (sentence,) = run.files[0].report.sentences()
    assert sentence.startswith("rank00000.jsonl: 3 lines cannot be read and were skipped: lines 2, 4 in the middle of the file (damaged)")
    assert "line 5 (cut at the end of the file" in sentence


def test_kinds_of_later_versions_are_counted_apart(tmp_path):
    data = made.lines([made.header()]) + b'{"kind":"profile","x":1}\n' * 2 + made.lines([made.step(0)])
    run = read(made.write_run(tmp_path / "run", data))
    assert len(list(run.records())) == 2
    assert run.damage == []
    assert run.unknown_kinds == {"profile": 2}


def test_unknown_fields_are_ignored(tmp_path):
    line = made.lines([made.step(0)]).replace(b'{"kind":"step"', b'{"kind":"step","later":{"x":[1]}')
    run = read(made.write_run(tmp_path / "run", line))
    assert [step.step for step in run.steps()] == [0]


def test_deep_nesting_is_damage_and_no_crash(tmp_path):
    line = made.lines([made.step(0)]).replace(b'{"kind":"step"', b'{"kind":"step","later":' + b"[" * 200_000)
    run = read(made.write_run(tmp_path / "run", line + made.lines([made.step(1)])))
    assert [step.step for step in run.steps()] == [1]
    assert damage_of(run) == [(1, False)]


def test_a_line_beyond_the_limit_is_skipped_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_lines.numbered, "__defaults__", (5000,))
    monkeypatch.setattr(trace_lines, "_PIECE_BYTES", 100)
    data = made.lines([made.header()]) + b'{"kind":"' + b"x" * 20_000 + b'"}\n' + made.lines([made.step(0)])
    run = read(made.write_run(tmp_path / "run", data))
    assert len(list(run.records())) == 2
    assert damage_of(run) == [(2, False)]


def test_rubbish_of_any_length_keeps_a_bounded_list_and_an_exact_count(tmp_path):
    run = read(made.write_run(tmp_path / "run", b"rubbish\n" * 5000))
    assert list(run.records()) == []
    assert run.files[0].report.count == 5000
    assert len(run.damage) <= 1001


def test_reading_twice_counts_damage_once(tmp_path):
    run = read(made.write_run(tmp_path / "run", b"rubbish\n" + TRACE))
    list(run.steps())
    list(run.tensors())
    assert damage_of(run) == [(1, False)]
    next(run.records())
    assert damage_of(run) == [(1, False)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TRACE) - 1), st.binary(max_size=12), st.integers(0, 12))
def test_a_mutated_line_never_stops_the_others(tmp_path, offset, inserted, removed):
    inserted = inserted.replace(b"\n", b" ")
    line_of_offset = TRACE[:offset].count(b"\n")
    end = TRACE.index(b"\n", offset)
    data = TRACE[:offset] + inserted + TRACE[min(offset + removed, end) :]
    run = read(made.write_run(tmp_path / "run", data))
    records = list(run.records())
    others = [record for index, record in enumerate(map(codec.decode, TRACE.splitlines())) if index != line_of_offset]
    assert [record for record in records if record in others] == others
    assert len(records) + run.files[0].report.count + sum(run.unknown_kinds.values()) in (5, 6)


def test_norms_are_handed_out_as_tensors_of_the_parameters(tmp_path):
    run = read(made.write_run(tmp_path / "run", [made.model(), made.norms(4, (3.0, 4.0, None, None))]))
    weight, bias, unused, frozen = run.tensors()
    assert (weight.name, weight.shape, weight.dtype, weight.numel, weight.l2) == ("unet.conv.weight", [4, 5], "float32", 20, 3.0)
    assert (weight.role, weight.point, weight.step, weight.skipped, weight.nan) == ("param.grad", "after_unscale", 4, None, None)
    assert (bias.name, bias.l2) == ("unet.conv.bias", 4.0)
    assert (unused.l2, unused.skipped) == (None, "no gradient")
    assert frozen.l2 is None
    assert "requires_grad" in frozen.skipped


def test_norms_of_some_parameters_go_by_their_ids(tmp_path):
    run = read(made.write_run(tmp_path / "run", [made.model(), made.norms(0, (9.0, 8.0, 7.0), ids=[2, 99, 0])]))
    assert [(tensor.name, tensor.l2) for tensor in run.tensors()] == [("unet.unused.weight", 9.0), ("unet.conv.weight", 7.0)]


def test_each_train_call_and_rank_has_its_own_parameters(tmp_path):
    first = made.model(0, parameters=[made.parameter(0, "a")])
    second = made.model(1, parameters=[made.parameter(0, "b")])
    records = [first, made.norms(0, (1.0,)), second, made.norms(1, (2.0,), train=1)]
    folder = made.write_run(tmp_path / "run", records)
    made.write_run(folder, [made.model(0, parameters=[made.parameter(0, "c")]), made.norms(0, (3.0,))], "rank00001.jsonl")
    assert [(tensor.name, tensor.l2) for tensor in read(folder).tensors()] == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


@pytest.mark.parametrize("full_first", [True, False])
def test_a_nonfinite_parameter_is_handed_out_once_with_its_counts(tmp_path, full_first):
    full = made.tensor(0, "unet.conv.bias", nan=2, l2=1.5)
    pair = [full, made.norms(0, (3.0, math.nan, None, None))]
    records = [made.model(), *(pair if full_first else pair[::-1]), made.norms(1)]
    found = [tensor for tensor in read(made.write_run(tmp_path / "run", records)).tensors(steps="0") if tensor.name == "unet.conv.bias"]
    assert found == [full]


def test_a_nonfinite_norm_without_its_full_record_is_not_lost(tmp_path):
    run = read(made.write_run(tmp_path / "run", [made.model(), made.norms(0, (math.inf, 4.0, None, None)), made.norms(1)]))
    assert [tensor.l2 for tensor in run.tensors(name="unet.conv.weight")] == [math.inf, 3.0]


def test_tensors_are_chosen_by_role_name_and_steps(tmp_path):
    records = [made.model()]
    for step in range(5):
        records += [made.norms(step), made.norms(step, (7.0, 7.0, 7.0, 7.0), role="param"), made.tensor(step, "unet", role="module.output")]
    run = read(made.write_run(tmp_path / "run", records))
    assert {tensor.name for tensor in run.tensors(role="module.output")} == {"unet"}
    assert [tensor.step for tensor in run.tensors(role="param", name="vae.*", steps="1:4:2")] == [1, 3]
    assert len(list(run.tensors(name="unet.conv.*", steps="2"))) == 4
    assert [module.step for module in run.modules(step=3)] == []


def test_modules_of_one_step_can_be_asked_for(tmp_path):
    run = read(made.write_run(tmp_path / "run", [*made.modules(0), *made.modules(1)]))
    assert [module.name for module in run.modules(step=1)] == ["text_encoder", "unet.block", "unet", "unet"]
