"""Where a run's files go: the name of its folder, agreed between the ranks of one launch, and making it.

`msprobe trace` decides the folder before it starts the script and passes it on in `MSPROBE_RUN_DIR`, so all ranks have it. A script that
calls `enable()` under a launcher gets the folder from what the launcher gives every rank; elsewhere from the time. An existing run is
never written into by a new one.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msprobe.errors import UsageError


def make_run_folder(out: Path, name: str | None, stem: str, environment: Mapping[str, str]) -> Path:
    """Make this run's folder below `out` and return it.

    Args:
        out: the parent of run folders, absolute.
        name: the run's name, or None to make one.
        stem: the script's name without suffix, for a made name.
        environment: where a launcher left its rank variables.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    shared = _launch_name(environment)
    base = name or (f"{shared}-{stem}" if shared else f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = _join(out, base, environment) if shared else _make_new(out, base)
    except OSError as error:
        raise UsageError(_cannot_write(out, error)) from error
    check_writable(folder)
    return folder


def join_run_folder(folder: Path) -> None:
    """Make the run folder that the launcher decided, unless another rank was first.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(_cannot_write(folder, error)) from error
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Try the folder with a file that is removed again.

    Raises:
        UsageError: nothing can be written there.
    """
    probe = folder / f".writable-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise UsageError(_cannot_write(folder, error)) from error


def remove_if_empty(folder: Path) -> None:
    """Remove a run folder in which nothing was recorded."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def script_stem(argv: list[str]) -> str:
    """Return the script's name for a folder name: `train` for `/home/me/train.py`, `python` where there is no script."""
    stem = Path(argv[0]).stem if argv and argv[0] not in ("", "-c", "-m", "-") else "python"
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "python"


def rank_of(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return `(rank, world size, local rank)` as the launcher's variables say, else 0, 1, 0."""
    return _integer(environment, "RANK", 0), _integer(environment, "WORLD_SIZE", 1), _integer(environment, "LOCAL_RANK", 0)


def _launch_name(environment: Mapping[str, str]) -> str | None:
    """Return a name that all ranks of one launch share, or None for a process on its own."""
    if rank_of(environment)[1] < 2 and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none":  # torchrun's default, the same for every launch
        run_id = f"{environment.get('MASTER_ADDR', 'localhost')}-{environment.get('MASTER_PORT', '0')}"
    return re.sub(r"[^\w.-]+", "-", f"{run_id}-{restarts}").strip("-.")


def _make_new(out: Path, base: str) -> Path:
    for candidate in _candidates(out, base):
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            if not candidate.is_dir():
                raise
    raise AssertionError("candidates never end")


def _join(out: Path, base: str, environment: Mapping[str, str]) -> Path:
    """Make or join the launch's folder; one that already holds this rank's file is an earlier launch's of the same name."""
    file = f"rank{rank_of(environment)[0]:05d}.jsonl"
    for candidate in _candidates(out, base):
        candidate.mkdir(exist_ok=True)
        if not (candidate / file).exists():
            return candidate
    raise AssertionError("candidates never end")


def _candidates(out: Path, base: str) -> Iterator[Path]:
    yield out / base
    number = 2
    while True:
        yield out / f"{base}-{number}"
        number += 1


def _cannot_write(path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"the trace cannot be written to {path}: {reason}. Name another folder with --out (or MSPROBE_OUT)."


def _integer(environment: Mapping[str, str], key: str, default: int) -> int:
    try:
        return int(environment.get(key, default))
    except ValueError:
        return default
