"""Prepare an exported program to be made functional, and have PyTorch itself make it so.

Some of what an exported graph has would be lost:

before:  region(no grad): y = relu(x);  z.detach_()
after:   y = relu(x);  cut = detach(y);  d = detach(z), which later nodes read

before:  fill_diagonal_(x, 0)
after:   mask = triu(tril(ones_like(x)));  masked_fill_(x, mask, 0)

PyTorch's own way, ``run_decompositions``, keeps composite operations whole: for each that it knows,
some hundreds, it registers kernels and takes them back afterwards. That takes longer than all else
for a small graph, and only what occurs in the graph needs it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._export.utils import _is_preservable_cia_op as is_kept_whole
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind

from fxpipe.errors import TraceError
from fxpipe.passes.graph.aliasing import hidden_views, returns_operand
from fxpipe.torchtools.functions import functions_kept

aten = torch.ops.aten


def detach_without_grad(module: fx.GraphModule) -> None:
    """Cut the gradient of what a ``torch.no_grad()`` region computes.

    The exporter keeps such a region as a subgraph, but inlines it when it decomposes, and the
    gradient would then flow through. What a region returns as it got it, as ``x.to(x.dtype)`` is,
    keeps its gradient: the exporter has what comes later read it from the region.
    """
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not region or node.args[0]:
            continue
        for item in list(node.users):
            if (operand := _handed_on(module, node, item)) is not None:
                item.replace_all_uses_with(operand)
                continue
            with module.graph.inserting_after(item):
                cut = module.graph.call_function(torch.ops.aten.detach.default, (item,))
            cut.meta.update(item.meta)
            item.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def _handed_on(module: fx.GraphModule, region: fx.Node, item: fx.Node) -> fx.Node | None:
    """The operand of a region that one of its results is, or None if the region made that."""
    name = region.args[1]
    inner = module.get_submodule(str(name.target)) if isinstance(name, fx.Node) else None
    assert isinstance(inner, fx.GraphModule)
    placeholders = inner.graph.find_nodes(op="placeholder")
    made: Any = inner.graph.output_node().args[0]
    made = made[item.args[1]]
    while made not in placeholders:
        if not returns_operand(made):
            return None
        made = made.args[0]
    operand = region.args[2 + placeholders.index(made)]
    assert isinstance(operand, fx.Node)
    return operand


def detach_in_place(module: fx.GraphModule) -> None:
    """Write ``x.detach_()`` as ``detach``, whose result later nodes read instead of ``x``.

    ``run_decompositions`` drops it. That is right for a constant, which has no gradient.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        source = node.args[0] if node.target is aten.detach_.default else None
        if not isinstance(source, fx.Node) or source.target is aten.lift_fresh_copy.default:
            continue
        node.target = aten.detach.default
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)


def mask_diagonals(module: fx.GraphModule) -> None:
    """Replace every ``fill_diagonal_`` of a matrix that does not wrap, in regions, too.

    PyTorch makes an ``as_strided_scatter`` of it, whose gradient is that of the diagonal, not that
    of the rest.
    """
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        filled = [
            node
            for node in part.graph.find_nodes(
                op="call_function", target=aten.fill_diagonal_.default
            )
            if node.args[0].meta["val"].dim() == 2 and not any(node.args[2:])
        ]
        for node in filled:
            with part.graph.inserting_before(node):
                node.replace_all_uses_with(_masked(node))
            part.graph.erase_node(node)
        if filled:
            part.graph.lint()
            part.recompile()


def _masked(filled: fx.Node) -> fx.Node:
    x, value = filled.args[:2]
    make = partial(_call_like, filled)
    assert isinstance(x, fx.Node)
    with x.meta["val"].fake_mode, torch.no_grad():
        every = make(aten.ones_like.default, x, dtype=torch.bool)
        mask = make(aten.triu.default, make(aten.tril.default, every))
        return make(aten.masked_fill_.Scalar, x, mask, value)


def _call_like(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the place where its graph inserts, with the line of another node, and with the
    value that it gives for the values of its operands."""
    made = node.graph.call_function(target, args, kwargs)
    made.meta.update({key: each for key, each in node.meta.items() if key != "val"})
    made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return made


_TORCH: Any = exported_program
_all_composites = _TORCH._collect_all_valid_cia_ops


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place operations, as PyTorch itself makes it.

    Raises:
        TraceError: the model writes into a tensor that is no buffer.
    """
    program.graph_module.recompile()
    _part_names(program)
    try:
        with warnings.catch_warnings(), functions_kept():
            warnings.simplefilter("ignore")
            table = hidden_views(program.graph_module)
            return decomposed(program, table)
    except RuntimeError as error:
        written = re.match(r"Constant (\S+) is mutated in the forward method", str(error))
        if written is None:
            raise
        name = "" if written[1].startswith("lifted_tensor") else f" {written[1]!r}"
        raise TraceError(
            f"the model writes into a tensor{name} that is no buffer of it, and which in a graph "
            "would stay as it is; register it (register_buffer), and write that in place"
        ) from error


def decomposed(
    program: ExportedProgram, table: dict[OpOverload, Callable[..., Any]]
) -> ExportedProgram:
    """As ``program.run_decompositions(table)``; but operations inside of ``autocast`` or
    ``no_grad`` stay those of their modules and lines."""
    module = program.graph_module
    regions = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
    for region in regions:
        if region is not module:
            vars(region)["forward"] = fx.Interpreter(region).run  # tells what each node comes from
    targets = {node.target for each in regions for node in each.graph.nodes}
    own = {each for each in targets if isinstance(each, OpOverload) and is_kept_whole(each)}
    _TORCH._collect_all_valid_cia_ops = lambda: own
    try:
        made: ExportedProgram = program.run_decompositions(table)
        return made
    finally:
        _TORCH._collect_all_valid_cia_ops = _all_composites


def _part_names(program: ExportedProgram) -> None:
    """Give a buffer with several names copies under the names that the graph does not read.

    The graph reads a shared buffer under one name, but ``run_decompositions`` fails if it writes
    a buffer that has other names as well.
    """
    unread = {node.name for node in program.graph.nodes if not node.users}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and getattr(spec.arg, "name", "") in unread:
            for held in (program.state_dict, program.constants):
                tensor = held.get(str(spec.target))
                if isinstance(tensor, torch.Tensor):
                    held[str(spec.target)] = tensor.detach().clone()
