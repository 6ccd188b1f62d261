"""msprobe records training inside ModelScope: every phase, norm, loss and tensor of every step.

Importing this package loads neither torch, modelscope, rich nor msgspec: the public names are resolved when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe import testing
    from msprobe.errors import HostError, MsprobeError, TraceError, UsageError
    from msprobe.host.attach import disable, enable, is_enabled
    from msprobe.host.hooks import TraceHook, TraceOptimizerProcessor
    from msprobe.trace.reader import Run, read

__all__ = [
    "HostError",
    "MsprobeError",
    "Run",
    "TraceError",
    "TraceHook",
    "TraceOptimizerProcessor",
    "UsageError",
    "disable",
    "enable",
    "is_enabled",
    "read",
    "testing",
]

_HOMES = {
    "HostError": "msprobe.errors",
    "MsprobeError": "msprobe.errors",
    "TraceError": "msprobe.errors",
    "UsageError": "msprobe.errors",
    "disable": "msprobe.host.attach",
    "enable": "msprobe.host.attach",
    "is_enabled": "msprobe.host.attach",
    "TraceHook": "msprobe.host.hooks",
    "TraceOptimizerProcessor": "msprobe.host.hooks",
    "Run": "msprobe.trace.reader",
    "read": "msprobe.trace.reader",
}


def __getattr__(name: str) -> Any:
    """Resolve a public name when it is first used (PEP 562)."""
    import importlib

    if name == "testing":
        return importlib.import_module("msprobe.testing")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("modelscope-probe")
    if name in _HOMES:
        home = _load(_HOMES[name])
        if name == "TraceHook":  # whoever asks for it may name it in a configuration
            home.register_trace_hook()
        return getattr(home, name)
    raise AttributeError(f"module 'msprobe' has no attribute {name!r}")


def _load(home: str) -> Any:
    """Import a module of msprobe; where it needs ModelScope and that cannot be imported, say so."""
    import importlib

    from msprobe.errors import HostError

    try:
        return importlib.import_module(home)
    except Exception as error:  # ModelScope's lazy loader turns a failed import into a RuntimeError
        if not home.startswith("msprobe.host."):
            raise
        raise HostError.of_import(error) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
