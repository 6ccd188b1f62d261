"""The comparison that proves that training is not changed: a run without and a run with msprobe, bit for bit."""

import re
from pathlib import Path

import torch

_VOLATILE = [
    (re.compile(r"\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}(,\d+)?"), "<time>"),
    (re.compile(r"\d{8}_\d{6}"), "<stamp>"),
    (re.compile(r"(eta|iter_time|data_load_time|time)(\"?: ?)[\d:.e+-]+( day[s]?, [\d:]+)?"), r"\1\2<time>"),
    (re.compile(r"/(off|on)/run"), "/<run>"),
    (re.compile(r"\d+(\.\d+)?(s/it|it/s)|\d\d:\d\d(<\d\d:\d\d)?"), "<pace>"),
]


def without_times(text):
    """Return a log with times, paces and the run's own folder taken out; msprobe's own lines and progress bars, drawn by time, dropped."""
    lines = [line for line in text.splitlines() if not line.startswith("msprobe:") and "%|" not in line]
    for index, line in enumerate(lines):
        for pattern, replacement in _VOLATILE:
            line = pattern.sub(replacement, line)
        lines[index] = line
    return lines


def modelscope_logs(folder):
    """Return the lines of every log file that ModelScope wrote below a folder, without times."""
    paths = sorted(path for pattern in ("*.log", "*.log.json") for path in Path(folder).rglob(pattern))
    return [line for path in paths for line in without_times(path.read_text())]


def assert_same(off, on, where="state"):
    """Compare two states bit for bit, naming the first place where they part."""
    assert type(off) is type(on), where
    if isinstance(off, torch.Tensor):
        assert off.dtype == on.dtype, where
        assert torch.equal(_bits(off), _bits(on)), where
    elif isinstance(off, dict):
        assert list(off) == list(on), where
        for key in off:
            assert_same(off[key], on[key], f"{where}[{key!r}]")
    elif isinstance(off, (list, tuple)):
        assert len(off) == len(on), where
        for index, (left, right) in enumerate(zip(off, on, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert off == on, where


def _bits(tensor):
    """View a floating tensor as integers, so that NaN equals NaN and 0.0 does not equal -0.0."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()]) if tensor.is_floating_point() else tensor


def assert_same_run(off, on):
    """Compare two finished programs: what they computed, printed, warned and logged."""
    assert off.status == on.status
    assert_same(torch.load(off.folder / "state.pt", weights_only=False), torch.load(on.folder / "state.pt", weights_only=False))
    assert without_times(off.stdout) == without_times(on.stdout)
    assert without_times(off.stderr) == without_times(on.stderr)
    assert modelscope_logs(off.folder) == modelscope_logs(on.folder)
