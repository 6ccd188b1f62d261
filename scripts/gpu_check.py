"""Check on a real accelerator what the tests on CPU cannot: device times, device norms, waits, the unread step, mixed precision.

    python scripts/gpu_check.py [CHECK...]

Trains small models with ModelScope's own trainer on the device, with and without msprobe, in a few minutes and without a network. It needs
torch, modelscope and msprobe. One line per check on stdout, `ok` or `FAIL` with the numbers; what ModelScope logs goes to stderr. With
names, only those checks run.

Exit status: 0 every check holds, 1 one does not, 2 there is no accelerator here or no check of that name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

NORM_TOLERANCE = 1e-6
TIME_TOLERANCE = 0.20
MOST_TIME_RATIO = 1.10
NORM_SIZES = (1, 1_000, 10**6, 10**8)
NORM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAVY_FORWARD_SECONDS = 0.1
SKIPPED_STEP = 2
# A session's entries that end a run: they wait for the device on purpose, when the training is over.
WAITING_ENTRIES = ("broken", "ends")


class Verdict(NamedTuple):
    """Whether a check holds, and its numbers in words."""

    holds: bool
    text: str


# What is trained


class Examples(Dataset):  # type: ignore[type-arg]
    """A fixed list of examples."""

    def __init__(self, examples: Sequence[dict[str, torch.Tensor]]) -> None:
        self.examples = list(examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.examples[index]


def pictures(count: int, size: int) -> Examples:
    """Return latents of shape (4, size, size), float32 on CPU, the same ones at every call."""
    generator = torch.Generator().manual_seed(7)
    return Examples([{"x": torch.randn(4, size, size, generator=generator)} for _ in range(count)])


def factors(*values: float) -> Examples:
    """Return one example per step, whose `x` multiplies a `Given` model's loss."""
    return Examples([{"x": torch.tensor(value)} for value in values])


class Block(nn.Module):
    """Norm, convolution, norm, convolution, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of x: (batch, width, height, width of the picture)."""
        return x + self.layers(x)


class Attention(nn.Module):
    """Self-attention over the picture's positions, written out: fused kernels need not be deterministic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of x."""
        tokens = x.flatten(2).transpose(1, 2)
        query, key, value = self.project(tokens).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(dim=-1)
        return x + (weights @ value).transpose(1, 2).reshape(x.shape)


class SmallUNet(nn.Module):
    """A diffusion UNet in small: down, attention, up; trained to find the noise that it draws on the device."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.Sequential(*(Block(width) for _ in range(depth)), nn.Conv2d(width, width, 2, stride=2))
        self.middle = Attention(width)
        self.up = nn.Sequential(nn.ConvTranspose2d(width, width, 2, stride=2), *(Block(width) for _ in range(depth)))
        self.leave = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss on a batch of shape (batch, 4, size, size)."""
        x = x.to(self.enter.weight.device)
        noise = torch.randn_like(x)
        found = self.leave(self.up(self.middle(self.down(self.enter(x + noise)))))
        return {"loss": nn.functional.mse_loss(found.float(), noise)}


class Given(nn.Module):
    """Zero parameters whose gradients are given: the loss is the sum of each parameter times its gradient, times `x`."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.given = list(gradients)
        self.tensors = nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss; `x` holds one number."""
        terms = [(parameter * gradient).sum().float() for parameter, gradient in zip(self.tensors, self.given, strict=True)]
        return {"loss": torch.stack(terms).sum() * x.reshape(()).to(terms[0].device)}


class Multiply(nn.Module):
    """The same product of two matrices over and over: much work for the device, little for the host."""

    def __init__(self, repetitions: int, device: torch.device, size: int = 4096) -> None:
        super().__init__()
        self.repetitions = repetitions
        self.register_buffer("left", torch.randn(size, size, device=device))
        self.register_buffer("right", torch.randn(size, size, device=device))

    def forward(self) -> torch.Tensor:
        """Return one element of the product, shape ()."""
        for _ in range(self.repetitions):
            product = self.left @ self.right
        return product[0, 0]


class Heavy(nn.Module):
    """A model whose forward is `body`; with `bracketed` it measures itself, between two waits for the device."""

    def __init__(self, body: Multiply, device: torch.device, bracketed: bool) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones((), device=device))
        self.bracketed = bracketed
        self.seconds: list[float] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, shape (); `x` is not used."""
        if not self.bracketed:
            return {"loss": self.scale * self.body()}
        wait_for(self.scale.device)
        began = time.perf_counter()
        loss = self.scale * self.body()
        wait_for(self.scale.device)
        self.seconds.append(time.perf_counter() - began)
        return {"loss": loss}


# How it is trained


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything."""
    torch.get_device_module(device).synchronize()


def build_trainer(
    model: nn.Module,
    examples: Examples,
    folder: Path,
    *,
    optimizer: str = "SGD",
    options: dict[str, Any] | None = None,
    fp16: bool = False,
    batch_size: int = 1,
    at_iteration_end: Callable[[Any], None] | None = None,
) -> Any:
    """Return ModelScope's trainer of a model that is on its device, for one pass over the examples.

    `options` are those of ModelScope's OptimizerHook; `at_iteration_end` is called with the trainer after all other hooks.
    """
    from modelscope.trainers.trainer import EpochBasedTrainer

    settings = {
        "framework": "pytorch",
        "task": "text-classification",
        "model": {"type": "given"},
        "train": {
            "work_dir": str(folder),
            "max_epochs": 1,
            "hooks": [],  # left out, ModelScope would share one list between trainers, and empty it
            "dataloader": {"batch_size_per_gpu": batch_size, "workers_per_gpu": 0, "shuffle": False},
            "optimizer": {"type": optimizer, "lr": 1e-3, "options": options or {}},
            "lr_scheduler": {"type": "StepLR", "step_size": 1000},
            "checkpoint": {"period": {"interval": 1000, "save_last": False}},
        },
    }
    path = folder / "configuration.json"
    path.write_text(json.dumps(settings))
    return EpochBasedTrainer(
        model=model,
        cfg_file=str(path),
        train_dataset=examples,
        data_collator=torch.utils.data.default_collate,
        callbacks=[_hook(at_iteration_end)] if at_iteration_end is not None else None,
        work_dir=str(folder),
        use_fp16=fp16,
    )


def _hook(function: Callable[[Any], None]) -> Any:
    from modelscope.trainers.hooks.hook import Hook

    class AtIterationEnd(Hook):  # type: ignore[misc]  # ModelScope has no types
        """Calls a function when the other hooks of the iteration have run."""

        PRIORITY = 100

        def after_train_iter(self, trainer: Any) -> None:
            function(trainer)

    return AtIterationEnd()


@contextlib.contextmanager
def folder_for_a_run() -> Iterator[Path]:
    """Give a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="msprobe-gpu-check-") as name:
        yield Path(name)


def train(model: nn.Module, examples: Examples, traced: bool, **settings: Any) -> tuple[Any, list[Any]]:
    """Train, and return the trainer and the records; without msprobe there are none. A failure inside msprobe is raised."""
    from msprobe.testing import capture

    with folder_for_a_run() as folder:
        trainer = build_trainer(model, examples, folder, **settings)
        with capture() if traced else contextlib.nullcontext([]) as records:
            trainer.train()
        return trainer, records


def of(kind: str, records: Sequence[Any]) -> list[Any]:
    """Return the records of one kind, such as `step`."""
    return [record for record in records if type(record).__struct_config__.tag == kind]


# The checks


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Seed everything, and have torch refuse what is not deterministic."""
    torch.manual_seed(0)
    torch.get_device_module(device).manual_seed_all(0)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_identity(device: torch.device) -> Verdict:
    """With and without msprobe: losses, weights, optimizer state and random states are the same, bit for bit."""
    variants: dict[str, dict[str, Any]] = {
        "clip and accumulation": {"options": {"grad_clip": {"max_norm": 0.5}, "cumulative_iters": 2}},
        "no clip": {},
        "mixed precision": {"options": {"grad_clip": {"max_norm": 0.5}}, "fp16": True},
    }
    if device.type != "cuda":  # ModelScope's mixed precision is CUDA's
        del variants["mixed precision"]
    differing = []
    for name, settings in variants.items():
        off, on = (_final_state(device, traced, **settings) for traced in (False, True))
        differing += [f"{name}: {key}" for key in off if not _same(off[key], on[key])]
    return Verdict(not differing, f"{', '.join(differing)} differ" if differing else f"the same in: {', '.join(variants)}")


def _final_state(device: torch.device, traced: bool, **settings: Any) -> dict[str, Any]:
    losses: list[str] = []
    with deterministic(device):
        model = SmallUNet(width=32, depth=3).to(device)
        trainer, _ = train(
            model,
            pictures(16, 16),
            traced,
            optimizer="AdamW",
            batch_size=2,
            at_iteration_end=lambda trainer: losses.append(float(trainer.train_outputs["loss"]).hex()),
            **settings,
        )
        return {
            "losses": losses,
            "weights": model.state_dict(),
            "optimizer state": trainer.optimizer.state_dict(),
            "random state": torch.get_rng_state(),
            "random state of the device": torch.get_device_module(device).get_rng_state(),
        }


def _same(one: Any, other: Any) -> bool:
    """Compare nested values bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(_bits(one), _bits(other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(itertools.starmap(_same, zip(one, other, strict=True)))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, so that NaN equals itself and -0 is not 0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def check_device_times(device: torch.device) -> Verdict:
    """The device times of forward, and of the module that is all of it, agree with a measurement between two waits."""
    body = Multiply(_repetitions(device), device)
    examples = factors(*[1.0] * 8)
    reference, _ = train(Heavy(body, device, bracketed=True), examples, traced=False)
    _, records = train(Heavy(body, device, bracketed=False), examples, traced=True)
    true = statistics.median(reference.model.seconds[2:]) * 1e3
    found = {
        "forward": [phase.device_ns for step in of("step", records) for phase in step.phases if phase.name == "forward"],
        "module body": [record.device_ns for record in of("module", records) if record.name == "body"],
    }
    absent = [name for name, times in found.items() if len(times) != len(examples) or None in times]
    if absent:
        return Verdict(False, f"{', '.join(absent)}: device times are absent ({found})")
    measured = {name: statistics.median(times[2:]) / 1e6 for name, times in found.items()}
    holds = all(abs(value / true - 1) <= TIME_TOLERANCE for value in measured.values())
    words = ", ".join(f"{name} {value:.1f} ms" for name, value in measured.items())
    return Verdict(holds, f"{words}; between two waits {true:.1f} ms; at most {TIME_TOLERANCE:.0%} apart")


def _repetitions(device: torch.device) -> int:
    """Return how many products take HEAVY_FORWARD_SECONDS on this device."""
    trial = Multiply(10, device)
    trial()
    wait_for(device)
    began = time.perf_counter()
    trial()
    wait_for(device)
    return max(1, math.ceil(HEAVY_FORWARD_SECONDS * 10 / (time.perf_counter() - began)))


def check_phases(device: torch.device) -> Verdict:
    """Every phase of every step has a device time that is not negative, and the device's memory is read."""
    _, records = train(SmallUNet(32, 2).to(device), pictures(12, 16), True, options={"grad_clip": {"max_norm": 1.0}}, batch_size=2)
    steps = of("step", records)
    wrong = [
        f"step {step.step} {phase.name} {phase.device_ns}"
        for step in steps
        for phase in step.phases
        if phase.device_ns is None or phase.device_ns < 0
    ]
    wrong += [f"step {step.step} no device memory" for step in steps if not step.memory.allocated_bytes or not step.memory.peak_bytes]
    names = list(dict.fromkeys(phase.name for step in steps for phase in step.phases))
    expected = {"data_load", "forward", "hook", "backward", "clip_grads", "optimizer_step", "zero_grad"}
    wrong += [f"no phase {name}" for name in sorted(expected.difference(names))]
    return Verdict(not wrong, "; ".join(wrong[:5]) if wrong else f"{len(steps)} steps; {', '.join(names)}")


def check_norms(device: torch.device) -> Verdict:
    """Norms reduced on the device agree with float64 on the host, to 10^8 elements."""
    from msprobe.capture.reduce import norms

    worst, where = 0.0, "nowhere"
    for dtype, size in itertools.product(NORM_DTYPES, NORM_SIZES):
        makers = {"normal": torch.randn(size, dtype=dtype, device=device), "equal": torch.full((size,), 0.1, dtype=dtype, device=device)}
        for order, (kind, tensor) in itertools.product((2.0, math.inf), makers.items()):
            apart = _apart(norms([tensor], order).tolist()[0], host_norm(tensor, order))
            if apart > worst:
                worst, where = apart, f"{kind} {size} x {str(dtype).removeprefix('torch.')}, order {order}"
    return Verdict(worst <= NORM_TOLERANCE, f"at most {worst:.1e} apart ({where}); {NORM_TOLERANCE:.0e} is allowed")


def host_norm(tensor: torch.Tensor, order: float = 2.0) -> float:
    """Return the vector norm of a tensor of any device, in float64 on the host."""
    pieces = tensor.detach().cpu().reshape(-1).split(2**22)
    if order == math.inf:
        return max(float(piece.abs().max()) for piece in pieces)
    return math.sqrt(math.fsum(float(piece.double().square().sum()) for piece in pieces))


def _apart(found: float | None, true: float) -> float:
    """Return the relative difference; what is absent or not a number is infinitely far."""
    return math.inf if found is None or math.isnan(found) else abs(found - true) / (abs(true) or 1.0)


def check_recorded_norms(device: torch.device) -> Verdict:
    """What a training records for parameters of three dtypes is their gradients' norm; so is the total."""
    sizes = {torch.float32: 10**6, torch.bfloat16: 10**5, torch.float16: 999}
    gradients = [torch.randn(size, dtype=dtype, device=device) for dtype, size in sizes.items()]
    _, records = train(Given(gradients).to(device), factors(1.0, 1.0), traced=True)
    true = [host_norm(gradient) for gradient in gradients]
    worst = 0.0
    for norms, step in zip(of("norms", records), of("step", records), strict=True):
        worst = max(worst, *(_apart(found, expected) for found, expected in zip(norms.l2, true, strict=True)))
        totals = (step.grad_norm.before_clip, step.grad_norm.optimizer_params)
        worst = max(worst, *(_apart(total, math.hypot(*true)) for total in totals))
    return Verdict(worst <= NORM_TOLERANCE, f"{len(true)} parameters and the total: at most {worst:.1e} apart")


def check_entries_never_wait(device: torch.device) -> Verdict:
    """Torch itself finds no wait for the device inside msprobe's entries."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        return Verdict(True, f"not checked: torch.{device.type} cannot refuse waits")
    with entries_refuse_waits(module) as calls:
        train(SmallUNet(32, 2).to(device), pictures(12, 16), True, options={"grad_clip": {"max_norm": 1.0}}, batch_size=2)
        train(Given([torch.tensor([3.0, 4.0], device=device)]), factors(1.0, math.inf, 1.0), True, fp16=device.type == "cuda")
    return Verdict(sum(calls.values()) > 0, f"{sum(calls.values())} calls of {len(calls)} entries, none waited")


@contextlib.contextmanager
def entries_refuse_waits(module: Any) -> Iterator[Counter[str]]:
    """While inside, a wait for the device in an entry of a session raises; the counter holds the calls of each entry."""
    from msprobe.capture.session import Session

    calls: Counter[str] = Counter()

    def refusing(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            before = module.get_sync_debug_mode()
            module.set_sync_debug_mode("error")
            try:
                return entry(*arguments, **keywords)
            finally:
                module.set_sync_debug_mode(before)

        return guarded

    # What `entry` of msprobe.capture.entries decorates is wrapped, and nothing else in a session is.
    entries = {name: getattr(Session, name) for name in dir(Session) if hasattr(getattr(Session, name), "__wrapped__")}
    own = {name: entry for name, entry in vars(Session).items() if name in entries}
    for name, entry in entries.items():
        if name not in WAITING_ENTRIES:
            setattr(Session, name, refusing(name, entry))
    try:
        yield calls
    finally:
        for name in entries:
            if name in own:
                setattr(Session, name, own[name])
            elif name in vars(Session):
                delattr(Session, name)


class DeviceReads(TorchDispatchMode):
    """Counts the reads of single values from a device (`aten::_local_scalar_dense`); reads of host tensors wait for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Count, and run the operation."""
        if function is torch.ops.aten._local_scalar_dense.default and arguments[0].device.type != "cpu":
            self.count += 1
        return function(*arguments, **(keywords or {}))


def check_reads(device: torch.device) -> Verdict:
    """With and without msprobe, as many values are read from the device, and the driver is asked to wait as often.

    When the run ends, msprobe waits for the last step's values: one wait more.
    """
    off, on = (_reads_and_waits(device, traced) for traced in (False, True))
    holds = on[0] == off[0] and on[1] <= off[1] + 1
    return Verdict(holds, f"values read {off[0]} without, {on[0]} with msprobe; waits {off[1]} without, {on[1]} with (one more is allowed)")


def _reads_and_waits(device: torch.device, traced: bool) -> tuple[int, int]:
    def run() -> None:
        torch.manual_seed(0)
        train(SmallUNet(32, 2).to(device), pictures(20, 16), traced, options={"grad_clip": {"max_norm": 1.0}}, batch_size=2)

    with DeviceReads() as reads:
        run()
    with torch.profiler.profile() as profile:
        run()
        wait_for(device)
    waits = sum(event.count for event in profile.key_averages() if "Synchronize" in event.key)
    return reads.count, waits


def check_lag(device: torch.device) -> Verdict:
    """At the end of each iteration, every finished step but the newest is on disk; at the end of the run all are."""
    import msprobe

    written: list[int] = []
    with folder_for_a_run() as folder:
        file = folder / "runs" / "lag" / "rank00000.jsonl"
        trainer = build_trainer(
            SmallUNet(64, 4).to(device),
            pictures(40, 32),
            folder,
            batch_size=2,
            at_iteration_end=lambda trainer: written.append(_steps_in(file)),
        )
        msprobe.enable(out=folder / "runs", name="lag", strict=True, quiet=True)
        try:
            trainer.train()
        finally:
            msprobe.disable()
        header = json.loads(file.read_bytes().split(b"\n", 1)[0])
        written.append(_steps_in(file))
    # At the end of iteration k, k steps are finished: the k-th is still running.
    behind = max(finished - found for finished, found in enumerate(written[:-1]))
    holds = header["lag_steps"] == 1 and behind <= 1 and written[-1] == len(written) - 1
    return Verdict(holds, f"lag_steps {header['lag_steps']}; at most {behind} behind; {written[-1]} of {len(written) - 1} at the end")


def _steps_in(file: Path) -> int:
    if not file.exists():
        return 0
    whole = file.read_bytes().split(b"\n")[:-1]
    return sum(line.startswith(b'{"kind":"step"') for line in whole)


def check_step_time(device: torch.device) -> Verdict:
    """The median step takes hardly longer with msprobe, in pairs of runs one after the other."""
    model = SmallUNet(256, 12).to(device)
    _median_step(model, False)  # warms up
    ratios = []
    for _ in range(5):
        off, on = (_median_step(model, traced) for traced in (False, True))
        ratios.append(on / off)
    ratio = statistics.median(ratios)
    return Verdict(
        ratio <= MOST_TIME_RATIO,
        f"median ratio {ratio:.3f} of {len(ratios)} pairs ({min(ratios):.3f} to {max(ratios):.3f}), step {off * 1e3:.1f} ms without; "
        f"{MOST_TIME_RATIO} is allowed",
    )


def _median_step(model: nn.Module, traced: bool) -> float:
    """Return the median time of a step in seconds; ModelScope reads the loss in every step, so the host keeps pace with the device."""
    ends: list[float] = []
    train(
        model,
        pictures(16 * 40, 32),
        traced,
        optimizer="AdamW",
        options={"grad_clip": {"max_norm": 1.0}},
        batch_size=16,
        at_iteration_end=lambda trainer: ends.append(time.perf_counter()),
    )
    return statistics.median(after - before for before, after in itertools.pairwise(ends[5:]))


def check_mixed_precision(device: torch.device) -> Verdict:
    """An overflow is recorded as a skipped update with the halved scale; norms are unscaled; every other step is an update."""
    if device.type != "cuda":
        return Verdict(True, f"not checked: ModelScope has mixed precision only for CUDA, not for {device.type}")
    values = [1.0] * 5
    values[SKIPPED_STEP] = math.inf
    model = Given([torch.tensor([3.0, 4.0], device=device)])
    _, records = train(model, factors(*values), True, options={"grad_clip": {"max_norm": 1.0}}, fp16=True)
    steps = of("step", records)
    outcomes = [step.optimizer_step for step in steps]
    scale = steps[SKIPPED_STEP].loss_scale
    norms = [step.grad_norm for step in steps if step.step != SKIPPED_STEP]
    wrong = [
        "outcomes" if outcomes != ["skipped" if index == SKIPPED_STEP else "done" for index in range(len(values))] else "",
        "scale" if scale is None or scale.before is None or scale.after != scale.before / 2 else "",
        "before_clip" if any(_apart(norm.before_clip, 5.0) > NORM_TOLERANCE for norm in norms) else "",
        "after_clip" if any(_apart(norm.after_clip, 1.0) > 1e-5 or not norm.clipped for norm in norms) else "",
        "event" if [event.step for event in of("event", records) if event.code == "step_skipped"] != [SKIPPED_STEP] else "",
        "end" if of("end", records)[0].skipped_steps != 1 else "",
    ]
    named = ", ".join(word for word in wrong if word)
    found = f"{'/'.join(map(str, outcomes))}; scale {scale}; before_clip {norms[0].before_clip}, after_clip {norms[0].after_clip}"
    return Verdict(not named, f"wrong: {named}; {found}" if named else found)


CHECKS: dict[str, Callable[[torch.device], Verdict]] = {
    "identity": check_identity,
    "phases": check_phases,
    "device-times": check_device_times,
    "norms": check_norms,
    "recorded-norms": check_recorded_norms,
    "entries-never-wait": check_entries_never_wait,
    "reads": check_reads,
    "lag": check_lag,
    "mixed-precision": check_mixed_precision,
    "step-time": check_step_time,
}


def accelerator() -> torch.device | None:
    """Return the accelerator that torch (2.6 or later) sees, or None."""
    if not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return None
    return torch.device(torch.accelerator.current_accelerator().type, 0)


def run(name: str, check: Callable[[torch.device], Verdict], device: torch.device) -> bool:
    """Run a check and print its line; an exception in it is a failure."""
    began = time.perf_counter()
    try:
        # ModelScope and torch print to stdout here and there; stdout is for the lines of the checks.
        with contextlib.redirect_stdout(sys.stderr):
            verdict = check(device)
    except Exception as error:
        traceback.print_exc()
        verdict = Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    print(f"{'ok  ' if verdict.holds else 'FAIL'}  {name}: {verdict.text}  [{time.perf_counter() - began:.1f} s]", flush=True)
    return verdict.holds


def main() -> int:
    """Run the checks that are named, or all, and return the exit status."""
    wanted = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        print(f"gpu_check: there is no check {unknown[0]!r}; checks are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    device = accelerator()
    if device is None:
        print("gpu_check: torch sees no accelerator here; nothing was checked", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need; read when CUDA starts
    os.environ.setdefault("MODELSCOPE_LOG_LEVEL", "40")
    warnings.simplefilter("ignore")
    names = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)
    modelscope = importlib.import_module("modelscope")
    print(f"torch {torch.__version__}, modelscope {modelscope.__version__}, {names()}", flush=True)
    held = [run(name, CHECKS[name], device) for name in wanted]
    print(f"{sum(held)} of {len(held)} checks hold", flush=True)
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
