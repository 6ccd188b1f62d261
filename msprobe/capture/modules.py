"""Where forward spends its time: the calls of the root model's children, timed by forward hooks.

The session makes one `ModuleTimer` per `train()` and takes its calls at the end of each step. Which modules are called is not known
before the first step (ModelScope enters the VAE through `vae.encode`, so hooks on `vae` never fire, those on `vae.encoder` do). So
candidates down to `DEPTH` are hooked, and a candidate that turns out to run inside another one loses its hooks after that step. The
timer knows no phases: it asks the session whether a call counts. It never touches a value, an input or an output.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe.capture.calls import Call
from msprobe.capture.parameters import plain_name

# Dynamo takes its answer for a constant, so that a hook which it traces leaves nothing in the graph. Early torch 2 has no such function.
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", bool)
DEPTH = 3
MOST_CANDIDATES = 500


class _Open:
    """A module that is being timed; `depth` counts its calls of itself."""

    __slots__ = ("call", "depth", "module")

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.module = module
        self.call = call
        self.depth = 0


class ModuleTimer:
    """Times the outermost called candidates below a model.

    Args:
        begin: called with name, module and arguments when a candidate is entered outside every other; returns the call, or None when this
            call does not count.
        finish: called when that call returned.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Call | None],
        finish: Callable[[Call], None],
    ) -> None:
        self._begin = begin
        self._finish = finish
        self._candidates = _candidates(model)
        self._handles: list[Any] = []
        self._open: _Open | None = None
        self._inner: set[str] = set()
        self._outermost: set[str] = set()

    def call_of(self, module: nn.Module) -> Call | None:
        """Return the open call of a module that is being timed."""
        return self._open.call if self._open is not None and self._open.module is module else None

    def install(self) -> None:
        """Hook the candidates: forward begins."""
        for name, module in self._candidates:
            entered = StowawayHook(functools.partial(self._entered, name))
            # The second is called also when the module raises: the model may catch that and go on with another child.
            self._handles += [
                module.register_forward_pre_hook(entered, with_kwargs=True),
                module.register_forward_hook(StowawayHook(self._left), always_call=True),
            ]

    def remove(self) -> None:
        """Take every hook out: forward is over. Candidates that only ever ran inside others are candidates no more.

        Where a call never returned it is not certain what ran inside what, so nothing is concluded.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._open is None and self._inner - self._outermost:
            self._candidates = [(name, module) for name, module in self._candidates if name not in self._inner - self._outermost]
        self._inner.clear()
        self._open = None

    def _entered(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._open is not None:
            if self._open.module is module:
                self._open.depth += 1
            else:
                self._inner.add(name)
            return
        call = self._begin(name, module, arguments, keywords)
        if call is not None:
            self._outermost.add(name)
            self._open = _Open(module, call)

    def _left(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._open is None or self._open.module is not module:
            return
        if self._open.depth:
            self._open.depth -= 1
            return
        call, self._open = self._open.call, None
        self._finish(call)


class StowawayHook:
    """A hook that stays behind when its module is pickled or copied: the copy holds a call that does nothing.

    `torch.save(model)` and `copy.deepcopy(model)` take a module's hooks along. The copy must neither report to this run nor need msprobe
    to be loaded, so a hook pickles as a `functools.partial` of a built-in that ignores its arguments.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Run the hook, but not while the module is being compiled: it would break the graph."""
        if not _is_compiling():
            self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "msprobe.hook_of_a_copy")


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules down to `DEPTH` below the model, breadth first, each once, without compiled ones and what lies below them."""
    found: dict[int, tuple[str, nn.Module]] = {}
    level = [] if is_compiled(model) else [("", model)]
    for _ in range(DEPTH):
        children = [(f"{prefix}{name}", child) for prefix, parent in level for name, child in parent.named_children()]
        fresh = [(name, child) for name, child in children if id(child) not in found and not is_compiled(child)]
        found.update((id(child), (plain_name(name), child)) for name, child in reversed(fresh))
        level = [(f"{name}.", child) for name, child in fresh]
    return list(found.values())[:MOST_CANDIDATES]


def dynamo_is_in_use() -> bool:
    """Tell whether this process has called `torch.compile` or compiled anything: hooks that come and go would make it compile again.

    Asked of dynamo's own state, and only where it has been imported (diffusers and transformers do, without using it).
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    utils = sys.modules.get("torch._dynamo.utils")
    backends = getattr(frames, "cached_backends", None) or {}
    counters = getattr(utils, "counters", None) or {}
    return any(backend is not None for backend in backends.values()) or bool(counters.get("frames", {}).get("total"))


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module was compiled: a hook added to it now would never fire, or break its graph."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def innermost_module(model: nn.Module, error: BaseException) -> str | None:
    """Return the path of the deepest module of `model` in whose code an exception was raised, or None.

    Read from the frames of the traceback, so it is exact without any hook. An exception out of the backward engine has no such frames.
    """
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    deepest: str | None = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else None
        owner = frame.f_locals.get(first) if first is not None else None
        if isinstance(owner, nn.Module) and id(owner) in names:
            deepest = names[id(owner)]
        traceback = traceback.tb_next
    return deepest
