"""The one line on stderr that shows a traced training going on: step, loss, gradient norm, time per step, where it writes.

The recorder hands it every published step; it draws a few times a second at most. The line is drawn and the cursor left at its start, so
that whatever the training prints next takes its place. Imported only where stderr is a terminal.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.text import Text

from msprobe.schema import StepRecord

SECONDS_BETWEEN_DRAWINGS = 0.25


class ProgressLine:
    """Draws one line on stderr, over and over."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._console = Console(file=sys.__stderr__, stderr=True)
        self._drawn = 0.0

    def update(self, record: StepRecord) -> None:
        """Show a step, unless the last drawing was a moment ago."""
        now = time.monotonic()
        if now - self._drawn < SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn = now
        line = Text(describe(record, self._folder))
        line.truncate(max(self._console.width - 1, 10), overflow="ellipsis")
        stream = self._console.file
        stream.write(f"\r\x1b[2K{line.plain}\r")
        stream.flush()


def describe(record: StepRecord, folder: str) -> str:
    """Return the line's text."""
    losses = "  ".join(f"{key} {value:.4g}" for key, value in record.loss.items() if value is not None)
    norm = record.grad_norm.before_clip if record.grad_norm is not None else None
    parts = [f"step {record.step}", losses, f"gradient norm {norm:.3g}" if norm is not None else "", f"{record.wall_ns / 1e9:.3f} s/step"]
    return "msprobe  " + "  ".join(part for part in parts if part) + f"  → {folder}"
