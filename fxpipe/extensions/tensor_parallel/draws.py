"""What stages in parts draw: for a value that all ranks of a dimension have the same numbers, which
are those of one process, and for the parts of a value others for each, by DTensor's own rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any
from zlib import crc32

from torch import fx

from fxpipe.extensions.tensor_parallel.collectives import (
    all_gather_into_tensor,
    all_reduce,
    broadcast,
    communicates,
)
from fxpipe.formatting import without_addresses
from fxpipe.ir.traced import SEED, Traced
from fxpipe.passes.graph.lazy_module import copied

_WHOLE = all_reduce, all_gather_into_tensor, broadcast
"""Collectives whose results are the same on all ranks of the dimension."""

_APART = 1 << 32
"""How far apart the numbers of the random operations of parts are, more than a graph has."""


def own_draws(traced: Traced, sharded: Mapping[str, Sequence[str]], group: Any) -> Traced:
    """Traced → Traced: with other numbers for what draws for a part of a value.

    before:  h = mm(x, w1);  d = fxpipe.native_dropout(h, 0.5, True, seed, 0)   with a part of w1
             y = all_reduce(mm(d, w2), 'sum', 'tp')
             e = fxpipe.native_dropout(y, 0.5, True, seed, 1)
    after:   d = fxpipe.native_dropout(h, 0.5, True, seed, 4294967296)          on the second rank

    All ranks call this, and compare their graphs: where numbers in them differ, as where each takes
    its part of a value, results are parts, too.

    Args:
        traced: a seeded graph whose collectives name dimensions.
        sharded: name of a parameter → the dimensions over which it is sharded.
        group: the ranks.
    """
    if not traced.seeded:
        return traced
    traced = copied(traced)
    nodes = [*traced.graph.nodes]
    texts = [crc32(without_addresses(str(node.format_node())).encode()) for node in nodes]
    every = group.exchange("what ranks draw for", texts)
    seed = next(node for node in nodes if node.op == "placeholder" and node.name == SEED)
    names = {argument.name: argument.target for argument in traced.parameters}
    over: dict[fx.Node, set[str]] = {}  # the dimensions of which each rank has a part of a value
    for at, node in enumerate(nodes):
        own = over[node] = {dim for given in node.all_input_nodes for dim in over[given]}
        own |= {
            dim
            for dim, ranks in group.columns.items()
            if any(every[rank][at] != texts[at] for rank in ranks)
        }
        if node.op == "placeholder":
            own |= {*sharded.get(names.get(node.name, ""), ())}
        if communicates(node):
            dim = {str(node.args[-1])}
            over[node] = own - dim if node.target in _WHOLE else own | dim
        if own and len(node.args) > 1 and node.args[-2] is seed:
            *rest, number = node.args
            assert isinstance(number, int)
            node.args = (*rest, number + _APART * _place(group, own))
    return traced


def _place(group: Any, dims: set[str]) -> int:
    """This rank's number among those that have parts over some dimensions."""
    found = (ranks for dim, ranks in group.columns.items() if dim in dims)
    return reduce(lambda place, ranks: place * len(ranks) + ranks.index(group.rank), found, 0)
