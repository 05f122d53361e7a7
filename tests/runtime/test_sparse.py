"""Graph networks: a sparse adjacency matrix is made inside of a submodule, and nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from tests.oracles import loop

# invariants go unchecked
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

NODES = 6


def adjacency() -> Tensor:
    weights = torch.rand(NODES, NODES)
    return (weights * (weights > 0.5)).to_sparse()


class Layer(nn.Module):
    """Sums the values of neighbours, whose edges it keeps."""

    indices: Tensor
    values: Tensor

    def __init__(self, adj: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(NODES, NODES)
        self.register_buffer("indices", adj.indices().clone())
        self.register_buffer("values", adj.values().clone())

    def forward(self, x: Tensor) -> Tensor:
        adj = torch.sparse_coo_tensor(self.indices, self.values, (NODES, NODES))
        return torch.relu(torch.sparse.mm(adj, self.linear(x).t()).t())


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NODES, NODES)
        self.register_buffer("adj", adjacency())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(self.adj, self.linear(x).t()).t()
        return y


def samples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, NODES), torch.randn(count, NODES)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_layers_that_make_a_sparse_matrix_train_as_in_the_loop(schedule: str) -> None:
    torch.manual_seed(0)
    adj = adjacency().coalesce()
    model = nn.Sequential(*(Layer(adj) for _ in range(3)))
    alone = copy.deepcopy(model)
    x, y = samples(7)
    with fxpipe.compile(model, 2, microbatches=3, loss=mse_loss, schedule=schedule) as pipe:
        pipe.step(x, target=y)
    loop.train(alone, 3, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_sparse_buffer_is_refused_by_name() -> None:
    x, y = samples(8)
    with (
        fxpipe.compile(Keeps(), 1, microbatches=4, loss=mse_loss) as pipe,
        pytest.raises(fxpipe.InputError, match=r"'adj' of the model is torch.sparse_coo.*indices"),
    ):
        pipe.step(x, target=y)
