"""The line at the end of a program in which nothing was traced, and why not.

Registered at exit by the boot module in the process that `msprobe trace` became, and by `enable()` in a script's own process. It runs while
the interpreter ends: no imports inside, only what is loaded already is looked at.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from msprobe.notice import say
from msprobe.trace.folder import remove_if_empty

LAUNCHER_VARIABLE = "MSPROBE_LAUNCHER_PID"


def report(folder: Path, quiet: bool, launcher_pid: str | None) -> None:
    """Say that no trainer was traced, if no process of the launch left a file in the run folder; an empty folder is removed.

    Args:
        folder: the run folder; one that is gone was reported on before.
        quiet: say nothing.
        launcher_pid: the process that `msprobe trace` became, as text: only it speaks for a launch. None without a launcher.
    """
    if launcher_pid not in (None, str(os.getpid())) or not folder.is_dir() or any(folder.glob("rank*.jsonl")):
        return
    if not quiet:
        names = trainers_with_own_loops()
        why = f"; {', '.join(names)} cannot be traced (the training loop is its own)" if names else ""
        say(f"no ModelScope trainer ran{why}; nothing was recorded")
    remove_if_empty(folder)


def trainers_with_own_loops() -> list[str]:
    """Return the imported trainer classes that do not train through `EpochBasedTrainer.train`.

    ModelScope imports a trainer when it is asked for, so these are the ones that the program used.
    """
    builder = sys.modules.get("modelscope.trainers.builder")
    if builder is None:
        return []
    registered = set(builder.TRAINERS.modules.get("default", {}).values())
    return sorted(cls.__name__ for cls in registered if cls.__module__ != "modelscope.trainers.base" and _has_own_loop(cls))


def _has_own_loop(trainer: type) -> bool:
    line = [cls for cls in trainer.__mro__ if cls is not object]
    depth = next((index for index, cls in enumerate(line) if cls.__name__ == "EpochBasedTrainer"), None)
    if depth is None:
        return True
    replaced = [vars(cls)["train"] for cls in line[:depth] if "train" in vars(cls)]
    return any("super" not in getattr(train, "__code__", _has_own_loop.__code__).co_names for train in replaced)
