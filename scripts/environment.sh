# Sourced by the other scripts: sets PYTHON to an interpreter that has msprobe from this checkout and all that it needs.
#
#   prepare_environment EXTRAS...      (names of pyproject's extras, e.g. train dev)
#
# An active environment that has everything already is used as it is. Otherwise .venv is made beside this checkout with the PYTHON given,
# or python3; pip's own settings (index, constraints, wheels on disk) apply. A second run finds it ready.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_has_everything() { # PYTHON EXTRAS...
    "$@" 2>/dev/null <<'PYTHON'
import importlib.metadata as metadata
import importlib.util
import os
import re
import sys

# The checkout's own requirements, from the installed metadata; every one of them must be installed.
extras = sys.argv[1:]
found = importlib.util.find_spec("msprobe")
if found is None or os.path.realpath(os.path.dirname(found.origin)) != os.path.realpath("msprobe"):
    sys.exit(1)
for line in metadata.requires("modelscope-probe") or []:
    extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", line)
    if extra is None or extra.group(1) in extras:
        metadata.version(re.match(r"[\w.-]+", line).group())
PYTHON
}

_stamp() { cat "$ROOT/pyproject.toml" "$ROOT/_modelscope_probe_boot.py" "$ROOT/modelscope_probe.pth" "$ROOT/scripts/build_kernel.py" "$ROOT/msprobe/capture/native/reduce.c" | cksum; }

prepare_environment() {
    cd "$ROOT" || exit 1
    local active=${PYTHON:-python}
    if command -v "$active" >/dev/null && _has_everything "$active" - "$@"; then
        PYTHON=$active
        return
    fi
    local base=${PYTHON:-python3}
    local want
    want="$* $(_stamp)"
    if [ ! -x .venv/bin/python ]; then
        echo "Making .venv with $("$base" --version)"
        "$base" -m venv .venv || exit 1
    fi
    PYTHON="$ROOT/.venv/bin/python"
    if [ "$(cat .venv/msprobe-stamp 2>/dev/null)" != "$want" ] || ! _has_everything "$PYTHON" - "$@"; then
        echo "Installing msprobe with the extras $* into .venv (torch is large: the first time takes minutes)"
        "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --editable ".[$(IFS=,; echo "$*")]" || exit 1
        echo "$want" >.venv/msprobe-stamp
    fi
}
