"""The host as it is installed: ModelScope's trainer class or why it cannot be had, versions, ranks, and kinds of processes.

`host.attach` asks here; nothing here patches or records. Facts about versions stand in this one place.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from msprobe.capture.recorder import Recorder
from msprobe.errors import HostError
from msprobe.schema import RunRecord, StepRecord
from msprobe.trace.folder import rank_of

# The torch modules of accelerators; torch before 2.6 has no `torch.accelerator` that could be asked.
ACCELERATORS = ("cuda", "npu", "xpu", "mps")
PACKAGES = ("modelscope-probe", "torch", "modelscope", "diffusers", "transformers", "accelerate", "numpy", "safetensors")


def load_trainer_class() -> Any:
    """Return ModelScope's `EpochBasedTrainer`.

    Raises:
        HostError: it cannot be imported (the original error is the cause), or it is older than the processors that msprobe wraps.
    """
    try:
        trainer_class = importlib.import_module("modelscope.trainers.trainer").EpochBasedTrainer
        base = importlib.import_module("modelscope.trainers.hooks.optimizer.base")
    except Exception as error:  # ModelScope's lazy loader turns a failed import into a RuntimeError
        raise HostError.of_import(error) from error
    if not hasattr(base.OptimizerHook, "set_processor"):
        raise HostError.of_old_modelscope()
    return trainer_class


def version_of(distribution: str) -> str | None:
    """Return an installed distribution's version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def header(recorder: Recorder) -> RunRecord:
    """Return the first line of this rank's file; called when the first record is written, when the rank is certain."""
    rank, world_size, local_rank = rank_now()
    found = {package: version_of(package) for package in PACKAGES}
    device = describe_device()
    return RunRecord(
        run_id=recorder.folder.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        pid=os.getpid(),
        host=platform.node(),
        started_unix_ns=recorder.started_unix_ns,
        lag_steps=0 if device["type"] == "cpu" else 1,
        argv=list(sys.argv),
        cwd=_working_folder(),
        versions={"python": platform.python_version(), **{package: text for package, text in found.items() if text is not None}},
        device=device,
        config=recorder.config.describe(),
    )


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def rank_now() -> tuple[int, int, int]:
    """Return `(rank, world size, local rank)`: the process group's where there is one, else what the launcher's variables say."""
    import torch.distributed as distributed

    rank, world_size, local_rank = rank_of(os.environ)
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), local_rank
    return rank, world_size, local_rank


def describe_device() -> dict[str, Any]:
    """Return what kind of device torch would train on here, by name and number."""
    import torch

    found = [(kind, getattr(torch, kind)) for kind in ACCELERATORS if hasattr(torch, kind)]
    available = [(kind, module) for kind, module in found if hasattr(module, "is_available") and module.is_available()]
    if not available:
        return {"type": "cpu", "threads": torch.get_num_threads()}
    kind, module = available[0]
    name = module.get_device_name() if hasattr(module, "get_device_name") else kind
    count = module.device_count() if hasattr(module, "device_count") else 1
    return {"type": kind, "name": name, "count": count}


def is_helper_process() -> bool:
    """Tell whether this is a child of multiprocessing: a data worker that imports the script anew makes no run folder."""
    return multiprocessing.parent_process() is not None


def progress(recorder: Recorder) -> Callable[[StepRecord], None] | None:
    """Return what shows progress after each step, or None where nobody looks (quiet, or stderr is not a terminal)."""
    if recorder.config.quiet or sys.__stderr__ is None or sys.__stderr__.closed or not sys.__stderr__.isatty():
        return None
    from msprobe.views.progress import ProgressLine

    return ProgressLine(str(recorder.folder)).update
