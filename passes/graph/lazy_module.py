"""Graph modules whose code is generated at their first call, because most are never called.

PyTorch keeps the source of every graph module for ever, to show its lines in tracebacks. Here a
source is dropped with its module, and the sources of modules that PyTorch itself makes during a
compilation are dropped at its end.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _loader as _sources

from fxpipe.ir.traced import Traced
from fxpipe.passes.graph.copies import node_copied

_NAME = "<eval_with_key>."
_owned: set[str] = set()  # the names of sources that are dropped with their modules


class _LazyModule(_LazyGraphModule):
    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)  # not self(...), which would call hooks again

    def _real_recompile(self) -> Any:
        code = super()._real_recompile()
        name = type(self).forward.__code__.co_filename
        _owned.add(name)
        weakref.finalize(self, _forget, name).atexit = False
        return code


def lazy_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """Like ``fx.GraphModule(root, graph, name)``, but its code is generated at its first call."""
    return _LazyModule(root, graph, name)


def copied(traced: Traced) -> Traced:
    """A copy of a graph, for a pass to change: passes do not change what they are given."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        copies[node] = node_copied(graph, node, copies.__getitem__)
    return replace(traced, module=lazy_module(traced.module, graph))


@contextmanager
def sources_forgotten() -> Iterator[None]:
    """On exit, drop the sources of modules made inside, except for those of ``lazy_module``."""
    first = _sources.next_id
    try:
        yield
    finally:
        if _sources.next_id > first:
            for name in set(_sources.eval_cache) - _owned:
                number = name.removeprefix(_NAME).partition(" ")[0]
                if name.startswith(_NAME) and int(number) >= first:
                    _forget(name)


def _forget(name: str) -> None:
    _sources.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
    _owned.discard(name)
