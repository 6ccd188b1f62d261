"""Answers as strict JSON, which any parser reads.

Commands print it for `--json`, alone on stdout. Non-finite floats are spelled as in the trace, the absent is `null`, and lone surrogates
and whatever stdout cannot encode are JSON escapes.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import msgspec

from msprobe.codec import spell


def show_json(answer: Any) -> None:
    """Print an answer made of dataclasses, structs, dictionaries, lists and plain values."""
    text = strict_json(answer)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")


def strict_json(answer: Any) -> str:
    """Return an answer as JSON text, indented, without bare NaN or Infinity."""
    return json.dumps(_spelled(msgspec.to_builtins(answer)), allow_nan=False, ensure_ascii=False, indent=2)


def _spelled(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else spell(value)
        case dict():
            return {key: _spelled(item) for key, item in value.items()}
        case list() | tuple():
            return [_spelled(item) for item in value]
        case _:
            return value
