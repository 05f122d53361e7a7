"""The extension that ``compile`` takes for a mesh with further dimensions than "pp" and "dp"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fxpipe.compiler.leaf_modules.calls import LeafCalls
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension, Kernels
from fxpipe.extensions.clipping.opcodes import Norm
from fxpipe.extensions.tensor_parallel.collectives import (
    in_columns,
    name_groups,
    without_collectives,
)
from fxpipe.extensions.tensor_parallel.divided import Divided
from fxpipe.extensions.tensor_parallel.draws import own_draws
from fxpipe.extensions.tensor_parallel.norms import ColumnNorm
from fxpipe.extensions.tensor_parallel.times import ColumnLink, add_times, way_of
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.runner import Pass
from fxpipe.runtime.group import Group


@dataclass(frozen=True)
class TensorParallel(Extension):
    """Lets stages have parts of DTensors, and collectives as nodes of their graphs.

    Attributes:
        dims: the dimensions of the mesh besides "pp" and "dp".
        divided: the model's DTensors.
        groups: dimension → the process group of torch.distributed that this rank has there.
        group: the ranks.
        ways: dimension → the way to its other ranks, once it is measured.
    """

    dims: tuple[str, ...]
    divided: Divided = field(repr=False, compare=False)
    groups: Mapping[str, Any] = field(repr=False, compare=False)
    group: Any = field(repr=False, compare=False)
    ways: dict[str, ColumnLink] = field(default_factory=dict, repr=False, compare=False)
    given = False

    def check(self, options: Options) -> None:
        """Raise InputError if it cannot work with these options."""
        if options.places:
            raise InputError(
                f"the mesh has the dimensions {', '.join(self.dims)}, over which stages are "
                'divided on CPU ranks alone so far; give init_device_mesh("cpu", ...)'
            )
        names = {type(each).__name__ for each in options.extensions}
        for name in ("Inductor", "CudaGraphs", "Slices"):
            if name in names:
                raise InputError(
                    f"{name} does not know the collectives of stages that are divided over "
                    f"{', '.join(self.dims)}; leave it out"
                )

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """What names groups by dimensions, measures without them, and adds up norms."""
        timed = [("", Pass(self.time_ways, "", ""))] if options.costs is None else []
        return {
            "capture": [
                ("", Pass(self.refuse_leaves, "calls", "")),
                *timed,
                ("seed_randomness", Pass(self.name_groups, "traced", "traced")),
            ],
            "partition": [("", Pass(self.same_parts, "traced", ""))],
            "follow": [("", Pass(self.same_parts, "traced", ""))],
            "measure": [
                ("", Pass(without_collectives, "plan", "plan")),
                ("measure", Pass(self.with_collectives, "plan, costs", "costs")),
            ],
            "program": [("lower", Pass(add_norms, "program", "program", apart=True))],
        }

    def refuse_leaves(self, calls: LeafCalls | None) -> None:
        """Raise InputError if a module that is called as it is has parts of parameters: it would
        compute with them as if they were whole."""
        for name in () if calls is None else calls.leaves:
            own = [each for each in self.divided.specs if each.startswith(f"{name}.")]
            if own:
                raise InputError(
                    f"module {name!r} is called as it is, as a leaf, and {own[0]!r} in it is "
                    f"divided over {', '.join(self.dims)}; let it be traced, without the line that "
                    "a warning named or without fxpipe.LeafModules, or do not divide it"
                )

    def name_groups(self, traced: Traced) -> Traced:
        """See ``collectives.name_groups`` and ``own_draws``."""
        known = {str(group.group_name): dim for dim, group in self.groups.items()}
        named = name_groups(traced, self.divided.groups() | known)
        sharded = {name: spec.sharded for name, spec in self.divided.specs.items()}
        return own_draws(named, sharded, self.group)

    def time_ways(self) -> None:
        """Time collectives once, on all ranks."""
        self.ways.update((dim, way_of(dim)) for dim in self.dims if dim not in self.ways)

    def with_collectives(self, plan: Plan, costs: Mapping[str, NodeCost]) -> Mapping[str, NodeCost]:
        """Add what collectives take to the costs of nodes."""
        return add_times(plan, costs, self.ways)

    def same_parts(self, traced: Traced) -> None:
        """Compare the graphs of all columns, before any of them runs one. Raises RankError if they
        differ."""
        self.group.same_parts(traced)

    def kernels(self) -> Kernels | None:
        return lambda kernels, *_: in_columns([*kernels], self.group)


def divided_model(model: nn.Module, groups: Mapping[str, Any], group: Group) -> TensorParallel:
    """Make a model's DTensors ordinary parameters, and return the extension for them. Raises
    InputError as ``Divided``."""
    dims = tuple(groups)
    has = f"the pipe has the mesh dimensions {', '.join(('pp', 'dp', *dims))}"
    return TensorParallel(dims, Divided(model, dims, has), groups, group)


def add_norms(program: Program) -> Program:
    """Program → Program: the norms of a stage's gradients are those over all columns.

    before:  norm         s0
    after:   column_norm  s0 of norm
    """
    lists = [
        tuple(ColumnNorm(x.stage, x.batch, x.opcode) if isinstance(x, Norm) else x for x in row)
        for row in program.lists
    ]
    return replace(program, lists=tuple(lists))
