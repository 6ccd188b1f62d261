"""What a step has to say of single tensors, until the values have arrived: one note becomes one `tensor` record.

The session's entries make the notes, in the order of execution; `capture.step` turns them into records.
"""

from __future__ import annotations

from msprobe.capture.measured import Measured
from msprobe.schema import TensorRecord


class Note:
    """One tensor in one place.

    Attributes:
        seq: its place in the order of execution within the step.
        role, name, call, path: which tensor it was (see docs/record.md).
        measured: what was measured of it; shared where one tensor is in several places.
        inputs: for a module's output, what was measured of the inputs: whether a bad value was born here.
        dump: the key under which it is kept whole, or None.
    """

    __slots__ = ("call", "dump", "inputs", "measured", "name", "path", "role", "seq")

    def __init__(self, seq: int, role: str, name: str, call: int | None, path: str | None, measured: Measured) -> None:
        self.seq = seq
        self.role = role
        self.name = name
        self.call = call
        self.path = path
        self.measured = measured
        self.inputs: list[tuple[str, Measured]] | None = None
        self.dump: str | None = None

    def inputs_are_finite(self) -> bool | None:
        """Tell whether every input was finite; None where one was not measured or there are none recorded."""
        if self.inputs is None:
            return None
        answers = [measured.is_finite() for _, measured in self.inputs]
        if False in answers:
            return False
        return None if None in answers else True

    def record(self, train: int, step: int, file: str | None) -> TensorRecord:
        """Return the record; its values have arrived."""
        record = TensorRecord(train=train, step=step, seq=self.seq, role=self.role, name=self.name, call=self.call, path=self.path)
        self.measured.fill(record)
        if self.inputs is not None and self.measured.is_finite() is False:
            record.inputs_finite = self.inputs_are_finite()
        if self.dump is not None:
            record.file, record.key = file, self.dump
        return record
