"""What to record, when, and where: one frozen `Config`, from arguments, `MSPROBE_*` variables and the command line.

`enable()` and `msprobe trace` build it through the same functions; the launcher hands it on in the environment. It checks itself, and
every mistake is a `UsageError` of one line. This module imports neither torch nor ModelScope.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from msprobe.errors import UsageError
from msprobe.steps import StepSelection

PARAMETER_ROLES = ("param", "param.grad", "param.update")
MODULE_ROLES = ("module.input", "module.output", "module.grad_output")
ROLES = (*PARAMETER_ROLES, *MODULE_ROLES, "batch", "loss")
STATE_ROLE = "optim."
ANOMALY_ACTIONS = ("record", "dump", "stop")
DEFAULT_DUMP_LIMIT_BYTES = 1 << 30
LEVELS = ("norm", "full")
DEFAULT_TENSORS = ("param.grad",)
ENVIRONMENT_PREFIX = "MSPROBE_"


@dataclass(frozen=True)
class TensorPattern:
    """`ROLE[:GLOB]`: which tensors of a role get statistics.

    The glob is on the parameter's or module's path; without it, all. `@leaf` selects the modules without children.
    """

    role: str
    glob: str = "*"

    @classmethod
    def parse(cls, text: str) -> TensorPattern:
        """Read a pattern.

        Raises:
            UsageError: the role is not one that is recorded.
        """
        role, _, glob = text.partition(":")
        if role not in ROLES and not (role.startswith(STATE_ROLE) and len(role) > len(STATE_ROLE)):
            raise UsageError(f"{text}: there is no role {role!r}; roles are {', '.join(ROLES)} and optim.<state> (optim.exp_avg, optim.*)")
        return cls(role, glob or "*")

    def matches(self, name: str) -> bool:
        """Tell whether a parameter's path is selected."""
        return fnmatch.fnmatchcase(name, self.glob)

    def __str__(self) -> str:
        return self.role if self.glob == "*" else f"{self.role}:{self.glob}"


@dataclass(frozen=True)
class Config:
    """The settings of a trace.

    Attributes:
        out: parent of run folders, absolute.
        name: the run's name, or None to make one from time and script.
        run_dir: the run folder itself, where the launcher has made it already.
        tensors: which tensors get statistics.
        level: how much is said of a tensor: `norm` (l2, and NaN and inf counts where it is not finite) or `full` (all statistics).
        steps: the steps that get tensor statistics; phases, losses and total norms are recorded at every step.
        dump: which tensors are kept whole at those steps.
        dump_limit: bound on the bytes of whole tensors that wait for being written; what goes over it is dropped and counted.
        keep_last: of how many last steps full statistics are kept in memory, and written when something goes wrong; 0 for none.
        on_anomaly: what is done when something goes wrong: `record`, `dump` or `stop`.
        strict: a failure inside msprobe is raised into the script.
        quiet: nothing on stderr but warnings of failures.
    """

    out: Path = field(default_factory=lambda: _read_path("msprobe-runs"))
    name: str | None = None
    run_dir: Path | None = None
    tensors: tuple[TensorPattern, ...] = tuple(TensorPattern(role) for role in DEFAULT_TENSORS)
    level: str = "norm"
    steps: StepSelection = field(default_factory=StepSelection.all)
    dump: tuple[TensorPattern, ...] = ()
    dump_limit: int = DEFAULT_DUMP_LIMIT_BYTES
    keep_last: int = 0
    on_anomaly: str = "record"
    strict: bool = False
    quiet: bool = False

    @property
    def place(self) -> Path | tuple[Path, str | None]:
        """Where the run goes: settings that differ in it make another run. A folder that the launcher decided stays."""
        return self.run_dir or (self.out, self.name)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Config:
        """Return this config with the given settings replaced; None leaves a setting as it is.

        Raises:
            UsageError: a setting has no such name, or its value makes no sense.
        """
        known = {entry.name for entry in fields(self)}
        changes: dict[str, Any] = {}
        for key, value in arguments.items():
            if key not in known:
                raise UsageError(f"there is no option {key!r}; options are {', '.join(sorted(known))}")
            if value is not None:
                changes[key] = _READERS[key](value)
        return replace(self, **changes)

    def describe(self) -> dict[str, Any]:
        """Return the settings as the header records them."""
        return {
            "out": str(self.out),
            "name": self.name,
            "tensors": [str(pattern) for pattern in self.tensors],
            "level": self.level,
            "steps": str(self.steps),
            "dump": [str(pattern) for pattern in self.dump],
            "dump_limit": self.dump_limit,
            "keep_last": self.keep_last,
            "on_anomaly": self.on_anomaly,
            "strict": self.strict,
            "quiet": self.quiet,
        }

    def to_environment(self) -> dict[str, str]:
        """Return the variables that hand these settings to the traced program and its children."""
        settings = {
            "OUT": str(self.out),
            "NAME": self.name,
            "RUN_DIR": None if self.run_dir is None else str(self.run_dir),
            "TENSORS": "\n".join(str(pattern) for pattern in self.tensors),
            "LEVEL": self.level,
            "STEPS": str(self.steps),
            "DUMP": "\n".join(str(pattern) for pattern in self.dump),
            "DUMP_LIMIT": str(self.dump_limit),
            "KEEP_LAST": str(self.keep_last) if self.keep_last else None,
            "ON_ANOMALY": self.on_anomaly,
            "STRICT": "1" if self.strict else None,
            "QUIET": "1" if self.quiet else None,
        }
        return {ENVIRONMENT_PREFIX + key: value for key, value in settings.items() if value}


def from_environment(environment: Mapping[str, str]) -> Config:
    """Return the config that the `MSPROBE_*` variables describe.

    Raises:
        UsageError: a variable's value makes no sense; the message names the variable.
    """
    config = Config()
    for entry in fields(Config):
        variable = ENVIRONMENT_PREFIX + entry.name.upper()
        if environment.get(variable):
            try:
                config = config.with_arguments({entry.name: environment[variable]})
            except UsageError as error:
                raise UsageError(f"{variable}: {error}") from error
    return config


def _read_path(value: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise UsageError(f"a folder is wanted, not {value!r}")
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user's home; a working folder that was removed
        raise UsageError(f"the folder {value} cannot be found: {error}") from error


def _read_name(value: Any) -> str:
    text = str(value)
    is_plain = isinstance(value, str) and text.isprintable() and "/" not in text and text not in ("", ".", "..")
    if not is_plain or len(text.encode("utf-8", "surrogatepass")) > 200:
        raise UsageError(f"--name {text!r}: a run's name is one folder name (printable, no slash, at most 200 bytes)")
    return text


def _read_patterns(option: str, value: Any) -> tuple[TensorPattern, ...]:
    texts = [part for part in value.split("\n") if part] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{option} is a list of ROLE[:GLOB] strings, not {value!r}")
    try:
        return tuple(TensorPattern.parse(text) for text in texts)
    except UsageError as error:
        raise UsageError(f"--{option} {error}") from error


def _read_count(option: str, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit():
        raise UsageError(f"--{option} {value}: a whole number is wanted, 0 or more")
    return int(value)


def _read_bytes(value: Any) -> int:
    """Read a size: a number of bytes, or one with a unit (`512MB`, `2GiB`)."""
    text = str(value).strip()
    unit = next((unit for unit in _UNITS if text.upper().endswith(unit.upper())), "")
    number = text[: len(text) - len(unit)].strip()
    if isinstance(value, bool) or not number.isascii() or not number.isdigit():
        raise UsageError(f"--dump-limit {value}: a size in bytes is wanted, like 1000000, 512MB or 2GiB")
    return int(number) * _UNITS.get(unit, 1)


# The longer names first: each ends with the shorter ones.
_UNITS = {
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30},
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9},
    **{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "B": 1},
}


def _read_action(value: Any) -> str:
    if value not in ANOMALY_ACTIONS:
        raise UsageError(f"--on-anomaly {value}: there is no such action; actions are {', '.join(ANOMALY_ACTIONS)}")
    return str(value)


def _read_level(value: Any) -> str:
    if value not in LEVELS:
        raise UsageError(f"--level {value}: there is no such level; levels are {', '.join(LEVELS)}")
    return str(value)


def _read_steps(value: Any) -> StepSelection:
    return value if isinstance(value, StepSelection) else StepSelection.parse(str(value))


def _read_flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
        raise UsageError(f"{value!r} is neither yes nor no")
    return text in ("1", "true", "yes", "on")


_READERS = {
    "out": _read_path,
    "name": _read_name,
    "run_dir": _read_path,
    "tensors": lambda value: _read_patterns("tensors", value),
    "level": _read_level,
    "steps": _read_steps,
    "dump": lambda value: _read_patterns("dump", value),
    "dump_limit": _read_bytes,
    "keep_last": lambda value: _read_count("keep-last", value),
    "on_anomaly": _read_action,
    "strict": _read_flag,
    "quiet": _read_flag,
}
