"""Sizes of an exported graph, evaluated for other inputs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

from fxpipe.torchtools.sizes import evaluated, sizes


class Reshaping(nn.Module):
    """Outputs whose sizes are expressions of those of its inputs."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x[:, 1:], x.flatten(), torch.cat([y, y, x[:, 0]]), x.reshape(-1, 2, x.shape[1])


EXPORTED = torch.export.export(
    Reshaping(),
    (torch.zeros(4, 5), torch.zeros(7)),
    dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO}),
)
VALUES = {node.name: node.meta.get("val") for node in EXPORTED.graph.nodes}
INPUTS = [sizes(VALUES[str(name)]) for name in EXPORTED.graph_signature.user_inputs]
OUTPUTS = [sizes(VALUES[str(name)]) for name in EXPORTED.graph_signature.user_outputs]


@given(st.integers(1, 6), st.integers(2, 9), st.integers(2, 9))
def test_sizes_are_those_of_the_module_on_such_inputs(half: int, width: int, more: int) -> None:
    x, y = torch.zeros(2 * half, width), torch.zeros(more)
    shapes = [tuple(x.shape), tuple(y.shape)]
    assert evaluated(OUTPUTS, INPUTS, shapes) == [tuple(out.shape) for out in Reshaping()(x, y)]


def test_a_size_that_no_input_has_is_not_evaluated() -> None:
    assert evaluated(OUTPUTS, [None, INPUTS[1]], [None, (5,)]) is None
    assert evaluated([(2, 3), None], [None], [None]) == [(2, 3), None]
