"""Recomputations: modules can ask for them, and ``recompute_check`` compares their results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import RecomputeError
from fxpipe.kernels.kernel import ForwardResult, Kernel, Wrapping
from fxpipe.torchtools import source

_here = threading.local()


def is_recomputing() -> bool:
    """Whether the running forward is a recomputation.

    For leaf modules that count their calls, for example, and should not count recomputations.
    """
    return bool(getattr(_here, "active", False))


@contextmanager
def recomputing() -> Iterator[None]:
    """Make ``is_recomputing`` true inside the block, on this thread."""
    _here.active = True
    try:
        yield
    finally:
        _here.active = False


class CheckedRecompute(Wrapping):
    """Runs one micro-batch with the wrapped kernel, and compares its two forwards to the bit.

    It keeps a fingerprint of each value of the first forward, not the values.
    """

    def __init__(self, kernel: Kernel, stage: int, microbatch: int) -> None:
        """Wrap a kernel for a single micro-batch."""
        super().__init__(kernel)
        self._stage = stage
        self._microbatch = microbatch
        self._first: list[Tensor] | None = None

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        """See Kernel.forward. Raises RecomputeError where the second forward differs."""
        result = self.kernel.forward(parameters, buffers, inputs)
        values = dict(zip(_returned(self.forward_graph), chain(*result), strict=False))
        tensors = {node: value for node, value in values.items() if isinstance(value, Tensor)}
        # a list: fingerprints may be on several devices, as a seed stays on the CPU
        prints = [fingerprint(value) for value in tensors.values()]
        if not is_recomputing():
            self._first = prints
        elif self._first is not None:
            pairs = zip(tensors, self._first, prints, strict=True)
            differing = {node for node, before, now in pairs if not torch.equal(before, now)}
            if differing:
                raise self._error(differing)
        return result

    def _error(self, differing: set[fx.Node]) -> RecomputeError:
        node = next(node for node in self.forward_graph.graph.nodes if node in differing)
        line = source.of_node(node)
        return RecomputeError(
            f"stage {self._stage} recomputes something else for micro-batch {self._microbatch} "
            f"than its forward made: node {node.name}{f' at {line}' if line else ''} differs, the "
            f"first of {len(differing)} that are kept. Its gradients would be wrong; let what it "
            "calls depend on its inputs alone, take deterministic kernels "
            "(torch.use_deterministic_algorithms(True)), or do not recompute this stage"
        )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MIX = 0x1E3779B97F4A7C15
"""An odd number with irregular bits, to multiply by."""


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's elements and their order; two tensors that differ have the same
    hash with a probability of 2⁻⁶⁴. It is an integer sum of a hash of each element with its index,
    so the order of summation does not matter."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    places = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    mixed = (bits + 1) * (places * _MIX)
    # a product alone is linear: small changes of two elements could cancel
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return (mixed ^ (mixed >> 32)).sum()


def _returned(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns, in order, without literals."""
    (output,) = module.graph.find_nodes(op="output")
    value = output.args[0]
    return list(value) if isinstance(value, list | tuple) else [value]
