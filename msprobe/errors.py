"""The errors that msprobe raises on purpose. Each message is one line that says what, where, and what to do.

MsprobeError
├── UsageError     a wrong option or argument (exit status 2)
├── TraceError     a run folder or record that cannot be read (exit status 2)
└── HostError      ModelScope or torch is missing, too old, or cannot be imported
"""

from __future__ import annotations


class MsprobeError(Exception):
    """The root of all errors that msprobe raises on purpose."""


class UsageError(MsprobeError):
    """An option or argument is wrong."""


class TraceError(MsprobeError):
    """A run folder, or a record in it, cannot be read."""


class HostError(MsprobeError):
    """ModelScope or torch is missing, too old, or cannot be imported; the original error is the cause."""
