from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.analysis.series import Series
from msprobe.views.layout import table
from msprobe.views.numbers import duration, number, percent, size
from msprobe.views.sparkline import LEVELS, NOT_FINITE, sparkline
from msprobe.views.strict_json import strict_json
from msprobe.views.terminal import show, write
from msprobe.views.text import label, safe, shortened


def curve(values, columns=40) -> str:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    return sparkline(series.told().curve, columns).plain


def test_nan_infinities_and_not_recorded_look_different():
    shown = [number(value) for value in (math.nan, math.inf, -math.inf, None, 0.0)]
    assert shown == ["NaN", "+inf", "-inf", "–", "0"]


def test_numbers_keep_their_significant_digits():
    assert [number(value) for value in (65536.0, 0.333333333, 1e-7, -2.5)] == ["65536", "0.33333", "1e-07", "-2.5"]
    assert number(0.99999982, 8) == "0.99999982"


@pytest.mark.parametrize(
    ("value_ns", "shown"),
    [
        (None, "–"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 µs"),
        (999_999, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (1_000_000_000, "1.00 s"),
        (99_949_000_000, "99.9 s"),
        (125_000_000_000, "2m 05s"),
        (7_260_000_000_000, "2h 01m"),
        (-2_000_000, "-2.00 ms"),
    ],
)
def test_durations_have_their_unit(value_ns, shown):
    assert duration(value_ns) == shown


def test_sizes_and_shares():
    assert [size(value) for value in (None, 0, 1023, 1024, 3 * 1024**3)] == ["–", "0 B", "1023 B", "1.00 KiB", "3.00 GiB"]
    assert [percent(value) for value in (None, 0.0, 0.1234)] == ["–", "0.0%", "12.3%"]


def test_names_with_escapes_and_invisible_characters_are_shown_as_such():
    assert safe("a\x1b[31mb\nc\x7f\u202e\udc80\x9b") == r"a\x1b[31mb\nc\x7f\u202e\udc80\x9b"
    assert safe("层.权重 é 🐱\u3000x") == "层.权重 é 🐱\u3000x"


@given(st.text())
def test_safe_text_holds_nothing_that_a_terminal_obeys(text):
    shown = safe(text)
    assert all(character.isprintable() or character in "\u3000" or character.isspace() for character in shown)
    assert not any(character in shown for character in "\x1b\n\r\t\x07\x08")


def test_markup_in_a_name_is_not_interpreted(capsys):
    show([label("[bold]x[/bold] :smile: [link=http://x]y[/link]"), table(["name"], [[label("[red]z[/red]")]])])
    out = capsys.readouterr().out
    assert "[bold]x[/bold] :smile: [link=http://x]y[/link]" in out
    assert "[red]z[/red]" in out


def test_a_long_name_keeps_its_end():
    name = shortened("unet.down_blocks.0.attentions.1.transformer_blocks.0.weight", 24)
    assert len(name) == 24
    assert name.endswith("locks.0.weight")


def test_a_rising_curve_rises():
    assert curve(range(8)) == LEVELS


def test_a_curve_without_variation_stays_low():
    assert curve([3.0] * 4) == LEVELS[0] * 4


def test_a_nonfinite_point_is_a_cross_however_long_the_run():
    assert curve([1.0, math.nan, 2.0, math.inf]) == f"{LEVELS[0]}{NOT_FINITE}{LEVELS[-1]}{NOT_FINITE}"
    assert curve([math.nan if step == 5000 else 1.0 for step in range(10_000)]).count(NOT_FINITE) == 1


def test_a_curve_fits_its_columns():
    assert 10 <= len(curve(range(10_000), 18)) <= 18


def test_extreme_values_have_a_curve():
    assert curve([-1.7e308, 1.7e308]) == LEVELS[0] + LEVELS[-1]


def test_output_that_is_no_terminal_is_80_columns_wide_unless_columns_says_otherwise(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    show([label("x " * 200)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "120")
    show([label("x " * 200)])
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 120
    monkeypatch.setenv("COLUMNS", "nonsense")
    show([label("x " * 200)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_lines_have_no_trailing_blanks(capsys):
    show([table(["a", "b"], [["1", "2"]])])
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_a_lone_surrogate_is_written_as_an_escape(capsys):
    write("a\udc80b\n")
    assert capsys.readouterr().out == "a\\udc80b\n"


def test_json_spells_nonfinite_numbers_as_the_trace_does():
    assert strict_json({"a": [math.nan, math.inf], "b": (-math.inf, None, 1.5)}).split() == [
        "{", '"a":', "[", '"NaN",', '"Infinity"', "],", '"b":', "[", '"-Infinity",', "null,", "1.5", "]", "}",
    ]  # fmt: skip
