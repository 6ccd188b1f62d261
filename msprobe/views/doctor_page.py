"""What is installed, as a page: versions, devices, the boot file, trainers, and a name clash.

`msprobe doctor` prints it. Each thing that stands in the way says in the same line what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from msprobe.analysis.environment import BOOT_FILE, BOOT_MODULE, CLASHING_DISTRIBUTION, DISTRIBUTION, BootFile, Environment
from msprobe.views.layout import Cell, facts, heading, note, sentence
from msprobe.views.text import counted, label


def doctor_page(found: Environment) -> Iterator[RenderableType]:
    """Yield the page."""
    yield facts(_versions(found))
    yield heading("Devices")
    for device in found.devices:
        yield sentence(label(device))
    if found.device_problem:
        yield sentence(label(found.device_problem, style="yellow"))
    yield heading("Recording a script")
    yield sentence(_boot(found.boot))
    yield sentence(_clash(found.clash))
    yield from _trainers(found)


def _versions(found: Environment) -> Iterator[tuple[str, Cell]]:
    yield "python", label(f"{found.python}, {found.executable}")
    for name, version in found.versions.items():
        yield name, label(version) if version is not None else Text("not installed", style="yellow")


def _boot(boot: BootFile) -> Text:
    if boot.seen:
        return label(f"{BOOT_FILE} is seen by this interpreter: {boot.path_file}")
    missing = BOOT_FILE if boot.path_file is None else f"{BOOT_MODULE}.py"
    return label(
        f"{missing} is not seen by this interpreter, so `msprobe trace` records nothing with it: install {DISTRIBUTION} into it, "
        "or call msprobe.enable() in the script",
        style="yellow",
    )


def _clash(version: str | None) -> Text:
    if version is None:
        return label(f"no name clash: {CLASHING_DISTRIBUTION}, which would overwrite {DISTRIBUTION}, is not installed")
    return label(
        f"name clash: {DISTRIBUTION} and {CLASHING_DISTRIBUTION} {version} both install the package and the command msprobe and overwrite "
        "each other; keep them in separate environments (our second command name is modelscope-probe)",
        style="bold red",
    )


def _trainers(found: Environment) -> Iterator[RenderableType]:
    yield heading("Trainers")
    if found.trainer_problem:
        yield sentence(label(found.trainer_problem, style="yellow"))
    if found.trainers:
        traceable = sum(trainer.traceable for trainer in found.trainers)
        yield sentence(f"{counted(traceable, 'trainer')} of {len(found.trainers):,} can be recorded.")
        groups: dict[tuple[bool, str], list[str]] = {}
        for trainer in sorted(found.trainers, key=lambda trainer: not trainer.traceable):
            groups.setdefault((trainer.traceable, trainer.reason), []).append(trainer.name)
        for (recorded, reason), names in groups.items():
            verdict = "recorded" if recorded else "not recorded"
            yield sentence(label(f"{verdict}: {reason}" if reason else verdict, style="" if recorded else "yellow"))
            yield sentence(label(", ".join(names), style="dim"))
    elif not found.trainer_problem:
        yield note("ModelScope has none.")
