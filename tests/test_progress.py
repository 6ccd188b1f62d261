"""The one line on stderr that shows a traced training going on: drawn for a terminal, absent elsewhere."""

import io
import sys
from types import SimpleNamespace

import synthetic

from msprobe.host import environment
from msprobe.schema import GradNorm
from msprobe.views.progress import ProgressLine


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True


def recorder(folder, quiet=False):
    return SimpleNamespace(config=SimpleNamespace(quiet=quiet), folder=folder)


def test_a_step_is_drawn_on_one_line_with_what_matters(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "__stderr__", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    step = synthetic.step(12, loss=0.25, grad_norm=GradNorm(norm_type=2.0, before_clip=5.0))
    ProgressLine("runs/one").update(step)
    drawn = terminal.getvalue()
    assert "step 12" in drawn
    assert "loss 0.25" in drawn
    assert "gradient norm 5" in drawn
    assert "runs/one" in drawn
    assert "\n" not in drawn
    assert drawn.endswith("\r")


def test_nothing_is_drawn_where_nobody_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "__stderr__", Terminal())
    assert environment.progress(recorder(tmp_path)) is not None
    assert environment.progress(recorder(tmp_path, quiet=True)) is None
    monkeypatch.setattr(sys, "__stderr__", io.StringIO())
    assert environment.progress(recorder(tmp_path)) is None
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "__stderr__", closed)
    assert environment.progress(recorder(tmp_path)) is None
