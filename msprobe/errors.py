"""The errors that msprobe raises on purpose. Each message is one line that says what, where, and what to do.

MsprobeError
├── UsageError     a wrong option or argument (exit status 2)
├── TraceError     a run folder or record that cannot be read (exit status 2)
└── HostError      ModelScope or torch is missing, too old, or cannot be imported
"""

from __future__ import annotations

import sys

OLDEST_MODELSCOPE = "1.9.5"


class MsprobeError(Exception):
    """The root of all errors that msprobe raises on purpose."""


class UsageError(MsprobeError):
    """An option or argument is wrong."""


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
