"""`msprobe doctor`: what is installed here, what can be recorded with it, and what stands in the way.

It is the only verb that looks at torch and ModelScope, and does so inside functions: where they are missing or broken, that is its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from msprobe.analysis.environment import Environment, Trainer, installed
from msprobe.errors import HostError
from msprobe.views.doctor_page import doctor_page
from msprobe.views.strict_json import show_json
from msprobe.views.terminal import show

HELP = "versions, devices, which trainers can be traced here, name clashes"


def add_parser(subparsers: Any) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser("doctor", help=HELP, description=f"Shows {HELP}.")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, alone on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print what is installed here."""
    found = installed()
    # Some libraries print when they are imported; stdout belongs to the answer.
    with contextlib.redirect_stdout(sys.stderr):
        _look_for_devices(found)
        _look_for_trainers(found)
    if arguments.json:
        show_json(found)
    else:
        show(doctor_page(found))
    return 0


def _look_for_devices(found: Environment) -> None:
    try:
        found.devices = _devices()
    except ModuleNotFoundError as error:
        found.device_problem = f"no device can be asked for: {error}"
    except Exception as error:  # a torch whose libraries or drivers are broken fails in many ways
        found.device_problem = f"torch cannot list devices: {type(error).__name__}: {error}"


def _devices() -> list[str]:
    import torch

    if not hasattr(torch, "accelerator"):
        return [f"cpu ({torch.get_num_threads()} threads); torch before 2.6 does not list accelerators"]
    devices = [f"cpu ({torch.get_num_threads()} threads)"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        names = getattr(torch.get_device_module(kind), "get_device_name", None)
        indexes = range(torch.accelerator.device_count())
        devices += [f"{kind}:{index}" + (f" {names(index)}" if names is not None else "") for index in indexes]
    return devices


def _look_for_trainers(found: Environment) -> None:
    missing = [name for name in ("torch", "modelscope") if found.versions[name] is None]
    if missing:
        found.trainer_problem = f"nothing can be recorded here: {' and '.join(missing)} not installed"
        return
    try:
        from msprobe.host.trainers import survey

        found.trainers = [Trainer(trainer.name, trainer.traceable, trainer.reason) for trainer in survey()]
    except HostError as error:
        found.trainer_problem = str(error)
    except Exception as error:  # importing ModelScope runs the code of a dozen other libraries
        found.trainer_problem = f"ModelScope's trainers cannot be imported: {type(error).__name__}: {error}"
