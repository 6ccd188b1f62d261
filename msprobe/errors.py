"""The errors that msprobe raises on purpose. Each message is one line that says what, where, and what to do.

MsprobeError
├── UsageError     a wrong option or argument (exit status 2)
│   └── NothingSelected   a pattern that selects nothing in the model that is about to be trained
├── TraceError     a run folder or record that cannot be read (exit status 2)
├── AnomalyStop    something went wrong in the training, and --on-anomaly stop ends it (exit status 1)
└── HostError      ModelScope or torch is missing, too old, or cannot be imported
"""

from __future__ import annotations

import sys

OLDEST_MODELSCOPE = "1.9.5"


class MsprobeError(Exception):
    """The root of all errors that msprobe raises on purpose."""


class UsageError(MsprobeError):
    """An option or argument is wrong."""


class NothingSelected(UsageError, SystemExit):
    """A pattern of `--tensors` or `--dump` selects nothing in the model that is about to be trained.

    It ends the script as wrong usage does: one line, exit status 2, no traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 2


class AnomalyStop(MsprobeError, SystemExit):
    """Something went wrong in the training, and `--on-anomaly stop` ends it: one line, exit status 1, no traceback.

    Raised out of `train()` at the end of the step; a script may catch it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 1


class TraceError(MsprobeError):
    """A run folder, or a record in it, cannot be read."""


class HostError(MsprobeError):
    """ModelScope or torch is missing, too old, or cannot be imported; the original error is the cause."""

    @classmethod
    def of_import(cls, error: Exception) -> HostError:
        """Return what to raise from the error that importing ModelScope or torch ended with."""
        text = " ".join(str(error).split())
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing in ("modelscope", "torch"):
            return cls(f"{missing} is not installed in {sys.prefix}; msprobe traces trainings of an existing ModelScope install ({text})")
        if missing.startswith("modelscope."):
            return cls.of_old_modelscope()
        return cls(f"ModelScope's trainer cannot be imported: {type(error).__name__}: {text}")

    @classmethod
    def of_old_modelscope(cls) -> HostError:
        """Return what to raise where ModelScope lacks what msprobe needs."""
        import importlib.metadata  # slow to import, and seldom needed

        try:
            version = importlib.metadata.version("modelscope")
        except importlib.metadata.PackageNotFoundError:
            version = "(of unknown version)"
        return cls(f"modelscope {version} is too old to be traced; msprobe needs {OLDEST_MODELSCOPE} or later")
