"""Programs are made functional as by PyTorch, which is told of their own operations alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._export.utils import _collect_all_valid_cia_ops as composites
from torch.export import ExportedProgram, export, exported_program
from torch.nn import functional

import fxpipe
from fxpipe.passes.graph.exported import decomposed
from fxpipe.torchtools import source
from fxpipe.torchtools.source import module_paths
from tests.helpers.fronted import front_end

pytestmark = pytest.mark.filterwarnings("ignore")  # the remarks of an exporter


class Composed(nn.Module):
    """Composite operations, some of which consist of others, in branches and beside writes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 4, 3, padding="same")
        self.norms = nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Hardswish(True))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        images: Tensor = self.norms(self.image(x)).flatten(2).mT
        read = self.attention(images, images, images)[0]
        read = self.cell(read.flatten(0, 1)).unflatten(0, read.shape[:2])
        self.seen.add_(torch.einsum("bti,btj->ij", read, images))
        turned = torch.cond(x.sum() > 0, lambda y: y.reshape(-1, 4).matmul(y[0]), product, (read,))
        left, right = functional.pad(turned, (1, 1)).chunk(2, dim=-1)
        return torch.stack([left, right]).index_fill_(0, torch.tensor(0), 2.0).var(dim=0)


def product(y: Tensor) -> Tensor:
    return functional.linear(y.reshape(-1, 4), y[0].contiguous().mT)


def program() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Composed(), (torch.randn(2, 2, 2, 2),), strict=False)


def code(made: ExportedProgram) -> list[str]:
    return [each.code for each in made.graph_module.modules() if isinstance(each, fx.GraphModule)]


@pytest.mark.deep
def test_a_program_becomes_what_pytorch_makes_of_it_knowing_all_composite_operations() -> None:
    expected, found = program().run_decompositions({}), decomposed(program(), {})
    assert code(found) == code(expected)
    assert found.graph_signature == expected.graph_signature
    known = {node.target for node in found.graph.nodes} & composites()
    assert {str(each) for each in known} >= {"aten.einsum.default", "aten.linear.default"}


@pytest.mark.deep
def test_pytorch_knows_all_of_them_again_afterwards() -> None:
    decomposed(program(), {})
    assert vars(exported_program)["_collect_all_valid_cia_ops"] is composites


class Regions(nn.Module):
    """Layers inside of ``autocast``, and one inside of ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.frozen(x)
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.last(self.first(x).relu() + kept)
        return out.float()


def test_operations_under_autocast_and_no_grad_are_those_of_their_modules() -> None:
    model = Regions()
    traced = front_end(model, torch.randn(6, 4))
    nodes = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [module_paths(node) for node in nodes] == [["frozen"], ["first"], ["last"]]
    assert "self.frozen(x)" in source.of_node(nodes[0])
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    mse = functional.mse_loss
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse, partition=["last"]) as pipe:
        pipe.step(x, target=y)
        assert "last" in pipe.plan.stages[1].modules
