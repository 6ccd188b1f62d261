"""What is installed for this interpreter, as far as the metadata of the distributions tells without importing them.

`msprobe doctor` asks for it. Nothing here imports torch or ModelScope, so it also answers where they are missing or broken.
"""

from __future__ import annotations

import platform
import site
import sys
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

DISTRIBUTION = "modelscope-probe"
CLASHING_DISTRIBUTION = "mindstudio-probe"
BOOT_MODULE = "_modelscope_probe_boot"
BOOT_FILE = "modelscope_probe.pth"
_NEEDED = ("torch", "modelscope", "diffusers", "transformers", "msgspec", "rich", "wrapt", "safetensors")


@dataclass(frozen=True, slots=True)
class BootFile:
    """Whether an interpreter that `msprobe trace` starts would find what it needs; None where a part was not found."""

    module: str | None
    path_file: str | None

    @property
    def seen(self) -> bool:
        """Whether both parts are there."""
        return self.module is not None and self.path_file is not None


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer class of ModelScope, and whether its training can be recorded."""

    name: str
    traceable: bool
    reason: str


@dataclass(slots=True)
class Environment:
    """All that `doctor` found. A version is None where the distribution is not installed.

    `device_problem` and `trainer_problem` say why the lists beside them are empty. `clash` is the version of the distribution that
    overwrites ours.
    """

    python: str
    executable: str
    versions: dict[str, str | None]
    boot: BootFile
    clash: str | None
    devices: list[str] = field(default_factory=list)
    device_problem: str | None = None
    trainers: list[Trainer] = field(default_factory=list)
    trainer_problem: str | None = None


def installed() -> Environment:
    """Return versions, the boot file and the clash; devices and trainers are left to the caller."""
    names = (DISTRIBUTION, *_NEEDED)
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        versions={name: version_of(name) for name in names},
        boot=BootFile(_boot_module(), _boot_path_file()),
        clash=version_of(CLASHING_DISTRIBUTION),
    )


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _boot_module() -> str | None:
    spec = util.find_spec(BOOT_MODULE)
    return spec.origin if spec is not None else None


def _boot_path_file() -> str | None:
    """Return the .pth file, from the folders in which an interpreter looks for such files at its start."""
    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    found = [path for path in (Path(folder, BOOT_FILE) for folder in folders) if path.is_file()]
    return str(found[0]) if found else None
