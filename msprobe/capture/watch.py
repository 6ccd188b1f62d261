"""The hooks on selected modules: in while forward runs in a selected step (and backward, where it computes forward again), out otherwise.

A `ModuleWatch` knows which call is inside which and reports entering and leaving to the session, which measures. Modules that are entered
by a method have that method shadowed on the instance for the same time. Nothing here measures, and nothing changes an input or an output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from msprobe.capture.calls import Call
from msprobe.capture.modules import StowawayHook
from msprobe.capture.selection import WatchedModule

Entered = Callable[[WatchedModule, tuple[Any, ...], dict[str, Any]], "Call | None"]
Left = Callable[[WatchedModule, Call, Any], None]


class ModuleWatch:
    """Hooks the selected modules.

    Args:
        modules: the selected modules.
        entered: called with the arguments when a selected module is entered; returns the call, or None when this call does not count.
        left: called with that call and the output when it returned.
    """

    def __init__(self, modules: Sequence[WatchedModule], entered: Entered, left: Left) -> None:
        self.modules = modules
        self._entered = entered
        self._left = left
        self._handles: list[Any] = []
        self._shadowed: list[WatchedModule] = []
        self._open: list[tuple[WatchedModule, Call]] = []

    @property
    def innermost(self) -> Call | None:
        """The watched call that encloses this moment most closely."""
        return self._open[-1][1] if self._open else None

    def arm(self) -> None:
        """Put the hooks in; they run after those that are there already, so they see what the module's callers will."""
        for watched in self.modules:
            if watched.method is not None:
                self._shadow(watched, watched.method)
                continue
            before, after = functools.partial(self._before, watched), functools.partial(self._after, watched)
            self._handles += [
                watched.module.register_forward_pre_hook(StowawayHook(before), with_kwargs=True),
                watched.module.register_forward_hook(StowawayHook(after)),
            ]

    def disarm(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for watched in self._shadowed:
            method = watched.method or ""
            if isinstance(vars(watched.module).get(method), _WatchedMethod):
                del vars(watched.module)[method]
        self._shadowed.clear()
        self._open.clear()

    def _shadow(self, watched: WatchedModule, method: str) -> None:
        if method not in vars(watched.module):  # a script's own shadow stays
            vars(watched.module)[method] = _WatchedMethod(self, watched)
            self._shadowed.append(watched)

    def _before(self, watched: WatchedModule, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.enter(watched, arguments, keywords)

    def enter(self, watched: WatchedModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A watched module is entered."""
        call = self._entered(watched, arguments, keywords)
        if call is not None:
            self._open.append((watched, call))

    def _after(self, watched: WatchedModule, module: nn.Module, arguments: Any, output: Any) -> None:
        self.leave(watched, output)

    def leave(self, watched: WatchedModule, output: Any) -> None:
        """A watched module has returned."""
        if not any(entered is watched for entered, _ in self._open):
            return
        while self._open:  # what an exception left behind lies on top
            entered, call = self._open.pop()
            if entered is watched:
                self._left(watched, call, output)
                return


class _WatchedMethod:
    """Stands in for a method of one module; a pickled or copied module gets its own method back."""

    def __init__(self, watch: ModuleWatch, watched: WatchedModule) -> None:
        self._watch = watch
        self._watched = watched
        self._original = getattr(watched.module, watched.method or "")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the method, watched."""
        self._watch.enter(self._watched, arguments, keywords)
        output = self._original(*arguments, **keywords)
        self._watch.leave(self._watched, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._watched.module, self._watched.method)
