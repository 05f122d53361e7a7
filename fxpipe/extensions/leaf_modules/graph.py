"""Graphs that call leaf modules and read the model's own parameters and buffers.

``Example`` runs such a graph once, to note its values and to refuse what its leaf modules may not
do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.extensions.leaf_modules.draws import TAKES_TURNS, DrawsWatched, draw_from
from fxpipe.extensions.leaf_modules.nests import UnfitLeaf
from fxpipe.ir.traced import AUTOCAST, DRAWS
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import detached
from fxpipe.torchtools.state import assigned_in_place, tried, under

_DROPOUTS = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)


def reserve_names(graph: fx.Graph, model: nn.Module, others: Iterable[str] = ()) -> None:
    """Keep new nodes from taking the names of the model's own tensors, or those of ``others``."""
    for name in (*model._parameters, *model._buffers, *others):
        graph._graph_namespace.create_name(name, None)


def _drops(leaf: nn.Module) -> bool:
    """Whether a leaf module of the user's holds a dropout in training mode. Its rate may be 0 now
    and change later, which causes a new trace only in modules of torch.nn."""
    return not fx.Tracer().is_leaf_module(leaf, "") and any(
        isinstance(module, _DROPOUTS) and module.training for module in leaf.modules()
    )


def _place(x: Any) -> int | None:
    """The address of a dense tensor's memory."""
    return x.data_ptr() if isinstance(x, Tensor) and x.layout is torch.strided else None


class Example(fx.Interpreter):
    """Runs the graph once, to note the value of each node and the buffers that are written."""

    def written(self, model: nn.Module, *inputs: Tensor) -> set[str]:
        """Run the graph; return all buffers of each module that writes one of its buffers.

        BatchNorm writes some of its buffers without a change of their version counters.
        """
        buffers = dict(model.named_buffers(remove_duplicate=False))
        before = {name: (buffer._version, buffer.clone()) for name, buffer in buffers.items()}
        self.extra_traceback = False
        read = (self.fetch_attr(str(n.target)) for n in self.graph.find_nodes(op="get_attr"))
        self._read = set(map(_place, read)) - {None}
        with assigned_in_place(model):
            tried(lambda: self.run(*inputs))
        owners = {
            name.rpartition(".")[0]
            for name, buffer in buffers.items()
            if buffer._version != before[name][0] or not torch.equal(buffer, before[name][1])
        }
        return {name for name in buffers if name.rpartition(".")[0] in owners}

    def run_node(self, n: fx.Node) -> Any:
        leaf = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        # an in-place module works on a copy, and autograd itself refuses a wrong out=
        may_write = getattr(leaf, "inplace", False) or "out" in n.kwargs
        operands = [self.env[m] for m in n.all_input_nodes if m.op != "get_attr" and not may_write]
        written = versions(operands)
        kept = self._attributes(leaf)
        with DrawsWatched() as watch, under(n.meta.get(AUTOCAST, ())):
            value = super().run_node(n)
        for key, held in self._attributes(leaf).items():
            if held != kept.get(key, held):
                raise UnfitLeaf(
                    str(n.target),
                    f"sets its attribute {key[1]!r} in every call, which code outside of it reads "
                    "and would never see change; let its forward return it, too",
                )
        if versions(operands) != written:
            what = n.name if leaf is None else f"leaf module {n.target!r}"
            raise TraceError(
                f"{what} at {source.of_node(n) or 'an unknown line'} writes into what it is given, "
                "which other stages may read; let it work on a copy (x = x.clone())"
            )
        draws = watch.drew or (leaf is not None and _drops(leaf))
        n.meta[DRAWS] = draw_from if n.all_input_nodes and draws else None
        n.meta[TAKES_TURNS] = watch.traced
        if isinstance(value, Tensor) and value.is_quantized:
            raise TraceError(
                f"{n.name} at {source.of_node(n) or 'an unknown line'} is a quantised tensor, "
                "which cannot be traced; make and use it inside of one leaf module: compile(..., "
                "extensions=[fxpipe.LeafModules(its name)])"
            )
        tensor = isinstance(value, Tensor)
        n.meta["val"] = value.detach().to("meta") if tensor else detached(value)
        return value

    def _attributes(
        self, leaf: nn.Module | None
    ) -> dict[tuple[nn.Module, str], list[tuple[int, ...]]]:
        """Attribute of a leaf module → those of its tensors that the graph also reads elsewhere."""
        parts = () if leaf is None else leaf.modules()
        return {
            (part, key): [
                (_place(x) or 0, *versions(x))
                for x in pytree.tree_leaves(value)
                if _place(x) in self._read
            ]
            for part in parts
            for key, value in vars(part).items()
            if self._read and key not in ("_parameters", "_buffers", "_modules")
        }


def versions(value: Any) -> list[int]:
    """The version counters of the tensors in a pytree; inference tensors have none."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
