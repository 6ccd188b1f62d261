"""What an interpreter does at its start when `msprobe trace` started it: wait for ModelScope's trainer, then enable msprobe.

`modelscope_probe.pth` imports this module, and only where `MSPROBE_TRACE` is set. It stands outside the package `msprobe` because
Ascend's `mindstudio-probe` installs a package of that very name: if that one is found instead of ours, the line below says so. It
imports neither torch nor ModelScope, and never raises into the interpreter's start.
"""

from __future__ import annotations

import sys


def _say(message: str) -> None:
    print(f"msprobe: {message}", file=sys.stderr)


def _enable(trainer_module: object) -> None:
    import msprobe

    if not hasattr(msprobe, "enable"):
        _say("'msprobe' here is the package of mindstudio-probe, not of modelscope-probe: the two overwrite each other; nothing is recorded")
        return
    try:
        msprobe.enable()
    except msprobe.MsprobeError as error:
        _say(f"{error}; nothing is recorded")


def _wait_for_trainer() -> None:
    import wrapt

    wrapt.register_post_import_hook(_enable, "modelscope.trainers.trainer")


def _report_at_exit() -> None:
    """In the process that `msprobe trace` became: say at its end if nothing was traced."""
    import atexit
    import os
    from pathlib import Path

    launcher_pid = os.environ.get("MSPROBE_LAUNCHER_PID")
    if launcher_pid == str(os.getpid()) and "MSPROBE_RUN_DIR" in os.environ:
        from msprobe.untraced import report

        atexit.register(report, Path(os.environ["MSPROBE_RUN_DIR"]), bool(os.environ.get("MSPROBE_QUIET")), launcher_pid)


try:
    _wait_for_trainer()
    _report_at_exit()
except Exception as error:
    _say(f"nothing is recorded: {type(error).__name__}: {error}")
