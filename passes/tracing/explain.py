"""Explain why a model cannot be traced: the user's line, what is wrong there, and the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram

from fxpipe.errors import TraceError, told, way_out
from fxpipe.ir.traced import Traced
from fxpipe.torchtools import source

aten = torch.ops.aten

_VALUES = "compute it with torch.where or masks"
_BEYOND_TORCH = "compute it with PyTorch's own operations"
_CONSTRUCTS: Sequence[tuple[str, str, str]] = (
    (r"\.item\(|\bfloat\(|\bint\(|\bbool\(", "a number read from a tensor's values", _VALUES),
    (r"\.tolist\(", "numbers read from a tensor's values", _VALUES),
    (r"\.numpy\(|\bnp\.|\bnumpy\.", "a NumPy array made of a tensor", _BEYOND_TORCH),
    (r"\bwhile\b", "a loop whose length depends on a tensor's values", _VALUES),
    (r"\bif\b|\bassert\b|\band\b|\bor\b|\bnot\b", "a branch on the values of a tensor", _VALUES),
    (r"\bfor\b", "a loop over the values of a tensor", _VALUES),
    (
        r"\[.*\]|nonzero|masked_select|unique|bincount",
        "a shape that depends on a tensor's values",
        _VALUES,
    ),
)
"""Pattern of a line whose outcome depends on values → what it is called, and the cure."""

_SHAPED_BY_VALUES = frozenset(
    (
        *(aten.bincount.default, aten.masked_select.default, aten.nonzero.default),
        *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    )
)
CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
_ON_VALUES = (
    "DataDependent",
    "data-dependent",
    "DynamicOutputShape",
    "cannot be used as inputs to control flow",
)
_OUTSIDE = (".numpy()", "np.ndarray")


class BackwardError(Exception):
    """A capture has failed in the backward of some submodules.

    Attributes:
        error: with this error.
        submodules: their names, outermost first.
    """

    def __init__(self, error: Exception, submodules: Sequence[str]) -> None:
        super().__init__(told(error))
        self.error, self.submodules = error, submodules


def untraceable(model: nn.Module, error: Exception) -> TraceError:
    """Return a TraceError that explains the exception of a tracer."""
    if isinstance(error, TraceError):
        return error
    around: Sequence[str] = ()
    if isinstance(error, BackwardError):
        around, error = error.submodules, error.error
    where = source.of_exception(error)
    if not where and (node := _treated(error)) is not None:
        where = source.of_node(node)
    whole = told(error)
    summary = whole.splitlines()[0]
    if on_values(error):
        construct, cure = _construct(where)
        reason = f"{construct}: what it computes depends on the values of a tensor"
    elif any(word in whole for word in _OUTSIDE):
        construct, cure = _construct(where)
        reason = f"{construct}: {summary[:200]}"
    elif "constraint" in whole:
        reason = "it holds for one size only"
        cure = "make that line independent of the size, or give inputs of one size"
    else:
        reason, cure = summary[:300], "rewrite that line"
    return _error(model, where, reason, cure, around or called(model, error))


def on_values(error: Exception) -> bool:
    """Whether a tracer has failed as what the model computes depends on the values of a tensor."""
    return any(word in told(error) for word in _ON_VALUES)


def refuse_values(model: nn.Module, traced: Traced) -> None:
    """Check that no operation of a graph gives a number or shape that depends on tensors' values.

    Raises:
        TraceError: an operation does; names its line.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    free = {node: free_unbacked_symbols(node.meta.get("val")) for node in traced.graph.nodes}
    node = next((n for n in free if free[n] or _has_shape_of_values(n)), None)
    if node is not None:
        where = source.of_node(node)
        construct, cure = _construct(where)
        reason = f"{construct}: what it computes depends on the values of a tensor"
        # a module that is called must contain all nodes that depend on the same number or shape
        dependent = [_paths(other) for other in free if free[other] & free[node]]
        around = [path for path in _paths(node) if all(path in paths for paths in dependent)]
        raise _error(model, where, reason, cure, around)


def _has_shape_of_values(node: fx.Node) -> bool:
    """Whether the shape of an operation's result, or of its gradient, depends on values.

    The result may have a plain shape: the exporter can infer one from later operations.
    """
    args: Any = node.args
    written = node.target is aten.index_put.default
    if node.target is aten.index.Tensor or (written and _is_trained(args[2])):
        indices = [index.meta["val"] for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return node.target in _SHAPED_BY_VALUES


def _is_trained(node: fx.Node) -> bool:
    """Whether a value depends on a trained parameter."""
    seen, todo = {node}, [node]
    while todo:
        new = [source for source in todo.pop().all_input_nodes if source not in seen]
        seen.update(new)
        todo += new
    return any(n.op == "placeholder" and n.meta["val"].requires_grad for n in seen)


def refuse_unheld(model: nn.Module, program: ExportedProgram) -> None:
    """Check that no line of a program, also inside of ``no_grad`` regions, makes a sparse tensor,
    which would have no entries in a trace, calls ``torch.cond`` or the like, or writes where its
    graph does not say so.

    Raises:
        TraceError: a line does so; names it.
    """
    regions = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    for node in chain.from_iterable(region.graph.nodes for region in regions):
        value, target = node.meta.get("val"), node.target
        if isinstance(target, HigherOrderOperator) and target.name() in CONTROL_FLOW:
            what = f"control flow of torch's own, {target.name().removesuffix('_impl')}"
            cure = "choose with torch.where, or write a Python loop of a fixed number of turns"
        elif target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            what = "a write to an InstanceNorm's statistics"  # of which its schema says nothing
            cure = "normalise without them (track_running_stats=False)"
        elif isinstance(value, Tensor) and value.layout is not torch.strided:
            what = "a sparse tensor"
            cure = "make it dense (to_dense()), or put the line into a submodule of its own"
        else:
            continue
        reason = f"{what}, which no stage's graph can hold"
        raise _error(model, source.of_node(node), reason, cure, _paths(node))


def at_node(message: str, node: fx.Node, reason: str) -> TraceError:
    """A TraceError that names the line of a node."""
    return TraceError(message, f"{source.of_node(node)} ({reason})", _paths(node))


def called(model: nn.Module, error: BaseException) -> list[str]:
    """The submodules that were being called when an exception was raised, outermost first."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    calls = [
        names.get(id(vars(frame.f_locals["self"])), "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is nn.Module._call_impl.__code__
    ]
    node = None if calls else _treated(error)
    return [name for name in calls if name] if node is None else _paths(node)


def _error(
    model: nn.Module, where: str, reason: str, cure: str, submodules: Sequence[str]
) -> TraceError:
    name = model._get_name()
    where = f"{where or name} ({reason})"
    out = way_out(submodules[-1] if submodules else "")
    return TraceError(f"{name} cannot be traced at {where}; {cure}, or {out}", where, submodules)


def _construct(where: str) -> tuple[str, str]:
    """What cannot be traced in a line, and what to do instead."""
    code = where.partition(": ")[2]
    for pattern, construct, cure in _CONSTRUCTS:
        if re.search(pattern, code):
            return construct, cure
    return "control flow that depends on data", _VALUES


def _treated(error: BaseException) -> fx.Node | None:
    """The node of a graph that was being processed when an exception was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # as PyTorch's passes and interpreters call it
    found = [frame.f_locals.get(name) for frame in reversed(frames) for name in ("node", "n")]
    nodes = [node for node in found if isinstance(node, fx.Node)]
    return next(filter(_paths, nodes), None) or next(filter(source.of_node, nodes), None)


def _paths(node: fx.Node) -> list[str]:
    """The submodules that a node, or else one of its users, belongs to, outermost first."""
    for candidate in (node, *node.users):
        if candidate.meta.get("nn_module_stack"):
            return source.module_paths(candidate)
    return []
