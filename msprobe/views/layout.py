"""The few shapes that all pages are made of: headings, tables without lines, and pairs of a label and a text.

Everything fits 80 columns and reads the same without colour. Cells that hold names of a trace take a `Text` made by `views.text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from msprobe.views.text import label

Cell = str | Text


def heading(text: str) -> Text:
    """Return the heading of a section, with an empty line above."""
    return Text(f"\n{text}", style="bold")


def facts(pairs: Iterable[tuple[str, Cell]]) -> Table:
    """Return labels with their texts beside them; a long text wraps under itself."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in pairs:
        grid.add_row(name, _cell(text))
    return grid


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], left: int = 1, gap: int = 2) -> Padding:
    """Return a table without lines, indented by two.

    Args:
        columns: the headers; a line break in one makes two lines.
        rows: a cell for each column.
        left: how many of the first columns are texts, set to the left; the others are numbers, set to the right and never wrapped.
        gap: how many spaces there are between columns.
    """
    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        if index < left:
            made.add_column(column, overflow="fold", vertical="bottom", min_width=min(len(column), 10))
        else:
            made.add_column(column, justify="right", no_wrap=True, overflow="fold", vertical="bottom")
    for row in rows:
        made.add_row(*map(_cell, row))
    return Padding(made, (0, 0, 0, 2))


def note(text: str) -> Padding:
    """Return a remark below a table."""
    return Padding(label(text, style="dim"), (0, 0, 0, 2))


def sentence(text: Cell) -> Padding:
    """Return a line of running text below a heading."""
    return Padding(_cell(text), (0, 0, 0, 2))


def command_line(command: str, why: str) -> Group:
    """Return a command with what it shows above it; the command is never broken, so that it can be copied whole."""
    line = label(f"  {command}")
    line.no_wrap, line.overflow = True, "ignore"
    return Group(note(f"# {why}"), line)


def _cell(text: Cell) -> Text:
    return text if isinstance(text, Text) else Text(text)
