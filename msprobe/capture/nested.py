"""Tensors inside nested values: the arguments, the output of a module, or a batch, each with the path to it.

Paths read like Python: `[0]` for the first positional argument or the first of a tuple, `sample` for a key, a field or a keyword argument,
`[0].hidden` below it; empty for a value that is a tensor itself. Nothing here changes or keeps a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

DEEPEST_NESTING = 4
MOST_ITEMS = 1000


def tensors_in(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a value with their paths, in order."""
    if isinstance(value, torch.Tensor):  # most outputs are: no walk
        yield "", value
    elif value is not None:
        yield from _walk(value, "", 0)


def tensors_in_arguments(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call's positional and keyword arguments with their paths."""
    for index, item in enumerate(arguments):
        if isinstance(item, torch.Tensor):
            yield f"[{index}]", item
        elif item is not None:
            yield from _walk(item, f"[{index}]", 1)
    if keywords:
        yield from _walk(keywords, "", 0)


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < DEEPEST_NESTING:
        for key, item in _items(value):
            joined = path + key if path or not key.startswith(".") else key[1:]
            yield from _walk(item, joined, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # a ModelOutput is one, and its keys are its fields
        yield from ((f".{key}" if str(key).isidentifier() else f"[{key!r}]", item) for key, item in _first(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value[:MOST_ITEMS]))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{entry.name}", getattr(value, entry.name, None)) for entry in dataclasses.fields(value))


def _first(items: Any) -> Iterator[tuple[Any, Any]]:
    for count, item in enumerate(items):
        if count == MOST_ITEMS:
            return
        yield item
