"""What each step will be asked for: the plan of a step, from the settings and what they select in this model.

The session keeps one planner per `train()`; it owns the writer of whole tensors, and says at the end what that had to drop.
"""

from __future__ import annotations

from msprobe.capture.dumps import FOLDER, DumpWriter, StepDump
from msprobe.capture.plan import StepPlan
from msprobe.capture.recorder import Recorder
from msprobe.capture.selection import Selection


class Planner:
    """Makes the plans of one `train()`."""

    def __init__(self, recorder: Recorder, selection: Selection, train: int) -> None:
        self.selection = selection
        self._recorder = recorder
        self._config = recorder.config
        self._train = train
        self._described = selection.parameters("param.grad")
        self._dumped_gradients = sorted(selection.dumped_parameters("param.grad"))
        self._full = self._config.level == "full" or self._config.keep_last > 0
        self._dumps = DumpWriter(recorder.folder, self._config.dump_limit, self._failed) if self._config.dump else None

    def plan(self, step: int) -> StepPlan:
        """Return what is wanted of a step."""
        is_selected = step in self._config.steps or self._config.keep_last > 0
        if self._dumps is None or step not in self._config.steps:
            return StepPlan(is_selected, self._full, self._described)
        return StepPlan(is_selected, self._full, self._described, self._dumped_gradients, self._dumps, self._dump_of(step))

    def wants(self, role: str) -> bool:
        """Tell whether anything of a role is wanted."""
        return any(pattern.role == role for pattern in (*self._config.tensors, *self._config.dump))

    def close(self) -> None:
        """Wait until every whole tensor is written, and say what was dropped."""
        if self._dumps is None:
            return
        self._dumps.close()
        if self._dumps.dropped:
            message = (
                f"{self._dumps.dropped} whole tensor(s) were dropped: more than {self._config.dump_limit} bytes waited for being written; "
                "dump less, at fewer steps, or raise --dump-limit"
            )
            self._recorder.event("dropped", "warning", message, self._train, tensors=self._dumps.dropped)

    def _dump_of(self, step: int) -> StepDump:
        stem = self._recorder.stem
        metadata = {"run_id": self._recorder.run_id, "step": str(step), "train": str(self._train), "rank": str(self._recorder.rank)}
        return StepDump(f"{FOLDER}/{stem}-step{step:08d}.safetensors", metadata)

    def _failed(self, message: str) -> None:
        self._recorder.lost(message)
