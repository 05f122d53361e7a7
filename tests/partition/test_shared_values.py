"""Values that all layers read do not tie the layers together: rotary decoders and their like."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import in_order, is_within
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.measure import NodeCost
from tests.helpers.fronted import front_end
from tests.helpers.profiles import deep
from tests.oracles import loop

WIDTH, HEADS, LENGTH, LAYERS = 8, 2, 6, 4


class Layer(nn.Module):
    """A decoder's layer, which reads a value of the model as views of its own."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.shared = shared
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *values: Tensor) -> Tensor:
        query, key, value = map(by_heads, (self.query(x), self.key(x), self.value(x)))
        mask: Tensor | None = None
        if self.shared == "angles":
            cosine, sine = (each.unsqueeze(1) for each in values)
            query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        elif self.shared == "mask":
            mask = values[0].expand(-1, HEADS, x.shape[1], -1)
        elif self.shared == "bias":
            mask = values[0].unsqueeze(0)
        else:
            key = key + by_heads(values[0])
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return x + torch.relu(self.out(mixed.transpose(1, 2).flatten(2)))


def by_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


class Decoder(nn.Module):
    """All layers read the angles of positions, which depend on no input; a mask, which does; a
    bias, which is trained and depends on no input; or keys, which are trained and do."""

    frequencies: Tensor

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.shared = shared
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer(shared) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 11)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))
        if shared == "bias":
            self.bias = nn.Embedding(2 * LENGTH, HEADS)
        elif shared == "keys":
            self.keys = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        values = self.values(words, x)
        for layer in self.layers:
            x = layer(x, *values)
        y: Tensor = self.head(x)
        return y

    def values(self, words: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(LENGTH)
        if self.shared == "angles":
            angles = (places[:, None] * self.frequencies).repeat(1, 2)[None]
            return angles.cos(), angles.sin()
        if self.shared == "mask":
            return (torch.where(words[:, None, None, :] > 2, 0.0, -1.0),)
        if self.shared == "bias":
            return (self.bias(places[None] - places[:, None] + LENGTH).permute(2, 0, 1),)
        return (self.keys(x),)


def costs_of(traced: Traced) -> dict[str, NodeCost]:
    """Products of matrices take a second, all else a thousandth."""

    def seconds(node: fx.Node) -> float:
        heavy = ("linear", "scaled_dot_product_attention")
        return 1.0 if any(name in str(node.target) for name in heavy) else 0.001

    return {node.name: NodeCost(seconds(node), 2 * seconds(node), 1) for node in traced.graph.nodes}


def between_layers(traced: Traced, costs: dict[str, NodeCost], stages: int) -> float:
    """The slowest stage of the best cut at places where a layer begins."""
    nodes = in_order(traced)
    starts = [
        next(i for i, node in enumerate(nodes) if is_within(node, f"layers.{layer}"))
        for layer in range(LAYERS)
    ]
    return min(
        max(
            sum(costs[node.name].seconds for node in nodes[begin:end])
            for begin, end in itertools.pairwise([0, *cuts, len(nodes)])
        )
        for cuts in itertools.combinations(starts, stages - 1)
    )


@pytest.mark.parametrize("stages", [*deep(2), 4])
@pytest.mark.parametrize("shared", ["mask", "bias", *deep("angles", "keys")])
def test_the_cut_is_no_worse_than_the_best_between_layers(shared: str, stages: int) -> None:
    traced = front_end(Decoder(shared), torch.randint(11, (2, LENGTH)))
    costs = costs_of(traced)
    slowest = max(load.seconds for load in balance(traced, stages, costs).loads)
    assert slowest <= between_layers(traced, costs, stages) * 1.01


@pytest.mark.parametrize("stages", [*deep(2), 4])
@pytest.mark.parametrize("shared", ["mask", "bias", *deep("angles", "keys")])
def test_what_layers_in_several_stages_read_trains_as_in_the_loop(shared: str, stages: int) -> None:
    torch.manual_seed(0)
    model = Decoder(shared)
    alone = copy.deepcopy(model)
    words, target = torch.randint(11, (2, 8, LENGTH)).unbind()

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())

    at = [f"layers.{LAYERS * stage // stages}" for stage in range(1, stages)]
    with fxpipe.compile(model, ["cpu"] * stages, microbatches=4, loss=loss, partition=at) as pipe:
        losses = [pipe.step(words, target=target) for _ in range(2)]
    expected = [loop.train(alone, 4, words, loss=loss, target=target).loss for _ in range(2)]
    assert losses == expected
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
