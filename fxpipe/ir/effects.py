"""What instructions need and change on their device besides buffers: resources and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from fxpipe.ir.program import Program

WEIGHTS = "weights"
"""The resource that every stage has unless an instruction removes it: its whole weights."""


class Piece(NamedTuple):
    """A piece of a device's memory: its part, such as "gradients", what is in it, and its bytes."""

    part: str
    key: tuple[Any, ...]
    bytes: int


class Spaces(NamedTuple):
    """Memory that an instruction takes and frees, besides that of its buffers and its graph.

    Attributes:
        first: taken as it begins.
        freed: freed then, as far as it is there.
        during: bytes that it needs besides, only while it runs.
        then: taken at its end.
        over: freed at its end, as far as it is there.
    """

    first: tuple[Piece, ...] = ()
    freed: tuple[Piece, ...] = ()
    during: int = 0
    then: tuple[Piece, ...] = ()
    over: tuple[Piece, ...] = ()


NO_SPACES = Spaces()


class DeviceMemory(Protocol):
    """What a device holds while a ``program`` runs on it, with the bytes of everything, ``sizes``:
    ``fxpipe.extensions.simulator.sizes.Sizes``."""

    program: Program
    sizes: Any

    def sums(self, stage: int, batch: int) -> Piece:
        """A stage's sums of gradients of a batch."""

    def weights(self, stage: int) -> Piece:
        """A stage's whole weights."""

    def blocks(self, size: int) -> int:
        """The bytes that the device allocates for so many."""
