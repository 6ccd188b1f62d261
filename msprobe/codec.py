"""How a record becomes a line of JSON, and back.

`trace.writer` encodes, `trace.lines` decodes. Non-finite floats: JSON has none, and both msgspec and most other encoders write them as
`null`, which would lose exactly what a trace is for. They are spelled as the strings "NaN", "Infinity" and "-Infinity" (the ProtoJSON
convention), and read back as floats.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from msprobe.schema import AnyRecord, Record

_encoder = msgspec.json.Encoder()
# strict=False is what turns the strings "NaN" and "Infinity" into floats where the field is a float.
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord, strict=False)


def encode(record: Record) -> bytes:
    """Return the record as one line of strict JSON in UTF-8, with its newline.

    Lone surrogates (file names that are not UTF-8) are written as JSON escapes.
    """
    plain = _spell_nonfinite(msgspec.to_builtins(record))
    try:
        return _encoder.encode(plain) + b"\n"
    except UnicodeEncodeError:  # msgspec refuses lone surrogates, the standard library escapes them
        return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> AnyRecord:
    """Return the record that a line holds.

    Raises:
        msgspec.MsgspecError: the line is not JSON, or no known record. Unknown fields are ignored.
    """
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        if b"\\ud" not in line:
            raise
        return _decode_surrogates(line)


def _decode_surrogates(line: bytes) -> AnyRecord:
    """Read a line with lone surrogates, which msgspec calls malformed."""
    try:
        plain = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error
    return msgspec.convert(plain, AnyRecord, strict=False)  # type: ignore[no-any-return]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _spell_nonfinite(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else spell(value)
    if type(value) is dict:
        return {key: _spell_nonfinite(item) for key, item in value.items()}
    if type(value) is list:
        return [_spell_nonfinite(item) for item in value]
    return value


def spell(value: float) -> str:
    """Return the ProtoJSON spelling of a non-finite float."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
