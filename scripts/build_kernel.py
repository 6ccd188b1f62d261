"""Compile msprobe's native reductions while msprobe is installed, and put them into the wheel.

Called by hatchling (pyproject.toml, `tool.hatch.build.hooks.custom`), for wheels and editable installs alike. Without a C compiler msprobe
installs all the same, and reduces with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("msprobe/capture/native/reduce.c")
LIBRARY = SOURCE.parent / "libmsprobe_reduce.so"
FLAGS = ["-std=c11", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
# Variants for wider vector units, chosen when the library is loaded; where the compiler or the C library knows none, the plain one.
CLONES = "-DMSPROBE_CLONES"


class KernelBuildHook(BuildHookInterface):
    """Builds the library before the package is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and where that worked have the wheel say for which platform it is."""
        if self.target_name != "wheel" or not compile_library(Path(self.root)):
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_library(root: Path) -> bool:
    """Compile the library into the source tree; tell whether it is there."""
    target = root / LIBRARY
    temporary = target.with_suffix(f".{os.getpid()}")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    for variant in ([CLONES], []):
        command = [*compiler.split(), *FLAGS, *variant, str(root / SOURCE), "-o", str(temporary), "-lm"]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            print(f"msprobe: no C compiler ({error}); tensors will be reduced by torch, more slowly", file=sys.stderr)
            return False
        if finished.returncode == 0:
            os.replace(temporary, target)  # a process that has the old one loaded keeps it
            return True
    print(f"msprobe: the native reductions did not compile; torch will be used\n{finished.stderr}", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(0 if compile_library(Path(__file__).resolve().parent.parent) else 1)
