"""Graph networks: a sparse adjacency matrix, as a buffer or as an input, in leaf modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from tests.helpers.checkpoints import FORMS, Form
from tests.oracles import loop

# CSR is in beta, and invariants go unchecked
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

NODES = 6
LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


def adjacency(layout: torch.layout = torch.sparse_coo) -> Tensor:
    weights = torch.rand(NODES, NODES)
    return (weights * (weights > 0.5)).to_sparse(layout=layout)


class Aggregate(nn.Module):
    """Sums the values of neighbours."""

    adj: Tensor

    def __init__(self, adj: Tensor) -> None:
        super().__init__()
        self.register_buffer("adj", adj)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sparse.mm(self.adj, x.permute(1, 0, 2).reshape(NODES, -1))
        z: Tensor = y.reshape(NODES, x.shape[0], 4).permute(1, 0, 2)
        return z


class Graphs(nn.Module):
    """Three layers, each of which reads the adjacency matrix; several graphs are a batch."""

    def __init__(self, adj: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.sums = nn.ModuleList(Aggregate(adj.clone()) for _ in range(3))

    @property
    def adj(self) -> Tensor:
        (first, *_) = self.sums
        assert isinstance(first, Aggregate)
        return first.adj

    def forward(self, x: Tensor) -> Tensor:
        for layer, aggregate in zip(self.layers, self.sums, strict=True):
            x = torch.relu(aggregate(layer(x)))
        return x


def twins(layout: torch.layout = torch.sparse_coo) -> tuple[Graphs, Graphs]:
    """Two models that are the same; PyTorch copies no CSR tensor deeply."""
    adj = adjacency(layout)
    models = Graphs(adj), Graphs(adj.clone())
    models[1].layers.load_state_dict(models[0].layers.state_dict())
    return models


def graphs(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, NODES, 4), torch.randn(count, NODES, 4)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_buffer_is_read_by_every_stage(layout: torch.layout, stages: int) -> None:
    torch.manual_seed(0)
    model, alone = twins(layout)
    x, y = graphs()
    pipe = fxpipe.compile(
        model,
        stages,
        partition=["layers.1", "layers.2"][: stages - 1],
        microbatches=4,
        loss=mse_loss,
    )
    with pipe:
        made = pipe.step(x, target=y)
        outputs = pipe(x).detach()
        torch.testing.assert_close(outputs, torch.cat([alone(part) for part in x.split(2)]))
    expected = loop.train(alone, 4, x, loss=mse_loss, target=y)
    torch.testing.assert_close(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_micro_batches_of_different_sizes_multiply_by_a_sparse_buffer(schedule: str) -> None:
    torch.manual_seed(1)
    model, alone = twins()
    x, y = graphs(7)
    with fxpipe.compile(model, 2, microbatches=3, loss=mse_loss, schedule=schedule) as pipe:
        pipe.step(x, target=y)
    loop.train(alone, 3, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_from_a_checkpoint_with_a_sparse_buffer(
    layout: torch.layout, form: Form, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    first, second = twins(layout)
    x, y = graphs()
    options: dict[str, Any] = {"loss": mse_loss, "microbatches": 2, "optimizer": torch.optim.Adam}
    with fxpipe.compile(first, 2, **options) as pipe, fxpipe.compile(second, 3, **options) as other:
        pipe.step(x, target=y)
        form.write(pipe, tmp_path / "run", extra={"graph": first.adj})
        with torch.no_grad():
            for each in (a.adj for a in second.sums if isinstance(a, Aggregate)):
                each.values().zero_() if layout is torch.sparse_csr else each.zero_()
        extra = form.read(other, tmp_path / "run")
        for found in (second.adj, extra["graph"]):
            assert found.layout is layout
            assert torch.equal(found.to_dense(), first.adj.to_dense())
        assert torch.equal(pipe.step(x, target=y), other.step(x, target=y))
    loop.assert_same(dict(second.layers.named_parameters()), dict(first.layers.named_parameters()))


def test_a_checkpoint_with_another_kind_of_buffer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(4)
    adj = adjacency()
    with fxpipe.compile(Graphs(adj), 2, loss=mse_loss, microbatches=2) as pipe:
        pipe.checkpoint(tmp_path / "run")
    for other in (adj.to_dense(), adj.to_sparse_csr()):
        model = Graphs(other)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        with (
            fxpipe.compile(model, 2, loss=mse_loss, microbatches=2) as pipe,
            pytest.raises(
                fxpipe.CheckpointError, match=r"'sums.0.adj' is 6×6 of float32, sparse_coo"
            ),
        ):
            pipe.restore(tmp_path / "run")
        loop.assert_same(dict(model.named_parameters()), before)


class Whole(nn.Module):
    """Takes the matrix as an input, in two layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x, adj), adj)
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NODES, NODES)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.relu(torch.sparse.mm(adj, self.linear(x).t()).t())


@pytest.mark.parametrize("leaves", [[], ["second"]])
def test_a_leaf_takes_a_sparse_input(leaves: list[str]) -> None:
    torch.manual_seed(6)
    model, adj = Whole(), adjacency()
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, NODES), torch.randn(8, NODES)
    given = [fxpipe.LeafModules(*leaves)]
    options: dict[str, Any] = {"batch_dims": {"adj": None}, "extensions": given}
    with fxpipe.compile(model, 2, microbatches=4, loss=mse_loss, **options) as pipe:
        pipe.step(x, adj, target=y)
        assert "1f1b" in str(pipe)
        (spec,) = (spec for name, spec in pipe.plan.specs.items() if name == "adj")
    assert spec.bytes == adj.indices().nbytes + adj.values().nbytes
    loop.train(alone, 4, x, loss=mse_loss, target=y, weight=len, adj=adj)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Outside(nn.Module):
    """Multiplies by the matrix in the forward of the model itself."""

    adj: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("adj", adjacency())

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).permute(1, 0, 2).reshape(NODES, -1)
        y = torch.sparse.mm(self.adj, y).reshape(NODES, x.shape[0], 4).permute(1, 0, 2)
        z: Tensor = self.last(y)
        return z


def test_a_line_of_the_models_own_forward_that_reads_a_sparse_buffer_is_refused() -> None:
    x, y = graphs()
    message = r"torch.sparse.mm.*a sparse tensor.*put the line into a submodule of its own"
    with (
        fxpipe.compile(Outside(), 2, microbatches=4, loss=mse_loss) as pipe,
        pytest.raises(fxpipe.TraceError, match=message),
    ):
        pipe.step(x, target=y)
