"""Reduce a graph to one of each of its operations, to be measured in place of the whole.

before:  a = linear(x, w);   b = relu(a);   c = linear(b, v);   d = relu(c)
after:   a = linear(x, w);   b = relu(given)                     c counts as a, and d as b

Operations are equal if their functions are, and what their operands are: shapes, strides and types,
and which of them are parameters and need gradients. So a model of many equal layers is
differentiated and timed as if it had one of them; only the graphs of its stages are differentiated
whole. Each operation gets the operands that it has in the model; every result is returned, and gets
a gradient if it has one in the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.plan import Argument
from fxpipe.ir.traced import AUTOCAST, SEED, Traced, Value
from fxpipe.passes.differentiate.differentiate import Wanted
from fxpipe.passes.differentiate.extract import ancestors
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import compute_nodes, is_part
from fxpipe.passes.partition.measure import look, scratch_on
from fxpipe.torchtools.meta import Scratch
from fxpipe.torchtools.pytrees import bytes_of
from fxpipe.torchtools.state import under


def reducible(traced: Traced) -> bool:
    """Whether all operations of a graph read tensors, or items of one result each."""
    return all(
        node.op == "call_function"
        and (is_part(node) or not any(map(_is_nest, node.all_input_nodes)))
        for node in compute_nodes(traced.graph)
    )


def _is_nest(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple | dict)


def one_of_each(
    traced: Traced,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    wanted: Wanted,
    scratches: dict[torch.device, Scratch] | None = None,
) -> tuple[Traced, Mapping[str, Any], Wanted, Mapping[str, tuple[str, int]]]:
    """Run a graph once, node by node, and reduce it to its different operations.

    Args:
        traced: a graph that is ``reducible``.
        values: input → an example of the size of one micro-batch.
        state: name in the model → parameter, buffer or constant.
        wanted: the gradients that the call computes.
        scratches: device → memory that operands share, whose numbers they get; what is missing is
            added. Without it, the operands of all operations are in memory at once.

    Returns:
        The reduced graph, its values, the results that get a gradient, and for each node of the
        whole graph the node that is equal, or "" if it computes no tensor, with its bytes.
    """
    reduced = _Reduced(traced, values, state, wanted, scratches)
    given = {**values, **{a.name: state[a.target] for a in (*traced.parameters, *traced.buffers)}}
    with torch.set_grad_enabled(bool(wanted.outputs)):
        reduced.run(*(given[n.name] for n in traced.graph.find_nodes(op="placeholder")))
    reduced.share()
    return reduced.traced(), reduced.values, reduced.wanted(), reduced.equal


class _Reduced(fx.Interpreter):
    """Runs a graph, and copies each operation where it occurs first.

    Attributes:
        values: input of the reduced graph → its value.
        equal: see ``one_of_each``.
    """

    def __init__(
        self,
        traced: Traced,
        values: Mapping[str, Any],
        state: Mapping[str, Tensor],
        wanted: Wanted,
        scratches: dict[torch.device, Scratch] | None,
    ) -> None:
        super().__init__(traced.module, garbage_collect_values=True)
        self.extra_traceback = False
        self.values: dict[str, Any] = {}
        self.equal: dict[str, tuple[str, int]] = {}
        self._whole = traced
        self._scratches = scratches
        self._shared: dict[str, torch.device] = {}  # operand in shared memory → its device
        trained = {a.name for a in traced.parameters if state[a.target].requires_grad}
        if wanted.inputs:
            trained |= {k for k, x in values.items() if isinstance(x, Tensor) and x.requires_grad}
        named = {node.name: node for node in traced.graph.nodes}
        self._trained = trained if wanted.outputs else set()
        self._wanted = ancestors(named[name] for name in wanted.outputs)
        self._parameters = {a.name: a for a in traced.parameters}
        self._buffers = {a.name: a for a in traced.buffers}
        self._graph = fx.Graph()
        self._held: dict[str, fx.Node] = {}  # parameter, buffer or seed → its placeholder
        self._copies: dict[str, fx.Node] = {}  # operation → the copy of the one that is equal
        self._first: dict[Hashable, fx.Node] = {}
        self._returned: dict[str, bool] = {}  # tensor → whether it gets a gradient
        self._last = self._graph._root

    def run_node(self, n: fx.Node) -> Any:
        with under(n.meta.get(AUTOCAST, ())):
            value = pytree.tree_map_only(Tensor, _cut, super().run_node(n))
        if n.op == "placeholder" and isinstance(value, Tensor):
            value.requires_grad_(n.name in self._trained)
        copy = None
        if n.op == "call_function" and any(map(_is_tensor, pytree.tree_leaves(value))):
            copy = self._copies[n.name] = self._copy(n, value)
        self.equal[n.name] = "" if copy is None else copy.name, bytes_of(value)
        return value

    def _copy(self, node: fx.Node, value: Any) -> fx.Node:
        """The copy of the first node that is equal; made if that is the node itself."""
        live = node in self._wanted and any(map(_needs_gradient, pytree.tree_leaves(value)))
        operands = node.all_input_nodes
        key: Hashable
        if is_part(node):
            key = self._copies[operands[0].name], node.args[1], live
        else:
            looks = [self._look(operand) for operand in operands]
            places = {operand: place for place, operand in enumerate(operands)}
            args = list(node.args)
            for seed in [place for place, arg in enumerate(args) if _is_seed(arg)]:
                args[seed + 1] = None  # the number of a random operation changes no time
            read = fx.map_arg((args, node.kwargs), lambda n: f"operand {places[n]}")
            key = node.target, repr(read), tuple(looks), node.meta.get(AUTOCAST), live
        if key not in self._first:
            given = {operand: self._operand(node, operand) for operand in operands}
            copy = self._first[key] = self._graph.node_copy(node, given.__getitem__)
            if isinstance(value, Tensor):
                self._returned[copy.name] = live
        return self._first[key]

    def _look(self, operand: fx.Node) -> Hashable:
        """What an operation's time depends on of an operand."""
        parameter, buffer = operand.name in self._parameters, operand.name in self._buffers
        value = self.env[operand]
        return look(value), parameter, buffer, _needs_gradient(value)

    def _operand(self, node: fx.Node, operand: fx.Node) -> Any:
        """What the copy of a node reads in place of an operand."""
        name, value = operand.name, self.env[operand]
        if is_part(node):
            return self._copies[name]
        if not isinstance(value, Tensor):
            return value
        if name in self._parameters or name in self._buffers or name == SEED:
            if name not in self._held:
                self._held[name] = self._placeholder(name, operand)
                if name == SEED:
                    self.values[name] = value
            return self._held[name]
        copy = self._placeholder(f"{name}_of_{node.name}", operand)
        self.values[copy.name] = value
        if self._scratches is not None and value.is_floating_point():  # indices keep their values
            self._shared[copy.name] = value.device
            form = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            self.values[copy.name] = form.requires_grad_(value.requires_grad)
        return copy

    def share(self) -> None:
        """Give operands numbers in shared memory; only now, when the run has let go of its own."""
        for name, device in self._shared.items():
            assert self._scratches is not None
            form = self.values[name]
            scratch = scratch_on(device, self._whole.graph, self._scratches)
            self.values[name] = scratch.like(form).requires_grad_(form.requires_grad)

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        with self._graph.inserting_after(self._last):
            copy = self._last = self._graph.placeholder(name)
        copy.target = copy.name
        copy.meta.update(like.meta)
        return copy

    def traced(self) -> Traced:
        """The reduced graph."""
        named = {node.name: node for node in self._graph.nodes}
        self._graph.output(tuple(named[name] for name in self._returned))

        def kept(arguments: Mapping[str, Argument]) -> tuple[Argument, ...]:
            held = [name for name in arguments if name in self._held]
            return tuple(replace(arguments[name], name=self._held[name].name) for name in held)

        buffers = kept(self._buffers)
        targets = {buffer.target for buffer in buffers}
        return replace(
            self._whole,
            module=lazy_module(self._whole.module, self._graph),
            parameters=kept(self._parameters),
            buffers=buffers,
            constants={k: x for k, x in self._whole.constants.items() if k in targets},
            inputs=tuple(name for name in self.values if name != SEED),
            writes=(),
            outputs=tuple(map(Value, self._returned)),
            loss=None,
            deferred=(),
        )

    def wanted(self) -> Wanted:
        """The results that get a gradient; so do all operands."""
        outputs = frozenset(name for name, live in self._returned.items() if live)
        return Wanted(outputs, inputs=bool(outputs))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _cut(value: Tensor) -> Tensor:
    """The same tensor, without what it was computed from."""
    return value.detach().requires_grad_(value.requires_grad)


def _is_seed(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.name == SEED


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
