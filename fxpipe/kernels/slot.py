"""Fixed memory for one micro-batch of a stage, and the CUDA graphs captured on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fxpipe.kernels.graph import layout

T = TypeVar("T")

Key = tuple[Any, ...]
"""What a capture is valid for: the addresses of parameters, and the inputs that are no tensors."""


class Graphs(Protocol):
    """Captures for one slot; all captures of a slot are replayed on one stream.

    Captures share memory: a replay may overwrite the results of later captures, and those of
    earlier captures that are no longer referenced. One micro-batch at a time uses a slot, so the
    results of a later capture are consumed before an earlier one is replayed.
    """

    def capture(self, run: Callable[[], T], what: str) -> tuple[T, Callable[[], None]]:
        """Capture a call. It computes nothing yet.

        Args:
            run: the call.
            what: its name in messages.

        Returns:
            The result of the call, and a function that replays it, which fills those tensors.

        Raises:
            CaptureError: something in it cannot be captured.
        """
        ...


class Fixed:
    """Tensors at fixed addresses, which are filled with new values.

    Attributes:
        values: the tensors, and the last given values that are no tensors.
    """

    def __init__(self, like: Sequence[Any], strides: Sequence[tuple[int, ...] | None]) -> None:
        """Allocate the memory; nothing is copied yet.

        Args:
            like: values with the dtypes and shapes to expect.
            strides: the strides for each value; None for its own.
        """
        self.values = [
            torch.empty_strided(
                x.shape, layout(x, wanted or x.stride()), dtype=x.dtype, device=x.device
            )
            if isinstance(x, Tensor)
            else x
            for x, wanted in zip(like, strides, strict=True)
        ]
        self._targets = [x for x in self.values if isinstance(x, Tensor)]

    def fill(self, values: Sequence[Any]) -> None:
        """Copy new values into the tensors; values that are no tensors are kept as they are."""
        pairs = list(zip(self.values, values, strict=True))
        if self._targets:
            sources = [value for own, value in pairs if isinstance(own, Tensor)]
            torch._foreach_copy_(self._targets, sources)
        self.values = [own if isinstance(own, Tensor) else value for own, value in pairs]


@dataclass
class Part:
    """One captured call.

    Attributes:
        made: the result of the call; every replay overwrites the tensors in it.
        replay: runs the captured call again.
    """

    made: Any
    replay: Callable[[], None]


@dataclass
class Slot:
    """Fixed memory for one micro-batch.

    Attributes:
        graphs: captures on this slot.
        inputs: the inputs of forward: the stage's inputs, then the buffers that change.
        gradients: the gradients of the stage's outputs.
        takes: key → name of a task → its capture; the most recently used key comes last.
    """

    graphs: Graphs
    inputs: Fixed | None = None
    gradients: Fixed | None = None
    takes: dict[Key, dict[str, Part]] = field(default_factory=dict)

    def parts(self, key: Key, most: int) -> dict[str, Part]:
        """The captures that are valid for a key, by task.

        Args:
            key: the key of this micro-batch.
            most: for how many keys captures are kept; the least recently used are dropped.
        """
        found = self.takes.pop(key, {})
        while len(self.takes) >= most:
            del self.takes[next(iter(self.takes))]
        self.takes[key] = found
        return found


class Hold:
    """A slot in use, until ``release`` is called or this object is garbage-collected.

    It takes the place of what a forward saved. A run that fails drops the values of all devices,
    and with them its Holds, so no slot stays in use.

    Attributes:
        slot: the slot.
        parts: the captures that are valid for the micro-batch.
    """

    def __init__(self, slot: Slot, free: list[Slot]) -> None:
        """Take a slot.

        Args:
            slot: the slot, already removed from the free ones.
            free: the list it returns to when released; appending is atomic in any thread.
        """
        self.slot = slot
        self.parts: dict[str, Part] = {}
        self._free: list[Slot] | None = free

    def release(self) -> None:
        """Give the slot back, once."""
        free, self._free = self._free, None
        if free is not None:
            free.append(self.slot)

    def __del__(self) -> None:
        self.release()
