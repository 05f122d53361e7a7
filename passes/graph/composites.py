"""Make a program functional without preparing for operations that it does not have.

``run_decompositions`` keeps composite operations whole: for each that PyTorch knows, some hundreds,
it registers kernels and takes them back afterwards. That takes longer than all else for a small
graph, and only what occurs in the graph needs it.
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
from fxpipe.passes.graph.aliasing import hidden_views
from fxpipe.torchtools.functions import functions_kept

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
