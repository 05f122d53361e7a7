"""Run a leaf module once for real, to note what no graph tells, and refuse what it may not do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxpipe.compiler.leaf_modules.draws import DrawsWatched
from fxpipe.compiler.leaf_modules.nests import Nest, UnfitLeaf
from fxpipe.compiler.leaf_modules.nodes import LeafCall, Look
from fxpipe.torchtools.counting import Counting
from fxpipe.torchtools.pytrees import memory, size_in_bytes
from fxpipe.torchtools.source import lacks_memory
from fxpipe.torchtools.state import assigned_in_place, autocasts

_DROPOUTS = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules whose rate may be 0 now and change later, which causes no new trace in a leaf module."""


class Trial:
    """One call of a leaf module for real.

    Attributes:
        output: what it returns, without autograd's graph.
    """

    def __init__(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Call the module.

        Raises:
            UnfitLeaf: it does what no leaf module may do.
        """
        self.name, self._module = name, module
        self._given = Nest.of((args, kwargs))
        self._casts = autocasts()
        state = (*module.named_parameters(), *module.named_buffers())
        self._state = tuple(at for at, _ in state)
        before = _versions((args, kwargs))
        held = self._attributes()
        buffers = dict(module.named_buffers(remove_duplicate=False))
        kept = {at: (buffer._version, buffer.clone()) for at, buffer in buffers.items()}
        with (
            DrawsWatched() as watch,
            assigned_in_place(module),
            torch.compiler.set_stance("default"),  # as in steps
        ):
            self.held, output = self._called(args, kwargs)
        if _versions((args, kwargs)) != before:
            raise UnfitLeaf(
                name, "writes into what it is given; let it work on a copy (x = x.clone())"
            )
        # BatchNorm writes some of its buffers without a change of their version counters
        owners = {
            at.rpartition(".")[0]
            for at, buffer in buffers.items()
            if buffer._version != kept[at][0] or not torch.equal(buffer, kept[at][1])
        }
        self._written = tuple(
            at for at, _ in module.named_buffers() if at.rpartition(".")[0] in owners
        )
        parts = [isinstance(x, _DROPOUTS) and x.training for x in module.modules()]
        self._draws = watch.drew or any(parts)
        self._refuse_results(output)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        self._returned = Nest.of(output)
        self._looks = tuple(map(Look.of, tensors))
        self.output = pytree.tree_map_only(Tensor, Tensor.detach, output)
        self._set = {
            key: value for key, value in self._attributes().items() if value != held.get(key)
        }

    def call(self, number: int) -> LeafCall:
        """The call, by which graphs repeat it."""
        return LeafCall(
            number,
            self.name,
            self._given,
            self._returned,
            self._looks,
            self._differentiable,
            self._reached,
            self._state,
            self._written,
            self.held,
            self._draws,
            self._casts,
        )

    def refuse_constants(self, constants: Iterable[Tensor]) -> None:
        """Raise UnfitLeaf if one of a graph's constants is what the module has set as an attribute
        in this call."""
        read = {memory(x) for x in constants if x.layout is torch.strided}
        for (_, key), places in self._set.items():
            if any(place in read for place, _ in places):
                raise UnfitLeaf(
                    self.name,
                    f"sets its attribute {key!r} in every call, which code outside of it reads "
                    "and would never see change; let its forward return it, too",
                )

    def _called(self, args: Any, kwargs: Any) -> tuple[int, Any]:
        """Call the module as in a step, with gradients if it can. Returns the bytes that autograd
        keeps, and the output."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        try:
            with torch.enable_grad(), Counting(meta=True) as counting:
                counting.adopt((tensors, [*self._module.parameters()]), counted=False)
                counting.adopt([*self._module.buffers()], counted=False)
                begin = counting.alive
                given = pytree.tree_map_only(Tensor, _source, (args, kwargs))
                output = self._module._call_impl(*given[0], **given[1])
                sources = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
                leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
                edges = [get_gradient_edge(x) for x in leaves if x.requires_grad]
                self._differentiable = tuple(x.requires_grad for x in leaves)
                self._reached = tuple(_reached(x, sources) for x in leaves)
                del given, sources
                detached = pytree.tree_map_only(Tensor, _apart, output)
                own = sum(
                    size_in_bytes(x)
                    for x in pytree.tree_leaves(detached)
                    if isinstance(x, Tensor) and not x.is_meta
                )
                del output, leaves
                held = counting.alive - begin - own
                del edges
        except UnfitLeaf:
            raise
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            with torch.no_grad():
                output = self._module._call_impl(*args, **kwargs)
            leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
            self._differentiable = tuple(x.is_floating_point() for x in leaves)
            self._reached = (frozenset(range(len(tensors))),) * len(leaves)
            return 0, output
        return max(held, 0), detached

    def _refuse_results(self, output: Any) -> None:
        paths, _ = pytree.tree_flatten_with_path(output)
        for path, leaf in paths:
            where = pytree.keystr(path) or "its output"
            if not isinstance(leaf, Tensor) and leaf is not None:
                raise UnfitLeaf(
                    self.name,
                    f"returns {type(leaf).__name__} {leaf!r:.40} at {where}, which may differ from "
                    "call to call; return tensors",
                )
            if isinstance(leaf, Tensor) and leaf.is_quantized:
                raise UnfitLeaf(self.name, "returns a quantised tensor; return x.dequantize()")
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                raise UnfitLeaf(self.name, f"returns a {leaf.layout} tensor; return x.to_dense()")

    def _attributes(self) -> dict[tuple[nn.Module, str], list[tuple[int, int]]]:
        """Attribute of the module → the memory and versions of its tensors."""
        return {
            (part, key): [
                (memory(x), 0 if x.is_inference() else x._version)
                for x in pytree.tree_leaves(value)
                if isinstance(x, Tensor) and x.layout is torch.strided
            ]
            for part in self._module.modules()
            for key, value in vars(part).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }


def _reached(result: Tensor, sources: Sequence[Tensor]) -> frozenset[int]:
    """The sources, by number, to which autograd would hand on the gradient of a result."""
    numbers = {id(x): at for at, x in enumerate(sources)}
    todo, seen, found = [result.grad_fn], set[Any](), set[int]()
    if id(result) in numbers:
        found.add(numbers[id(result)])
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (at := numbers.get(id(getattr(node, "variable", None)))) is not None:
            found.add(at)
        todo += [after for after, _ in node.next_functions]
    return frozenset(found)


def _source(x: Tensor) -> Tensor:
    """An input as in a step, with a gradient if it can have one."""
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x


def _apart(x: Tensor) -> Tensor:
    """A copy without autograd's graph."""
    return x.detach().clone() if not x.is_quantized and x.layout is torch.strided else x.detach()


def _versions(value: Any) -> list[int]:
    """The version counters of the tensors in a pytree; inference tensors have none."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
