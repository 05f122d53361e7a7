"""Norms of gradients whose parameters are divided over the columns of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.extend import find
from fxpipe.extensions.clipping.opcodes import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class ColumnNorm(Norm):
    """Add up the norms of the parts of gradients, and send them to all stages; those of gradients
    that every column has whole count once. Roughly: norms = [sum(column.norm()) for g in …].

    Attributes:
        first: the opcode of what makes the norms of this column.
    """

    opcode = "column_norm"
    form = f"{Norm.form[0]} of {{first:word}}", "s0 of norm"
    first: str = Norm.opcode

    def run(self, machine: Machine) -> None:
        find("instruction", self.first)(self.stage, self.batch).run(machine)
        values, buffers = machine.store.values, self.makes(machine.program)
        norms: list[Tensor | None] = [*values[buffers[0]]]
        names = [argument.target for argument in machine.stages[self.stage].parameters]
        sharded = machine.channels.divided(names)  # type: ignore[attr-defined]
        for dim in dict.fromkeys(dim for dims in sharded for dim in dims):
            of = [at for at, dims in enumerate(sharded[: len(norms)]) if dim in dims]
            add_up(norms, [at for at in of if norms[at] is not None], dim)
        values.update(dict.fromkeys(buffers, norms))


def add_up(norms: list[Tensor | None], places: list[int], dim: str) -> None:
    """Replace norms of parts at some places by those over a dimension of the mesh."""
    import torch

    if not places:
        return
    own = torch.stack([x.double() for at in places if (x := norms[at]) is not None])
    c10d = torch.ops._c10d_functional
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    size = resolve(dim).size()
    every = c10d.wait_tensor(c10d.all_gather_into_tensor(own, size, dim))
    whole = every.view(size, -1).square().sum(0).sqrt()
    for at, norm in zip(places, whole, strict=True):
        before = norms[at]
        assert before is not None
        norms[at] = norm.to(before.dtype)
