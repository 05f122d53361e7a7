"""Capture a model once for all sizes of micro-batches, and put in the sizes of each.

before:  size = sym_size(x, 1);  view(h, [size, 8])      captured for a length with a symbol
after:   view(h, [12, 8])                                for micro-batches of length 12

The graph for a size is cut and divided like any other, so that no later pass knows symbols.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import told
from fxpipe.ir.traced import Literal, Traced
from fxpipe.log import LOGGER
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.tracing.shapes import Dims, resized, shapes_of
from fxpipe.passes.tracing.symbols import Put, SizeError, Symbols


@dataclass(frozen=True)
class AnySize:
    """A graph for any sizes of some dimensions. The first size of a kind of call has a graph of its
    own, as to capture one for any takes as long as three.

    Attributes:
        free: for each input and target its dimensions of any size.
        symbols: the symbols of these sizes.
        traced: the graph with the symbols; None if there is none for these dimensions.
    """

    free: tuple[tuple[int, ...], ...]
    symbols: Symbols | None = None
    traced: Traced | None = None

    @classmethod
    def of(
        cls, free: Dims, leaves: Sequence[Any], capture: Callable[[Sequence[Any]], Traced]
    ) -> tuple[AnySize, Traced | None]:
        """Capture it by ``capture``, for flat inputs and targets like these ``leaves``: it, and
        the graph for their sizes."""
        try:
            symbols = Symbols(free, leaves)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Raw SymInt value")  # symbols are operands
                traced = capture(symbols.leaves)
            traced = replace(traced, accepts=_accepting(symbols, leaves))
            made = put(traced, symbols.numbers(leaves), leaves)
        except Exception as error:  # symbols cannot do all that numbers can
            LOGGER.info("a graph is captured for these sizes only: %s", told(error))
            return cls(tuple(free)), None
        return cls(tuple(free), symbols, traced), made

    def at(self, leaves: Sequence[Any]) -> Traced | None:
        """The graph for the sizes of these inputs and targets; None if it does not hold for
        them."""
        if self.symbols is None or self.traced is None:
            return None
        try:
            return put(self.traced, _numbers(self.symbols, leaves), leaves)
        except SizeError as error:
            LOGGER.info("a graph for any size does not hold for these: %s", told(error))
            return None


def _accepting(
    symbols: Symbols, leaves: Sequence[Any]
) -> Callable[[Sequence[tuple[int, ...] | None]], bool]:
    """A test of whether a graph for any size holds for shapes, of inputs laid out like these."""
    given = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), list(leaves))
    strides = [x.stride() if isinstance(x, Tensor) else () for x in leaves]

    def accepts(shapes: Sequence[tuple[int, ...] | None]) -> bool:
        try:
            _numbers(symbols, [*map(resized, given, strides, shapes)])
        except SizeError:
            return False
        return True

    return accepts


def _numbers(symbols: Symbols, leaves: Sequence[Any]) -> dict[Any, int]:
    """The number of each symbol. A size of 1 broadcasts, which a graph for any size does not."""
    for leaf, dims in zip(leaves, symbols.free, strict=False):
        if any(leaf.shape[dim] < 2 for dim in dims):
            raise SizeError("a size is 1")
    return symbols.numbers(leaves)


def put(traced: Traced, numbers: dict[Any, int], leaves: Sequence[Any]) -> Traced:
    """The same graph with a number for each symbol, for micro-batches like these leaves."""
    putting = Put(numbers)
    forward, backward = putting.graph(traced.graph), traced.backward
    assert backward is not None
    shapes = shapes_of(leaves)
    outputs = tuple(
        replace(out, value=putting(out.value), dims=None)
        if isinstance(out, Literal) and isinstance(out.value, torch.SymInt)
        else out
        for out in traced.outputs
    )
    return replace(
        traced,
        module=lazy_module(nn.Module(), forward),
        outputs=outputs,
        accepts=lambda given: [*given] == shapes,
        of=traced,
        backward=replace(backward, graph=putting.graph(backward.graph)),
    )
