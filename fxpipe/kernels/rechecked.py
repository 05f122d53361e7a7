"""A stage's kernel that sees to it that a recomputation makes what its forward made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import RecomputeError
from fxpipe.kernels.kernel import Forwarded, Kernel, Wrapping
from fxpipe.torchtools import source
from fxpipe.torchtools.recomputing import is_recomputing


class Rechecked(Wrapping):
    """Runs as the kernel does, for one micro-batch, and compares its forwards to the bit.

    Of the first forward it keeps a number for each value, not the values.
    """

    def __init__(self, kernel: Kernel, stage: int, microbatch: int) -> None:
        """Nothing ran yet.

        Args:
            kernel: the stage's own.
            stage: its number, for messages.
            microbatch: the only one that it runs for.
        """
        super().__init__(kernel)
        self._stage = stage
        self._microbatch = microbatch
        self._first: list[Tensor] | None = None

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> Forwarded:
        """See Kernel.forward. Raises RecomputeError where the second one makes something else."""
        made = self.kernel.forward(parameters, buffers, inputs)
        values = dict(zip(_returned(self.forward_graph), _flat(made), strict=False))
        tensors = {node: value for node, value in values.items() if isinstance(value, Tensor)}
        # a list: on a device beside the CPU, a seed lies elsewhere than what it draws
        prints = [fingerprint(value) for value in tensors.values()]
        if not is_recomputing():
            self._first = prints
        elif self._first is not None:
            pairs = zip(tensors, self._first, prints, strict=True)
            other = {node for node, before, now in pairs if not torch.equal(before, now)}
            if other:
                raise self._error(other)
        return made

    def _error(self, other: set[fx.Node]) -> RecomputeError:
        node = next(node for node in self.forward_graph.graph.nodes if node in other)
        line = source.of_node(node)
        return RecomputeError(
            f"stage {self._stage} recomputes something else for micro-batch {self._microbatch} "
            f"than its forward made: node {node.name}{f' at {line}' if line else ''} differs, the "
            f"first of {len(other)} that are kept. Its gradients would be wrong; let what it "
            "calls depend on its inputs alone, take deterministic kernels "
            "(torch.use_deterministic_algorithms(True)), or do not recompute this stage"
        )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MIX = 0x1E3779B97F4A7C15
"""An odd number without a pattern."""


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that is another one when a bit of a tensor or the place of an element changes, but
    for a coincidence of one in 2⁶⁴. It is the sum of what each element and its place are mixed to,
    in whole numbers, so in any order of adding."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    places = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    mixed = (bits + 1) * (places * _MIX)
    # a product alone is linear: moves of small numbers to and fro would cancel
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return (mixed ^ (mixed >> 32)).sum()


def _flat(made: Forwarded) -> list[Any]:
    return [*made.outputs, *made.writes, *made.saved]


def _returned(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns, in order, as far as they are nodes."""
    (output,) = module.graph.find_nodes(op="output")
    value = output.args[0]
    return list(value) if isinstance(value, list | tuple) else [value]
