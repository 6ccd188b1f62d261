"""The lines of a trace file, one at a time and none longer than a limit, and what became of each.

`trace.reader` calls `numbered` to walk a file and `decoded` to turn a line into a record or into the reason why it is none. A line is
never evaluated, unpickled or held together with another one, so a file of any size and content costs at most one line of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from msprobe import codec, schema

LONGEST_LINE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024

KNOWN_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in schema.Record.__subclasses__())


class _KindOnly(msgspec.Struct):
    kind: str


_kind_decoder = msgspec.json.Decoder(_KindOnly)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a line is no record. `malformed`: it is not JSON at all, which is what a line that was cut looks like."""

    reason: str
    malformed: bool


@dataclass(frozen=True, slots=True)
class UnknownKind:
    """A sound line of a kind that a later version of msprobe may write."""

    kind: str


def numbered(file: BinaryIO, longest_bytes: int = LONGEST_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line that is not blank with its number, counted from 1; `None` instead of a line longer than `longest_bytes`."""
    number = 0
    while line := file.readline(longest_bytes):
        number += 1
        if len(line) == longest_bytes and not line.endswith(b"\n"):
            _skip_rest_of_line(file)
            yield number, None
        elif not line.isspace():
            yield number, line


def _skip_rest_of_line(file: BinaryIO) -> None:
    while piece := file.readline(_PIECE_BYTES):
        if piece.endswith(b"\n"):
            return


def decoded(line: bytes) -> schema.AnyRecord | UnknownKind | Unreadable:
    """Return the record in a line, or why there is none."""
    try:
        return codec.decode(line)
    except msgspec.ValidationError as error:
        return _unfit(line, str(error))
    except RecursionError:
        return Unreadable("nested too deeply", malformed=True)
    except (msgspec.MsgspecError, ValueError) as error:
        return Unreadable(str(error), malformed=True)


def _unfit(line: bytes, reason: str) -> UnknownKind | Unreadable:
    """Tell apart a kind of a later version, a known kind with a wrong field, and a line that is not JSON further on."""
    try:
        kind = _kind_decoder.decode(line).kind
    except msgspec.ValidationError:
        return Unreadable(reason, malformed=False)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Unreadable(reason, malformed=True)
    return Unreadable(reason, malformed=False) if kind in KNOWN_KINDS else UnknownKind(kind)
