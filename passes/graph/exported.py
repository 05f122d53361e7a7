"""Make an exported program functional by PyTorch's own ``run_decompositions``.

It would lose some of what a graph does, which is rewritten first:

before:  region(no grad): y = relu(x)
after:   y = relu(x);  cut = detach(y), which later nodes read

It also keeps composite operations whole: it registers kernels for the hundreds that it knows, and
removes them afterwards. For a small graph that takes longer than all else, so ``decomposed`` has it
done only for the operations that occur in the graph.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._export.utils import _is_preservable_cia_op as is_kept_whole
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind

from fxpipe.errors import TraceError
from fxpipe.passes.graph.aliasing import hidden_views, returns_operand
from fxpipe.passes.tracing.explain import at_node

aten = torch.ops.aten


def detach_without_grad(module: fx.GraphModule) -> None:
    """Cut the gradient of what a ``torch.no_grad()`` region computes.

    The exporter keeps the region as a subgraph, but ``run_decompositions`` inlines it, and the
    gradient would then flow through. An operand that the region returns unchanged, as by
    ``x.to(x.dtype)``, keeps its gradient: later code of the model reads the tensor itself, though
    the exporter lets it read the region's result.
    """
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not region or node.args[0]:
            continue
        for item in list(node.users):
            if (operand := _passed_through(module, node, item)) is not None:
                item.replace_all_uses_with(operand)
                continue
            with module.graph.inserting_after(item):
                cut = module.graph.call_function(aten.detach.default, (item,))
            cut.meta.update(item.meta)
            item.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def _passed_through(module: fx.GraphModule, region: fx.Node, item: fx.Node) -> fx.Node | None:
    """The operand that a region returns as its result ``item``; None if it computes the result."""
    name = region.args[1]
    inner = module.get_submodule(str(name.target)) if isinstance(name, fx.Node) else None
    assert isinstance(inner, fx.GraphModule)
    placeholders = inner.graph.find_nodes(op="placeholder")
    returned: Any = inner.graph.output_node().args[0]
    value = returned[item.args[1]]
    while value not in placeholders:
        if not returns_operand(value):
            return None
        value = value.args[0]
    operand = region.args[2 + placeholders.index(value)]
    assert isinstance(operand, fx.Node)
    return operand


_OUT_OF_PLACE = {
    aten.detach_.default: "x = x.detach()",
    aten.fill_diagonal_.default: "x = x.masked_fill(torch.eye(len(x), dtype=torch.bool), value)",
}
"""Operation whose gradient ``run_decompositions`` would get wrong → the line to write."""


def refuse_in_place(module: fx.GraphModule) -> None:
    """Check that nothing that may have a gradient is detached, or gets another diagonal, in place.

    Raises:
        TraceError: something is; names its line.
    """
    reached: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.target is aten.lift_fresh_copy.default:
            continue  # a constant that the model makes, as torch.tensor does
        if node.op == "placeholder" or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
        value = node.meta.get("val")
        if node.target in _OUT_OF_PLACE and node.args[0] in reached and value.is_floating_point():
            name, line = str(node.target).split(".")[1], _OUT_OF_PLACE[node.target]
            message = f"a graph has no {name} with the model's gradients; write {line}"
            raise at_node(message, node, f"{name} of a value that has a gradient")


_TORCH: Any = exported_program
_all_composites = _TORCH._collect_all_valid_cia_ops


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place operations.

    Raises:
        TraceError: the model writes into a tensor that is no buffer.
    """
    program.graph_module.recompile()
    _separate_names(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decomposed(program, hidden_views(program.graph_module))
    except RuntimeError as error:
        written = re.match(r"Constant (\S+) is mutated in the forward method", str(error))
        if written is None:
            raise
        name = "" if written[1].startswith("lifted_tensor") else f" {written[1]!r}"
        raise TraceError(
            f"the model writes into a tensor{name} that is no buffer of it, which would never "
            "change in a graph; register it (register_buffer), and write the buffer in place"
        ) from error


def decomposed(
    program: ExportedProgram, table: dict[OpOverload, Callable[..., Any]]
) -> ExportedProgram:
    """Like ``program.run_decompositions(table)``, but operations inside of ``autocast`` or
    ``no_grad`` keep the metadata of their modules and lines."""
    module = program.graph_module
    regions = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    for region in regions:
        if region is not module:
            vars(region)["forward"] = fx.Interpreter(region).run  # hands each node's metadata on
    targets = {node.target for region in regions for node in region.graph.nodes}
    composites = {op for op in targets if isinstance(op, OpOverload) and is_kept_whole(op)}
    _TORCH._collect_all_valid_cia_ops = lambda: composites
    try:
        result: ExportedProgram = program.run_decompositions(table)
        return result
    finally:
        _TORCH._collect_all_valid_cia_ops = _all_composites


def _separate_names(program: ExportedProgram) -> None:
    """Copy a buffer with several names under those names that the graph does not read.

    The graph reads such a buffer under one name, and ``run_decompositions`` fails if it writes it.
    """
    unread = {node.name for node in program.graph.nodes if not node.users}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and getattr(spec.arg, "name", "") in unread:
            for held in (program.state_dict, program.constants):
                tensor = held.get(str(spec.target))
                if isinstance(tensor, torch.Tensor):
                    held[str(spec.target)] = tensor.detach().clone()
