"""`msprobe trace`: the settings go into the environment, then this process becomes the script's own interpreter.

It execs, so the script has python's own traceback, exit status, signals, `__main__`, `sys.path` and PID; nothing of msprobe runs in it
until ModelScope's trainer module is imported (see `_modelscope_probe_boot`). `commands.trace` calls it with a checked config. It never
comes back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msprobe.config import Config
from msprobe.errors import UsageError
from msprobe.notice import say
from msprobe.trace import folder
from msprobe.untraced import LAUNCHER_VARIABLE

TRACE_VARIABLE = "MSPROBE_TRACE"
_SHELL_SUFFIXES = (".sh", ".bash")


def launch(config: Config, target: Sequence[str]) -> None:
    """Become the target, traced.

    Args:
        config: the settings; the run folder is made here unless a launcher around this one has made it.
        target: `SCRIPT.py`, `-m MODULE`, or a command, with its arguments.

    Raises:
        UsageError: the run folder cannot be made, or the command is not found.
    """
    command = command_line(target)
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: there is no such script or command")
    if _is_missing_script(target):
        os.execv(command[0], command)  # python says best what is wrong, and nothing will be recorded
    environment = traced_environment(config, target, os.environ)
    is_outermost = TRACE_VARIABLE not in os.environ
    if is_outermost and not config.quiet and environment.get("RANK", "0") == "0":
        say(f"recording to {environment['MSPROBE_RUN_DIR']}")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:  # an executable file that the system cannot start, such as a shell script without its first line
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error


def command_line(target: Sequence[str]) -> list[str]:
    """Return what to exec: this interpreter for a script or a module, with the flags that it was given itself; else the command."""
    if target[0] == "-m" or _is_python_target(target[0]):
        return [sys.executable, *interpreter_flags(), *target]
    return list(target)


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter (`-O`, `-X dev`, ...), the way `multiprocessing` hands them to its children."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def traced_environment(config: Config, target: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the traced program; makes its run folder.

    The launcher's PID tells the traced process (exec keeps the PID) from its children: only it says that nothing was recorded.
    """
    settings = dict(environment)
    if TRACE_VARIABLE in settings and config.run_dir is not None:  # `msprobe trace msprobe trace`: the outer one decided
        return {**settings, **config.to_environment()}
    made = folder.make_run_folder(config.out, config.name, script_name(target), environment)
    settings.update(config.with_arguments({"run_dir": made}).to_environment())
    settings[TRACE_VARIABLE] = "1"
    settings[LAUNCHER_VARIABLE] = str(os.getpid())
    return settings


def script_name(target: Sequence[str]) -> str:
    """Return the script's name for the run folder: the last module or script before the arguments that looks like one."""
    for index, word in enumerate(target):
        if word == "-m" and index + 1 < len(target):
            inner = target[index + 1]
            if inner not in ("torch.distributed.run", "torch.distributed.launch", "msprobe"):
                return inner.rpartition(".")[2] or inner
        if word.endswith((".py", ".pyz", ".zip", *_SHELL_SUFFIXES)):
            return folder.script_stem([word])
    return folder.script_stem([target[0]])


def _is_missing_script(target: Sequence[str]) -> bool:
    return target[0] not in ("-", "-m") and _is_python_target(target[0]) and not Path(target[0]).exists()


def _is_python_target(word: str) -> bool:
    """Tell whether python runs this: a script, a folder or archive with `__main__.py`, standard input.

    A missing `.py` counts too: python itself reports it best.
    """
    if word == "-" or word.endswith((".py", ".pyz", ".zip", ".pyw")):
        return True
    path = Path(word)
    if path.is_dir():
        return True
    return path.is_file() and not os.access(path, os.X_OK)
