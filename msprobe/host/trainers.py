"""Which of ModelScope's trainers can be traced here, computed from their classes as they stand in the source.

`doctor` asks. A trainer is traced through `EpochBasedTrainer.train`, so one that does not inherit from it, or replaces `train` without
calling it, cannot be. Importing some sixty trainers takes minutes and fails for many (each wants its own packages), so the classes are read
from the files and never imported.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from msprobe.errors import HostError

TRACED_BASE = "EpochBasedTrainer"


@dataclass(frozen=True)
class Trainer:
    """One registered trainer: its class name, whether it can be traced, and why not."""

    name: str
    traceable: bool
    reason: str


@dataclass(frozen=True)
class _Class:
    """A class as its source shows it."""

    name: str
    bases: tuple[str, ...]
    registered: bool
    replaces_train: bool


def survey() -> list[Trainer]:
    """Return every trainer that ModelScope registers, by name.

    Raises:
        HostError: ModelScope is not installed here.
    """
    classes = {found.name: found for path in sorted(_trainers_folder().rglob("*.py")) for found in _classes_in(path)}
    return [_judge(found, classes) for found in sorted(classes.values(), key=lambda found: found.name) if found.registered]


def _trainers_folder() -> Path:
    spec = importlib.util.find_spec("modelscope")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    folder = Path(locations[0]) / "trainers" if locations else None
    if folder is None or not (folder / "trainer.py").exists():
        raise HostError("ModelScope's trainers are not installed here: pip install modelscope")
    return folder


def _classes_in(path: Path) -> list[_Class]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # a file of another Python version is no trainer of this install
        return []
    return [_describe(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _describe(node: ast.ClassDef) -> _Class:
    bases = tuple(
        base.id if isinstance(base, ast.Name) else base.attr for base in node.bases if isinstance(base, (ast.Name, ast.Attribute))
    )
    registered = any("TRAINERS" in ast.dump(decorator) for decorator in node.decorator_list)
    train = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "train"), None)
    return _Class(node.name, bases, registered, train is not None and not _calls_super_train(train))


def _calls_super_train(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "train"
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(function)
    )


def _judge(found: _Class, classes: dict[str, _Class]) -> Trainer:
    line = _line_of_descent(found, classes)
    if line[-1].name != TRACED_BASE:
        return Trainer(found.name, False, f"it does not inherit from {TRACED_BASE}: its training loop is its own")
    replaced = next((step for step in line[:-1] if step.replaces_train), None)
    if replaced is not None:
        return Trainer(found.name, False, f"{replaced.name}.train replaces {TRACED_BASE}.train without calling it")
    return Trainer(found.name, True, "")


def _line_of_descent(found: _Class, classes: dict[str, _Class]) -> list[_Class]:
    """Return the class and its bases up to the traced one, or as far as the source is known."""
    line = [found]
    while line[-1].name != TRACED_BASE:
        parent = next((classes[base] for base in line[-1].bases if base in classes and classes[base] not in line), None)
        if parent is None:
            break
        line.append(parent)
    return line
