#!/usr/bin/env bash
# All checks, on a fresh machine: lint, types, tests.
#
#   scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment train dev

# Two tests at a time on a small machine is one too many threads each otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "$@"
