"""Capture a model once for all sizes of micro-batches, and put in the sizes of each.

before:  size = sym_size(x, 1);  view(h, [size, 8])      captured for a length with a symbol
after:   view(h, [12, 8])                                for micro-batches of length 12

The graph for a size is cut and divided like any other, so that no later pass knows symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import told
from fxpipe.ir.traced import Literal, Traced
from fxpipe.log import LOGGER
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.tracing.shapes import Dims, resized, shapes_of
from fxpipe.passes.tracing.symbols import Put, SizeError, Symbols, symbols_as_operands


class AnySizeGraphs:
    """The graphs of a model for any sizes. The first size has a graph of its own,
    as to capture one for any takes as long as three.

    Attributes:
        made: kind of call → its graphs, with their symbols.
    """

    def __init__(self) -> None:
        self.made: dict[Any, list[tuple[Symbols, Traced]]] = {}
        self._never: set[Any] = set()

    def traced(
        self,
        kind: Callable[[], Any],
        leaves: Sequence[Any],
        free: Dims,
        capture: Callable[[Sequence[Any]], Traced],
    ) -> Traced | None:
        """The graph for the sizes of a micro-batch, of one for any; None if there is none, as for
        the first sizes.

        Args:
            kind: the kind of call, which what the capture finds may change.
            leaves: its flat inputs and targets.
            free: for each of these the dimensions of any size.
            capture: makes the graph for such leaves.
        """
        for symbols, traced in self.made.get(kind(), ()):
            try:
                return put(traced, _numbers(symbols, leaves), leaves)
            except SizeError as error:
                LOGGER.info("a graph for any size does not hold for these: %s", told(error))
        never = kind(), tuple(free)
        if not any(free) or never in self._never:
            return None
        try:
            symbols = Symbols(free, leaves)
            with symbols_as_operands():
                traced = capture(symbols.leaves)
            traced = replace(traced, accepts=_accepting(symbols, leaves))
            made = put(traced, symbols.numbers(leaves), leaves)
        except Exception as error:  # symbols cannot do all that numbers can
            LOGGER.info("a graph is captured for these sizes only: %s", told(error))
            self._never.add(never)
            return None
        self.made.setdefault(kind(), []).append((symbols, traced))
        return made


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
