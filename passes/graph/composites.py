"""Make a program functional without preparing for operations that it does not have.

``run_decompositions`` keeps composite operations whole: for each that PyTorch knows, some hundreds,
it registers kernels and takes them back afterwards. That takes longer than all else for a small
graph, and only what occurs in the graph needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._export.utils import _is_preservable_cia_op as is_kept_whole
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program

_TORCH: Any = exported_program
_all_composites = _TORCH._collect_all_valid_cia_ops


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
