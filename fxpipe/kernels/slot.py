"""Fixed memory for one micro-batch of a stage, and the graphs that were captured on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fxpipe.kernels.graph import layout

T = TypeVar("T")

Key = tuple[Any, ...]
"""What a capture is valid for: where parameters lie, and what inputs are that are no tensors."""


class Graphs(Protocol):
    """What captures for one slot. What it has captured is replayed by one stream.

    Captures share memory: a replay may write over all that later captures have made, and over what
    earlier ones have made and nobody has any more. A slot is one micro-batch's at a time, so that
    what a later capture has made is used up when an earlier one is replayed.
    """

    def capture(self, run: Callable[[], T], what: str) -> tuple[T, Callable[[], None]]:
        """Capture a call. It computes nothing yet.

        Args:
            run: the call.
            what: what messages call it.

        Returns:
            What the call returned, and what replays it: it writes those tensors anew.

        Raises:
            CaptureError: something in it cannot be captured.
        """
        ...


class Fixed:
    """Tensors that stay where they are, and are given other values.

    Attributes:
        values: the tensors; what is no tensor is what was given last.
    """

    def __init__(self, like: Sequence[Any], strides: Sequence[tuple[int, ...] | None]) -> None:
        """Take the memory; nothing is copied yet.

        Args:
            like: values of the types and shapes to come.
            strides: of each; None for its own.
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
        """Copy the tensors among some values, and take the others."""
        pairs = list(zip(self.values, values, strict=True))
        if self._targets:
            sources = [value for own, value in pairs if isinstance(own, Tensor)]
            torch._foreach_copy_(self._targets, sources)
        self.values = [own if isinstance(own, Tensor) else value for own, value in pairs]


@dataclass
class Part:
    """One captured call.

    Attributes:
        made: what it returned; every replay writes the tensors in it anew.
        replay: does again what was captured.
    """

    made: Any
    replay: Callable[[], None]


@dataclass
class Slot:
    """Room for one micro-batch.

    Attributes:
        graphs: captures on it.
        inputs: of forward: the stage's inputs, then the buffers that change.
        gradients: of the stage's outputs.
        takes: key → task's name → what was captured of it; the last used key comes last.
    """

    graphs: Graphs
    inputs: Fixed | None = None
    gradients: Fixed | None = None
    takes: dict[Key, dict[str, Part]] = field(default_factory=dict)

    def parts(self, key: Key, most: int) -> dict[str, Part]:
        """The parts that hold for a key.

        Args:
            key: of this micro-batch.
            most: for how many keys parts are kept; the longest unused are dropped.
        """
        found = self.takes.pop(key, {})
        while len(self.takes) >= most:
            del self.takes[next(iter(self.takes))]
        self.takes[key] = found
        return found


class Hold:
    """A slot that is taken, until ``release``, or until nobody has this any more.

    It stands for what a forward saved. A run that fails drops the values of all devices, and
    this among them: so no slot is lost with it.

    Attributes:
        slot: the slot.
        parts: what was captured for the micro-batch.
    """

    def __init__(self, slot: Slot, free: list[Slot]) -> None:
        """Take a slot.

        Args:
            slot: no longer among the free ones.
            free: where it goes when it is released; appending is atomic, whoever does it.
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
