"""Memory that is allocated when an instruction is launched, as by a caching allocator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Layout = tuple[list[Any], Any]
"""The leaves of a value, with a Shape for each tensor, and its tree structure."""


class Memory:
    """The memory of a device: blocks of bytes, of which the last freed is reused first.

    Attributes:
        free: size in bytes → the free blocks.
    """

    def __init__(self) -> None:
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, count: int) -> Tensor:
        kept = self.free[count]
        return kept.pop() if kept else torch.empty(count, dtype=torch.uint8)

    def let_go(self, block: Tensor) -> None:
        self.free[block.numel()].append(block)


def poison(block: Tensor) -> None:
    """Set all bits: NaN in any floating type, −1 in any integer type."""
    block.fill_(255)


@dataclass(frozen=True)
class Shape:
    """The layout of a tensor in a block."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    length: int

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return Shape(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), length if tensor.numel() else 0
        )

    @property
    def bytes(self) -> int:
        return max(512, -(-self.length * self.dtype.itemsize // 512) * 512)

    def flat(self, block: Tensor) -> Tensor:
        return block[: self.length * self.dtype.itemsize].view(self.dtype)

    def read(self, block: Tensor) -> Tensor:
        return self.flat(block).as_strided(self.size, self.stride)

    def write(self, block: Tensor, value: Tensor) -> None:
        if self.length:
            self.flat(block).copy_(value.as_strided((self.length,), (1,), value.storage_offset()))


def layout_of(value: Any) -> Layout:
    leaves, spec = pytree.tree_flatten(value)
    return [Shape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


@dataclass(frozen=True)
class Held:
    """A value in the memory of a device."""

    layout: Layout
    blocks: list[Tensor | None]

    @staticmethod
    def take(layout: Layout, memory: Memory) -> Held:
        return Held(
            layout,
            [memory.take(leaf.bytes) if isinstance(leaf, Shape) else None for leaf in layout[0]],
        )

    def let_go(self, memory: Memory) -> None:
        for block in self.blocks:
            if block is not None:
                memory.let_go(block)

    def poison(self) -> None:
        for block in self.blocks:
            if block is not None:
                poison(block)

    def read(self) -> Any:
        leaves = [
            leaf if block is None else leaf.read(block)
            for leaf, block in zip(self.layout[0], self.blocks, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.layout[1])

    def write(self, value: Any) -> None:
        leaves = pytree.tree_leaves(value)
        for shape, block, leaf in zip(self.layout[0], self.blocks, leaves, strict=True):
            if block is not None:
                shape.write(block, leaf)
