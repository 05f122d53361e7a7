"""Graphs that call leaf modules and read the model's own parameters and buffers.

``Example`` runs such a graph once, to note its values and to refuse what its leaf modules may not
do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxpipe.extensions.leaf_modules.draws import DrawsWatched, draw_from
from fxpipe.extensions.leaf_modules.nests import UnfitLeaf
from fxpipe.ir.traced import AUTOCAST, DRAWS
from fxpipe.torchtools.pytrees import detached
from fxpipe.torchtools.state import assigned_in_place, tried, under

_DROPOUTS = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules whose rate may be 0 now and change later, which causes no new trace in a leaf module."""


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
        parts = () if leaf is None else leaf.modules()
        draws = watch.drew or any(isinstance(x, _DROPOUTS) and x.training for x in parts)
        n.meta[DRAWS] = draw_from if n.all_input_nodes and draws else None
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
