"""What an interpreter does at its start when `msprobe trace` started it: wait for ModelScope's trainer, then enable msprobe.

`modelscope_probe.pth` imports this module, and only where `MSPROBE_TRACE` is set. It stands outside the package `msprobe` because
Ascend's `mindstudio-probe` installs a package of that very name: if that one is found instead of ours, the line below says so. It
imports neither torch nor ModelScope, and never raises into the interpreter's start.
"""

from __future__ import annotations

import os
import sys


def _say(message: str) -> None:
    print(f"msprobe: {message}", file=sys.stderr)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")


def _enable(trainer_module: object) -> None:
    """Enable msprobe in the midst of the script's import: nothing but a strict run's failure may come out of here."""
    try:
        import msprobe

        if hasattr(msprobe, "enable"):
            from msprobe.host import attach

            attach.enable_launched()
        else:
            _say("'msprobe' here is mindstudio-probe's package, not modelscope-probe's: the two overwrite each other; nothing is recorded")
    except Exception as error:
        if _is_on("MSPROBE_STRICT"):
            raise
        kind = "" if type(error).__module__ == "msprobe.errors" else f"{type(error).__name__}: "
        _say(f"{kind}{error}; nothing is recorded")


def _wait_for_trainer() -> None:
    import wrapt

    wrapt.register_post_import_hook(_enable, "modelscope.trainers.trainer")


def _report_at_exit() -> None:
    """In the process that `msprobe trace` became: say at its end if nothing was traced."""
    import atexit
    from pathlib import Path

    launcher_pid = os.environ.get("MSPROBE_LAUNCHER_PID")
    if launcher_pid == str(os.getpid()) and "MSPROBE_RUN_DIR" in os.environ:
        from msprobe.untraced import report

        atexit.register(
            report,
            Path(os.environ["MSPROBE_RUN_DIR"]),
            _is_on("MSPROBE_QUIET"),
            launcher_pid,
        )


try:
    _wait_for_trainer()
    _report_at_exit()
except Exception as error:
    _say(f"nothing is recorded: {type(error).__name__}: {error}")
