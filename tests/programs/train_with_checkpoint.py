"""Train `Known` with checkpoints, msprobe enabled as told: train_with_checkpoint.py none|callback|configuration|trace."""

import sys

from trainings import build_trainer, evaluating

way = sys.argv[1]
settings = {}
if way == "callback":
    from msprobe import TraceHook

    settings["callbacks"] = [TraceHook()]
if way == "configuration":
    from msprobe import TraceHook  # imported for ModelScope to find it

    settings["hooks"] = [{"type": "TraceHook"}]
# BestCkptSaverHook keeps a state, which ModelScope saves under the number of its hook.
best = {"metric_key": "seen", "rule": "max", "interval": 1}
checkpoint = {"period": {"interval": 1}, "best": best}
trainer = build_trainer("folder", **settings, **evaluating(by_epoch=True, interval=1), checkpoint=checkpoint)
trainer.train()
