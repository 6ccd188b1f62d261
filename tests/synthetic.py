"""Traces made up for tests: builders of every record with plausible values, and writers of whole run folders."""

from __future__ import annotations

from pathlib import Path

from msprobe import codec
from msprobe.schema import (
    Accumulation,
    EndRecord,
    EventRecord,
    GradNorm,
    GroupInfo,
    HookInfo,
    HookTime,
    LossScale,
    Memory,
    ModelRecord,
    ModuleRecord,
    NormsRecord,
    OptimizerInfo,
    ParameterInfo,
    Phase,
    Record,
    RunRecord,
    StageRecord,
    StepRecord,
    TensorRecord,
    Update,
)

MS = 1_000_000

HOOKS = [
    ("OptimizerHook", 40, ["after_train_iter"]),
    ("LrSchedulerHook", 50, ["before_run", "after_train_iter", "after_train_epoch"]),
    ("CheckpointHook", 90, ["before_run", "after_train_epoch", "after_run"]),
]


def header(rank: int = 0, world_size: int = 1, **changes) -> RunRecord:
    fields = {
        "run_id": "run",
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "pid": 4242 + rank,
        "host": "host",
        "started_unix_ns": 1_700_000_000_000_000_000,
        "lag_steps": 1,
        "argv": ["finetune.py"],
        "cwd": "/work",
        "versions": {"torch": "2.9"},
        "device": {"type": "cpu"},
        "config": {},
    }
    return RunRecord(**{**fields, **changes})


def parameter(identity: int, name: str, shape=(2, 3), dtype: str = "float32", trainable: bool = True, optimizer: int | None = 0):
    return ParameterInfo(
        id=identity,
        name=name,
        shape=list(shape),
        dtype=dtype,
        requires_grad=trainable,
        optimizer=optimizer if trainable else None,
        group=0 if trainable and optimizer is not None else None,
    )


def parameters():
    return [
        parameter(0, "unet.conv.weight", (4, 5)),
        parameter(1, "unet.conv.bias", (4,)),
        parameter(2, "unet.unused.weight", (7,)),
        parameter(3, "vae.weight", (10, 10), trainable=False),
    ]


def model(train: int = 0, **changes) -> ModelRecord:
    fields = {
        "train": train,
        "trainer": "DreamboothDiffusionTrainer",
        "model_class": "StableDiffusion",
        "processor": "OptimizerProcessor",
        "hooks": [
            HookInfo(index=index, hook=name, priority=priority, stages=stages) for index, (name, priority, stages) in enumerate(HOOKS)
        ],
        "optimizers": [OptimizerInfo(id=0, class_="AdamW", groups=[GroupInfo(lr=0.001, parameters=3)])],
        "parameters": parameters(),
    }
    return ModelRecord(**{**fields, **changes})


def phase(name: str, start_ms: float, host_ms: float, parent: int | None = None, device_ms: float | None = None, **fields) -> Phase:
    device_ns = None if device_ms is None else round(device_ms * MS)
    return Phase(name=name, start_ns=round(start_ms * MS), host_ns=round(host_ms * MS), parent=parent, device_ns=device_ns, **fields)


def phases(slower: float = 1.0) -> list[Phase]:
    """Ten milliseconds of data, fifty of forward, thirty of the optimizer hook with backward, clipping, step and zero_grad inside."""
    return [
        phase("data_load", 0, 10),
        phase("forward", 10, 50 * slower),
        phase("hook", 60, 30, hook="OptimizerHook", stage="after_train_iter", hook_index=0),
        phase("backward", 61, 20, parent=2, loss_key="loss"),
        phase("clip_grads", 81, 2, parent=2),
        phase("optimizer_step", 83, 4, parent=2, optimizer=0),
        phase("zero_grad", 87, 1, parent=2, optimizer=0, set_to_none=True),
        phase("hook", 90, 3, hook="LrSchedulerHook", stage="after_train_iter", hook_index=1),
    ]


def norm(before: float | None = 5.0, after: float | None = 1.0, clipped: bool | None = True, **changes) -> GradNorm:
    fields = {
        "norm_type": 2.0,
        "max_norm": 1.0,
        "before_clip": before,
        "clip_returned": before,
        "after_clip": after,
        "clipped": clipped,
        "optimizer_params": before,
        "optimizer_params_after": after,
        "optimizer": 0,
    }
    return GradNorm(**{**fields, **changes})


def step(index: int, loss: float | None = 1.0, train: int = 0, **changes) -> StepRecord:
    grad_norm = changes.pop("grad_norm", norm())
    outcome = changes.pop("optimizer_step", "done")
    fields = {
        "train": train,
        "step": index,
        "epoch": index // 10,
        "iter": index,
        "complete": True,
        "start_ns": index * 100 * MS,
        "wall_ns": 100 * MS,
        "probe_ns": 1 * MS,
        "probe_inside_ns": 0,
        "phases": phases(),
        "loss": {"loss": loss},
        "lr": [0.001],
        "grad_norm": grad_norm,
        "accumulation": Accumulation(index=0, size=1),
        "optimizer_step": outcome,
        "updates": [Update(optimizer=0, outcome=outcome, grad_norm=grad_norm)] if outcome in ("done", "skipped") else [],
        "memory": Memory(rss_bytes=1024 * 1024 * 1024),
    }
    return StepRecord(**{**fields, **changes})


def skipped_step(index: int, loss: float | None = 1.0, before: float = 65536.0, after: float = 32768.0, **changes) -> StepRecord:
    overflow = norm(before=float("inf"), after=float("nan"), clipped=True)
    return step(index, loss, optimizer_step="skipped", grad_norm=overflow, loss_scale=LossScale(before=before, after=after), **changes)


def micro_step(index: int, accumulated: int, size: int, loss: float | None = 1.0, **changes) -> StepRecord:
    return step(index, loss, optimizer_step="none", grad_norm=None, accumulation=Accumulation(index=accumulated, size=size), **changes)


def module(index: int, seq: int, name: str, start_ms: float, host_ms: float, direction="forward", **changes) -> ModuleRecord:
    fields = {"train": 0, "call": 0, "direction": direction, "start_ns": round(start_ms * MS), "host_ns": round(host_ms * MS)}
    return ModuleRecord(step=index, seq=seq, name=name, **{**fields, **changes})


def modules(index: int) -> list[ModuleRecord]:
    """Forward of the text encoder, then of the unet with a block inside, then backward of the unet."""
    return [
        module(index, 0, "text_encoder", 12, 5),
        module(index, 1, "unet.block", 18, 20),
        module(index, 2, "unet", 17, 40),
        module(index, 3, "unet", 62, 18, direction="backward"),
    ]


def norms(index: int, l2=(3.0, 4.0, None, None), ids=None, role: str = "param.grad", **changes) -> NormsRecord:
    return NormsRecord(step=index, role=role, ids=ids, l2=list(l2), **{"train": 0, "point": "after_unscale", **changes})


def tensor(index: int, name: str = "unet.conv.weight", role: str = "param.grad", **changes) -> TensorRecord:
    fields = {"train": 0, "point": "after_unscale", "shape": [4, 5], "dtype": "float32", "numel": 20, "nan": 0, "posinf": 0, "neginf": 0}
    return TensorRecord(step=index, name=name, role=role, **{**fields, "l2": 3.0, **changes})


def stage(name: str, start_ms: float = 0, hooks=((2, "CheckpointHook", 90, 7),), after_step: int | None = None, **changes) -> StageRecord:
    times = [HookTime(index=index, hook=hook, priority=priority, host_ns=ms * MS) for index, hook, priority, ms in hooks]
    total_ns = sum(time.host_ns for time in times)
    fields = {"train": 0, "stage": name, "after_step": after_step, "start_ns": round(start_ms * MS), "host_ns": total_ns, "hooks": times}
    return StageRecord(**{**fields, **changes})


def event(code: str = "nonfinite", index: int | None = None, message: str = "a message", level="warning", **changes) -> EventRecord:
    return EventRecord(code=code, level=level, step=index, message=message, **{"train": 0, "at_ns": 1, **changes})


def end(steps: int, reason="finished", **changes) -> EndRecord:
    fields = {"train": 0, "optimizer_steps": steps, "skipped_steps": 0, "unapplied_micro_steps": 0, "dropped_records": 0, "probe_ns": 0}
    return EndRecord(reason=reason, steps=steps, **{**fields, **changes})


def small_run(steps: int = 3) -> list[Record]:
    """A finished run, with every kind of record in it."""
    records: list[Record] = [header(), model(), stage("before_run")]
    for index in range(steps):
        records += [*modules(index), norms(index), step(index, 1.0 / (index + 1))]
    return [*records, stage("after_run", after_step=steps - 1), event("probe_error", 0), end(steps)]


def lines(records) -> bytes:
    return b"".join(map(codec.encode, records))


def write_run(folder: Path, records, name: str = "rank00000.jsonl") -> Path:
    """Write records as one rank's file, and return the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(records if isinstance(records, bytes) else lines(records))
    return folder
