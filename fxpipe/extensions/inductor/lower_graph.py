"""Prepare a stage's graph for inductor, without what a library cannot do or need not do.

before:  drawn = fxpipe.bernoulli(x, 0.9, seed, 3);  m = mul(x, drawn);  t = onto(total, m)
         return (t, x)
after:   m = mul(x, drawn);  a = add_(total, m);  return (…)
         and the wiring: drawn is drawn first, total and x are passed through
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fxpipe.extensions.inductor.library import Draw, Indices, TensorLayout, Wiring
from fxpipe.kernels.graph import onto
from fxpipe.passes.differentiate.extract import results
from fxpipe.passes.differentiate.fitted import rnn_layer_with_workspace
from fxpipe.random import LAYOUTS

_FORMAT = 8
"""Count this up when libraries that are in the folder already must not be used."""

aten = torch.ops.aten

_SHAPES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.clone.default, aten.detach.default, aten.alias.default),
    aten._to_copy.default,
}
"""Operations whose results have the same entries as their operands."""

_RECURRENT = rnn_layer_with_workspace, aten.mkldnn_rnn_layer_backward.default
"""LSTM layers. Inductor compiles them without the workspace that oneDNN's backward reads."""


class CannotCompile(Exception):
    """A graph that cannot be handed to inductor."""


def lowered(graph: fx.Graph) -> tuple[fx.Graph, Wiring]:
    """Return the graph for inductor, and how its library is called.

    Raises:
        CannotCompile: the graph has something that no library can do.
    """
    arguments = graph.find_nodes(op="placeholder")
    drawn = [node for node in graph.nodes if node.target in LAYOUTS]
    place = {node: index for index, node in enumerate([*arguments, *drawn])}
    new = fx.Graph()
    copies = {node: new.placeholder(f"argument_{index}") for node, index in place.items()}
    sums: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise CannotCompile(f"{node.name!r} is an attribute or a module")
        if node.target in _RECURRENT:
            raise CannotCompile(
                f"{node.name!r} is an LSTM, whose library would not save what its backward reads"
            )
        if _is_mixed_norm(node):
            raise CannotCompile(
                f"{node.name!r} is a norm with weights of another type than its input, and a "
                "library would round its statistics to the type of the input"
            )
        if node.op == "call_function" and node not in copies:
            target: Any = getattr(node.target, "__wrapped__", node.target)
            args: Any = node.args
            if target is onto:
                sums[node] = place[args[0]]
                target, args = aten.add_.Tensor, args[:2]  # the sum already has its layout
            operands: Any = fx.node.map_arg((args, dict(node.kwargs)), copies.__getitem__)
            copies[node] = new.call_function(target, *operands)
    gives: list[tuple[str, Any]] = []
    made: dict[fx.Node, int] = {}
    for node in results(graph):
        if node in sums or node in place:
            gives.append(("argument", sums.get(node, place.get(node))))
        elif isinstance(node, fx.Node):
            _look(node)
            gives.append(("made", made.setdefault(node, len(made))))
        else:
            gives.append(("constant", node))
    takes = [node for node in place if copies[node].users]
    for node in place.keys() - set(takes):
        new.erase_node(copies[node])
    looks = tuple(map(_look, takes))
    for node in takes:
        copies[node].meta["val"] = node.meta["val"]
    returned = [copies[node] for node in made]
    if not made:  # a library must return something
        device: dict[str, Any] = {"device": looks[0].device} if looks else {}
        returned.append(new.call_function(aten.zeros.default, ([0],), device))
    new.output(tuple(returned))
    wiring = Wiring(
        draws=tuple(_draw(node, place) for node in drawn),
        takes=tuple(place[node] for node in takes),
        looks=looks,
        indices=tuple(_indices(graph, {node: place[node] for node in takes})),
        totals=frozenset(sums.values()),
        gives=tuple(gives),
    )
    return new, wiring


def _is_mixed_norm(node: fx.Node) -> bool:
    """Whether a node is a norm, or its backward, as autocast makes it on a CPU: of values in half
    precision, with weights and statistics in float32."""
    target = getattr(node.target, "__wrapped__", node.target)
    if not isinstance(target, OpOverload) or "_norm" not in target._schema.name:
        return False
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    return len({x.dtype for x in tensors}) > 1 and tensors[0].device.type == "cpu"


def _look(node: fx.Node) -> TensorLayout:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise CannotCompile(f"{node.name!r} is no dense tensor")
    return TensorLayout.of(value)


def _draw(node: fx.Node, place: dict[fx.Node, int]) -> Draw:
    args: Any = node.args
    *operands, seed, number = args
    if seed not in place:
        raise CannotCompile(f"{node.name!r} draws from a seed that is made in the stage")
    like = tuple(_look(x) if isinstance(x, fx.Node) else x for x in operands)
    return Draw(node.target, like, dict(node.kwargs), place[seed], number)


def _indices(graph: fx.Graph, place: Mapping[fx.Node, int]) -> Iterator[Indices]:
    """Find the arguments that index the rows of an embedding, or the class of a sample's loss."""
    for node in graph.nodes:
        args: Any = node.args
        if node.target is aten.embedding.default:
            dim, ignored = 0, None
        elif node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
            dim, ignored = min(1, args[0].meta["val"].dim() - 1), args[4]
        else:
            continue
        index = args[1]
        while index.target in _SHAPES:
            index = index.args[0]
        if index in place and index.meta["val"].device.type == "cpu":
            yield Indices(place[index], args[0].meta["val"].shape[dim], ignored)


def graph_text(module: fx.GraphModule, threads: int) -> str:
    """Return text that is equal for graphs with equal libraries: the graph with numbers for names,
    the layouts of its arguments, and all else that a library depends on."""
    names = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    device, lines = torch.device("cpu"), [f"{threads} threads, {torch.get_default_dtype()}"]
    for node in module.graph.nodes:
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Name(names[n]))
        look = target = ""
        if node.op != "placeholder":
            target = node.target
            if isinstance(target, FunctionType):  # whose own text has its address
                target = f"{target.__module__}.{target.__qualname__}"
        elif isinstance(value := node.meta.get("val"), Tensor) and value.layout is torch.strided:
            look = f"{TensorLayout.of(value)[:3]} {value.device.type}"
            device = value.device if value.device.type != "cpu" else device
        text = f"{names[node]} {node.op} {target} {args} {look}"
        lines.append(re.sub(r", index=\d+", "", text))
    return "\n".join([*lines, *_machine(device)])


class _Name(str):
    """Text that is printed without quotes."""

    __repr__ = str.__str__


@cache
def _machine(device: torch.device) -> tuple[str, ...]:
    """The version of torch, and the processor or GPU."""
    version = torch.__version__, str(torch.version.git_version), str(_FORMAT)
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return (*version, str(module.get_device_properties(device)))
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    flags = {line for line in text.splitlines() if line.startswith(("flags", "Features"))}
    return (*version, platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(flags))
