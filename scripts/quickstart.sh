#!/usr/bin/env bash
# The main job, on a fresh machine: a real ModelScope Dreambooth fine-tune of a small Stable Diffusion, traced and explained.
#
#   scripts/quickstart.sh [options of scripts/finetune_stable_diffusion_dreambooth.py]
#
# Makes its own environment (see environment.sh), the model and its pictures (offline, made on the spot), runs the fine-tune under
# `msprobe trace`, and prints the summary.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment train

"$PYTHON" scripts/make_stable_diffusion.py demo
echo "Fine-tuning; ModelScope's log goes to demo/finetune.log"
"$PYTHON" -m msprobe trace --out demo/runs scripts/finetune_stable_diffusion_dreambooth.py --max_norm 1.0 "$@" >demo/finetune.log 2>demo/finetune.err || {
    tail -n 20 demo/finetune.err >&2
    exit 1
}
grep '^msprobe:' demo/finetune.err || true
run=$(ls -td demo/runs/*/ | head -n 1)
run=${run%/}
echo
"$PYTHON" -m msprobe summary "$run"
case $PYTHON in
*/.venv/bin/python) command=".venv/bin/msprobe" ;;
*) command="msprobe" ;;
esac
echo
echo "Your own script, traced the same way:   $command trace your_finetune.py --its --own --options"
echo "This run, step by step:                 $command show $run --step 5"
echo "ModelScope's hooks and their times:     $command hooks $run"
