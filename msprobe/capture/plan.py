"""What is wanted of one step: whether its tensors are measured, how much is said of them, what of it is kept whole.

The session makes a plan when the step begins; nothing of it changes while the step runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from msprobe.capture.dumps import DumpWriter, StepDump


class StepPlan:
    """What is wanted of one step besides its phases, losses and norms.

    Attributes:
        is_selected: its tensors get statistics.
        full: all statistics, or the l2.
        described: the numbers of the parameters whose gradients are recorded.
        dumped_gradients: the numbers of those whose gradients are kept whole.
        dump: what is kept whole of it, with the writer of such tensors; None where nothing is.
    """

    def __init__(
        self,
        is_selected: bool,
        full: bool,
        described: Sequence[int] = (),
        dumped_gradients: Collection[int] = (),
        dumps: DumpWriter | None = None,
        dump: StepDump | None = None,
    ) -> None:
        self.is_selected = is_selected
        self.full = full and is_selected
        self.described = described if is_selected else ()
        self.dumped_gradients = dumped_gradients if dump is not None else ()
        self.dumps = dumps
        self.dump = dump

    def keep(self, key: str, tensor: torch.Tensor, **names: Any) -> bool:
        """Keep a tensor whole, if there is room."""
        return self.dumps is not None and self.dump is not None and self.dumps.keep(self.dump, key, tensor, **names)
