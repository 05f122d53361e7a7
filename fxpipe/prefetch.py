"""Copy the next batch to a CUDA device while the pipe trains on this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.pipeline import Pipeline

B = TypeVar("B")


class prefetch(Generic[B]):
    """The batches of a loader, each copied to the pipe's device before its turn.

    While the pipe trains on a batch, the next batch is loaded and copied to the first device, or
    over several ranks to this rank's, out of pinned memory and on a separate stream. Tensors in
    tuples, lists and dicts are copied, and at most three batches exist at a time. Where devices
    are CPUs, batches are passed on unchanged, as they come.

    ::

        for x, y in fxpipe.prefetch(loader, pipe):
            loss = pipe.step(x, target=y)
    """

    def __init__(self, loader: Iterable[B], pipe: Pipeline) -> None:
        """Load nothing before the first iteration.

        Args:
            loader: yields the batches; each iteration iterates it anew. It may fill the same
                tensors again for the next batch. ``len`` is its length.
            pipe: the pipe that trains on the batches.
        """
        self._loader = loader
        self._options = pipe._options

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[B]:
        if not self._options.places:
            yield from self._loader
            return
        device = self._options.here
        stream = torch.cuda.Stream(device)
        ready: tuple[B, torch.cuda.Event] | None = None
        try:
            for batch in self._loader:
                following = self._copied(batch, stream, device)
                if ready is not None:
                    yield self._handed(*ready, device)
                following[1].synchronize()  # the loader may write into this batch's memory now
                ready = following
            if ready is not None:
                yield self._handed(*ready, device)
        finally:  # the loop may be left, and its memory reused, while a copy goes on
            torch.cuda.current_stream(device).wait_stream(stream)

    def _copied(
        self, batch: B, stream: torch.cuda.Stream, device: torch.device
    ) -> tuple[B, torch.cuda.Event]:
        """The batch on the device, and an event at the end of its copy. Its memory belongs to the
        current stream, after which the pipe's streams are ordered; so no ``record_stream``."""

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return tensor
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            target = torch.empty_like(pinned, device=device)
            sources.append((target, pinned))
            return target

        sources: list[tuple[Tensor, Tensor]] = []
        moved: Any = pytree.tree_map_only(Tensor, copy, batch)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(torch.cuda.current_stream(device))
        stream.wait_event(before)
        with torch.cuda.stream(stream):
            for target, pinned in sources:
                target.copy_(pinned, non_blocking=True)
        after.record(stream)
        return moved, after

    def _handed(self, batch: B, copied: torch.cuda.Event, device: torch.device) -> B:
        """The batch, which what runs on the current stream from now on can read."""
        torch.cuda.current_stream(device).wait_event(copied)
        return batch
