from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.errors import UsageError
from msprobe.steps import StepSelection


def selected(text: str, below: int = 300) -> list[int]:
    selection = StepSelection.parse(text)
    return [step for step in range(below) if step in selection]


def test_indexes_and_slices_select_what_python_slices_select():
    steps = list(range(300))
    assert selected("0,10,100:110,::10") == sorted({0, 10, *steps[100:110], *steps[::10]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [(":", slice(None)), ("5:", slice(5, None)), (":5", slice(5)), ("3:9:2", slice(3, 9, 2)), ("7:7", slice(7, 7)), ("::", slice(None))],
)
def test_a_slice_means_what_it_means_in_python(text, expected):
    assert selected(text) == list(range(300))[expected]


def test_spaces_around_items_are_ignored():
    assert selected(" 1 , 4:6 ") == [1, 4, 5]


def test_all_selects_every_step_however_large():
    assert 0 in StepSelection.all()
    assert 10**17 in StepSelection.all()


def test_an_open_slice_answers_at_once_for_subclasses_of_int():
    class Index(int):
        pass

    assert Index(10**15) in StepSelection.parse("::5")
    assert Index(10**15 + 1) not in StepSelection.parse("::5")


@pytest.mark.parametrize("text", ["-1", "0,-5", "-10:", ":-1", "::-1", "3: -2"])
def test_negative_numbers_are_refused_as_negative(text):
    with pytest.raises(UsageError, match="negative"):
        StepSelection.parse(text)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1:2:3:4", "1.5", "0x10", "1 2", "::0", "٣", "9" * 30, "1;2", "\x1b[31m"])
def test_nonsense_is_refused_in_one_line(text):
    with pytest.raises(UsageError) as caught:
        StepSelection.parse(text)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 200).map(str),
            st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50)).map(lambda parts: "{}:{}:{}".format(*parts)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_text_of_a_selection_selects_the_same(items):
    selection = StepSelection.parse(",".join(items))
    again = StepSelection.parse(str(selection))
    assert [step in selection for step in range(250)] == [step in again for step in range(250)]
    assert str(again) == str(selection)


def test_the_module_needs_only_the_standard_library():
    code = "import sys, msprobe.steps; print([m for m in ('msgspec', 'rich', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
