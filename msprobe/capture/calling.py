"""The entries of module calls: which call counts, what is measured of its inputs and outputs, and of their gradients as they arrive.

The hooks of `capture.modules` (which times the root's children) and of `capture.watch` (which looks into selected modules) end here.
Gradients come from hooks on the tensors themselves: full backward hooks on containers change the order in which gradients are summed,
and so the last bits of a training. A gradient is measured where any module is watched, so that the first bad value is found in backward
as well; it is recorded where `module.grad_output` is selected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from msprobe.capture.calls import Call
from msprobe.capture.entries import entry
from msprobe.capture.loss_terms import is_denoiser
from msprobe.capture.measured import Measured, measure
from msprobe.capture.modules import ModuleTimer, dynamo_is_in_use
from msprobe.capture.nested import tensors_in, tensors_in_arguments
from msprobe.capture.notes import Note
from msprobe.capture.recorder import Recorder
from msprobe.capture.seen import GradientHook, Seen
from msprobe.capture.selection import WatchedModule
from msprobe.capture.spans import Span
from msprobe.capture.step import StepDraft
from msprobe.capture.updating import UpdateEntries
from msprobe.capture.watch import ModuleWatch


class CallEntries(UpdateEntries):
    """The part of a session that follows the calls of modules."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._timer: ModuleTimer | None = None
        self._watch: ModuleWatch | None = None
        self._expects_recomputation = True  # until a whole step has shown that there is none

    def watch_modules(self, model: nn.Module, modules: list[WatchedModule]) -> None:
        """Prepare the hooks; they go in when forward begins."""
        self._timer = ModuleTimer(model, self._module_begins, self._module_ends)
        if modules:
            self._watch = ModuleWatch(modules, self._watched_enters, self._watched_leaves)

    # When the hooks are in

    def put_module_hooks_in(self) -> None:
        """Forward begins. The model carries hooks only until it ends: what the script copies, saves or compiles of it is free of them."""
        if dynamo_is_in_use():
            self.ledger.compiled()
            return
        if self._timer is not None:
            self._timer.install()
        if self._watch is not None and self.draft is not None and self.draft.is_selected:
            self._watch.arm()

    def take_module_hooks_out(self) -> None:
        """Forward has ended, or the step has."""
        if self._timer is not None:
            self._timer.remove()
        if self._watch is not None:
            self._watch.disarm()

    @entry
    def backward_begins(self, /, **attributes: Any) -> Span | None:
        """`torch.autograd.backward` is about to run; it may compute parts of forward again (gradient checkpointing)."""
        if self.draft is None:
            return None
        if self._watch is not None and self.draft.is_selected and self._expects_recomputation and not dynamo_is_in_use():
            self._watch.arm()
        return self.draft.spans.begin("backward", self.clock.mark(), **attributes)

    @entry
    def backward_ends(self, span: Span | None) -> None:
        """`torch.autograd.backward` has returned."""
        end = self.clock.mark()
        if span is not None and self.draft is not None:
            self.draft.spans.finish(span, end)
            self._close_backward_calls(self.draft, end)
        if self._watch is not None:
            self._watch.disarm()

    def _close_backward_calls(self, draft: StepDraft, end: Any) -> None:
        """End what no gradient of an input has ended, and conclude whether to look for recomputation in the steps to come."""
        for call in draft.calls:
            if call.direction == "backward" and call.end is None:
                call.end = end
        if draft.is_selected and self._watch is not None and draft.calls:
            self._expects_recomputation = any(call.recompute for call in draft.calls)

    # The root's children, timed

    @entry
    def _module_begins(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
        call = self._call_begins(name)
        if call is not None and self.draft is not None and is_denoiser(name, module):
            self.draft.loss_terms.denoiser_called(call.number, arguments, keywords)
        return call

    @entry
    def _module_ends(self, call: Call) -> None:
        call.end = self.clock.mark()

    def _call_begins(self, name: str) -> Call | None:
        """Number and time a call, if it is part of forward, or of the backward pass that computes forward again."""
        draft = self.draft
        inside = draft.spans.innermost if draft is not None else None
        if draft is None or inside is None or inside.name not in ("forward", "backward"):
            return None
        is_again = inside.name == "backward"
        if not is_again and not self.listens():
            return None
        call = Call(draft.next_seq(), name, draft.number_of_call(name, is_again), self.clock.mark(), recompute=is_again)
        draft.calls.append(call)
        return call

    # Selected modules, looked into

    @entry
    def _watched_enters(self, watched: WatchedModule, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
        assert self._watch is not None
        timed = self._timer.call_of(watched.module) if self._timer is not None and watched.method is None else None
        call = timed if timed is not None else self._call_begins(watched.name)
        draft = self.draft
        if call is None or draft is None or call.recompute:
            return call
        call.parent = self._watch.innermost
        for path, tensor in tensors_in_arguments(arguments, keywords):
            self._take_input(draft, watched, call, path, tensor)
        if timed is None:
            call.start = self.clock.mark()
        return call

    def _take_input(self, draft: StepDraft, watched: WatchedModule, call: Call, path: str, tensor: torch.Tensor) -> None:
        seen = draft.seen.find(tensor)
        if "module.input" in watched.roles:
            measured = seen.measured(tensor, draft.full, draft.readback)
            self._note(draft, watched, "module.input", call, path, tensor, measured)
        else:
            measured = seen.judged(tensor, draft.readback)
        call.inputs.append((path, measured))
        if tensor.requires_grad:
            call.has_gradient_hooks = True
            seen.takers.append((call, path))
            self._hook_gradient(draft, seen, tensor)

    @entry
    def _watched_leaves(self, watched: WatchedModule, call: Call, output: Any) -> None:
        end = self.clock.mark()
        if call.end is None:
            call.end = end
        draft = self.draft
        if draft is None:
            return
        if call.recompute:
            self._reach_gradients_of_recomputed(draft, watched, call, output)
            return
        for path, tensor in tensors_in(output):
            seen = draft.seen.find(tensor)
            if "module.output" in watched.roles:
                measured = seen.measured(tensor, draft.full, draft.readback)
                self._note(draft, watched, "module.output", call, path, tensor, measured).inputs = call.inputs
            self._expect_gradient(draft, seen, watched, call, path, tensor)

    def _expect_gradient(self, draft: StepDraft, seen: Seen, watched: WatchedModule, call: Call, path: str, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        seen.makers.append((call, path))
        draft.watched_by_call[call] = watched
        self._hook_gradient(draft, seen, tensor)
        if not call.has_gradient_hooks and tensor.grad_fn is not None:
            # No input will get a gradient, so the operation that made the output is the last that is known to run.
            tensor.grad_fn.register_hook(lambda inputs, outputs: self._operation_done(draft, call))
        call.has_gradient_hooks = True

    def _reach_gradients_of_recomputed(self, draft: StepDraft, watched: WatchedModule, again: Call, output: Any) -> None:
        """Reentrant checkpointing ran the module without a graph the first time: its gradients come through this one."""
        first = next((call for call in draft.calls if call.name == again.name and call.number == again.number and not call.recompute), None)
        if first is None or first.has_gradient_hooks:
            return
        for path, tensor in tensors_in(output):
            self._expect_gradient(draft, draft.seen.find(tensor), watched, first, path, tensor)

    # Gradients

    def _hook_gradient(self, draft: StepDraft, seen: Seen, tensor: torch.Tensor) -> None:
        if seen.is_hooked:
            return
        seen.is_hooked = True
        handle = tensor.register_hook(GradientHook(self._gradient_arrives, draft, seen))  # type: ignore[no-untyped-call]
        if tensor.is_leaf:  # it outlives the step, and so would the hook
            draft.leaf_hooks.append(handle)

    @entry
    def _operation_done(self, draft: StepDraft, call: Call) -> None:
        call.ends_backward(self.clock.mark())

    @entry
    def _gradient_arrives(self, draft: StepDraft, seen: Seen, gradient: torch.Tensor) -> None:
        """The gradient of a tensor is complete: it ends the backward pass of what took the tensor, and begins that of what made it."""
        arrived = self.clock.mark()
        if self.draft is not draft:
            return
        for call, _ in seen.takers:
            call.ends_backward(arrived)
        makers = [(call, path, draft.watched_by_call[call]) for call, path in reversed(seen.makers)]
        is_recorded = any("module.grad_output" in watched.roles for _, _, watched in makers)
        seen.gradient = measure(gradient, draft.full and is_recorded, draft.readback)
        draft.arrivals.append((draft.sequence, seen))
        for call, path, watched in makers:
            self._gradient_reaches(draft, watched, call, path, gradient, seen.gradient)

    def _gradient_reaches(
        self, draft: StepDraft, watched: WatchedModule, call: Call, path: str, gradient: torch.Tensor, measured: Measured
    ) -> None:
        call.output_gradients.append(measured)
        if "module.grad_output" not in watched.roles:
            return
        if call.backward is None:
            call.backward = Call(draft.next_seq(), call.name, call.number, self.clock.mark(), direction="backward")
            draft.calls.append(call.backward)
        self._note(draft, watched, "module.grad_output", call, path, gradient, measured)

    def _note(
        self, draft: StepDraft, watched: WatchedModule, role: str, call: Call, path: str, tensor: torch.Tensor, measured: Measured
    ) -> Note:
        note = Note(draft.next_seq(), role, watched.name, call.number, path, measured)
        draft.notes.append(note)
        if role in watched.dumped:
            draft.keep_whole(note, tensor)
        return note
