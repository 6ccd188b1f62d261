"""Whole tensors: copied where they are when the hook runs, written to one safetensors file a step by a thread behind the training.

The session keeps a tensor under a key and gets told whether there was room; `finish` hands a step's copies to the thread. What waits for
being written is bounded by `--dump-limit`; what would go over it is dropped and counted, and the training never waits. A file appears
under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from msprobe.capture.clock import device_module
from msprobe.capture.readback import is_host

FOLDER = "tensors"


class StepDump:
    """The tensors of one step that are kept whole; `file` is relative to the run folder."""

    def __init__(self, file: str, metadata: dict[str, str]) -> None:
        self.file = file
        self.metadata = metadata
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, dict[str, Any]] = {}


class DumpWriter:
    """Keeps and writes whole tensors.

    Args:
        folder: the run folder.
        limit_bytes: bound on the bytes that are copied and not yet written.
        failed: called, in the thread, with one sentence when a file could not be written.
    """

    def __init__(self, folder: Path, limit_bytes: int, failed: Callable[[str], None]) -> None:
        self.dropped = 0
        self._folder = folder / FOLDER
        self._limit = limit_bytes
        self._failed = failed
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[StepDump, list[Any]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def keep(self, dump: StepDump, key: str, tensor: torch.Tensor, **names: Any) -> bool:
        """Copy a tensor now; False where it cannot be kept (no elements of its own, or no room)."""
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_complex() or key in dump.tensors:
            return False
        with self._lock:
            if self._waiting_bytes + tensor.nbytes > self._limit:
                self.dropped += 1
                return False
            self._waiting_bytes += tensor.nbytes
        dump.tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
        dump.names[key] = names
        return True

    def finish(self, dump: StepDump) -> None:
        """Hand a step's copies to the thread."""
        if not dump.tensors:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="msprobe-dumps", daemon=True)
            self._thread.start()
        self._queue.put((dump, _arrivals(dump)))

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            dump, arrivals = item
            try:
                for event in arrivals:
                    event.synchronize()
                self._write(dump)
            except Exception as error:
                self.dropped += len(dump.tensors)
                self._failed(f"{dump.file} could not be written ({type(error).__name__}: {error}); these tensors are lost")
            finally:
                with self._lock:
                    self._waiting_bytes -= sum(tensor.nbytes for tensor in dump.tensors.values())
                dump.tensors.clear()

    def _write(self, dump: StepDump) -> None:
        from safetensors.torch import save_file  # slow to import, and only where something is dumped

        self._folder.mkdir(exist_ok=True)
        path = self._folder / Path(dump.file).name
        temporary = path.with_suffix(".part")
        try:
            host = {key: tensor if is_host(tensor.device) else tensor.to("cpu") for key, tensor in dump.tensors.items()}
            save_file(host, temporary, {**dump.metadata, "names": json.dumps(dump.names)})
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _arrivals(dump: StepDump) -> list[Any]:
    """Return an event for each device that the copies were made on: the thread waits for it before it reads."""
    events = []
    for device in {tensor.device for tensor in dump.tensors.values() if not is_host(tensor.device)}:
        module = device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        events.append(event)
    return events
