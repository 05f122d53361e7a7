"""Small models of many kinds, and their exported graphs, for tests of text."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn


class UNet(nn.Module):
    """A convolution, batch norm and a skip over a smaller level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        y = self.up(torch.relu(self.inner(nn.functional.max_pool2d(h, 2))))
        out: Tensor = self.out(torch.cat([h, y], 1))
        return out


class Recurrent(nn.Module):
    """An LSTM with dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, (h, _) = self.lstm(x)
        return self.dropout(out), h


class Sliced(nn.Module):
    """Slices, einsum, infinities, types, and shapes that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, index: Tensor) -> Tensor:
        e = self.embedding(index)
        scores = torch.einsum("bik,bjk->bij", e[:, 1:], e[:, ::2, :]) / e.shape[1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out: Tensor = weights.reshape(index.shape[0] * weights.shape[1], -1).double()
        return out


class Case(NamedTuple):
    """A model with the arguments of a call; their first dimension is the batch."""

    model: nn.Module
    args: tuple[Any, ...]


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return {
        "u-net": Case(UNet(), (torch.randn(3, 2, 8, 8),)),
        "transformer": Case(encoder, (torch.randn(3, 5, 8),)),
        "lstm": Case(Recurrent(), (torch.randn(3, 5, 3),)),
        "slices": Case(Sliced(), (torch.randint(10, (3, 6)),)),
    }


class Exported(NamedTuple):
    """A functional graph and one value for each of its placeholders."""

    graph: fx.Graph
    values: list[Tensor]


def export(case: Case) -> Exported:
    """The functional graph of a model, with a dynamic batch."""
    batch = torch.export.Dim("batch", min=2)
    with warnings.catch_warnings():
        # PyTorch warns of its own deprecated calls, and of the weights that an LSTM lists.
        warnings.simplefilter("ignore")
        program = torch.export.export(
            case.model,
            case.args,
            strict=False,
            dynamic_shapes=tuple({0: batch} for _ in case.args),
        ).run_decompositions({})
    held = {**dict(case.model.named_parameters()), **dict(case.model.named_buffers())}
    held |= program.constants
    signature = program.graph_signature
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    args = iter(case.args)
    values = [
        held[targets[node.name]] if node.name in targets else next(args)
        for node in program.graph.nodes
        if node.op == "placeholder"
    ]
    return Exported(program.graph, values)
