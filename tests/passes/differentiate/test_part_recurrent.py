"""Recurrent layers are parted: they are on stages of their own, and drop out between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe import random
from fxpipe.ir.traced import Value
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    in_stages,
    run_graph,
    run_plan,
)
from tests.helpers.profiles import DEEP
from tests.oracles import loop

WIDTH = 32
"""So that every processor's vector kernels take whole rows, whether they lie together or apart."""


class Recurrent(nn.Module):
    """Any kind of recurrent layers of one width."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layers = kind(3, WIDTH, **options)

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return self.layers(x, states) if states else self.layers(x)


OPTIONS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 3, "batch_first": True}),
    "lstm both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm with projections": (nn.LSTM, {"num_layers": 2, "proj_size": 2, "bias": False}),
    "gru both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "tanh": (nn.RNN, {"num_layers": 2}),
    "relu": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu", "bias": False}),
    "all is dropped": (nn.GRU, {"num_layers": 2, "dropout": 1.0}),
    "nothing to drop": (nn.LSTM, {"num_layers": 1, "dropout": 0.5}),
}


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("name", OPTIONS if DEEP else ("lstm", "gru both ways"))
def test_layers_on_stages_of_their_own_equal_the_whole(name: str) -> None:
    kind, options = OPTIONS[name]
    model = Recurrent(kind, **options)
    x = torch.randn(3, 5, 3)
    traced = front_end(model, x)
    layers = [n for n in traced.graph.nodes if str(n.target).startswith(("aten.lstm", "aten.gru"))]
    assert not layers or len(layers) == options["num_layers"]
    plan = differentiated(model, traced, in_stages(traced, options["num_layers"]), x)
    assert len(plan.stages) == options["num_layers"]
    ran, answer = run_plan(model, traced, plan, x), Answer(model, x)
    made = [ran.values[out.name] for out in traced.outputs if isinstance(out, Value)]
    for one, other in zip(made, answer.leaves, strict=True):
        assert torch.equal(one, other)
    assert_equal(ran.gradients, answer.gradients)


def test_states_at_the_start_are_those_of_each_layer() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    inputs = torch.randn(3, 5, 3), torch.randn(4, 5, WIDTH), torch.randn(4, 5, WIDTH)
    made = run_graph(model, front_end(model, *inputs), *inputs)[0]
    for one, other in zip(*map(pytree.tree_leaves, (made, model(*inputs))), strict=True):
        assert torch.equal(one, other)


def test_dropout_between_layers_is_seeded() -> None:
    model = Recurrent(nn.LSTM, num_layers=3, dropout=0.4, batch_first=True)
    x = torch.randn(3, 5, 3)
    y = x.transpose(0, 1)
    for layer in range(3):
        alone = nn.LSTM(3 if layer == 0 else WIDTH, WIDTH)
        for name, parameter in alone.named_parameters():
            held = model.layers.get_parameter(name.replace("l0", f"l{layer}"))
            parameter.data.copy_(held)
        y = alone(y)[0]
        if layer < 2:
            y = random.native_dropout(y, 0.4, True, torch.tensor(7), layer)[0]
    assert torch.equal(run_graph(model, front_end(model, x), x, seed=7)[0][0], y.transpose(0, 1))


def test_evaluation_drops_nothing() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, dropout=0.5).eval()
    x = torch.randn(3, 5, 3)
    traced = front_end(model, x)
    assert not traced.seeded
    assert torch.equal(run_graph(model, traced, x)[0][0], model(x)[0])


class Words(nn.Module):
    """An ordinary language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.LSTM(6, 6, num_layers=2, dropout=0.1, batch_first=True)
        self.scores = nn.Linear(6, 11)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.scores(self.layers(self.embedding(words))[0])
        return y


@pytest.mark.deep
def test_a_model_with_dropout_between_its_layers_trains_alike_on_any_stages() -> None:
    words = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    start = Words()
    found: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for devices, schedule in ((1, "gpipe"), (2, "1f1b"), (3, "zb-h1")):
        model = copy.deepcopy(start)
        with fxpipe.compile(
            model,
            ["cpu"] * devices,
            schedule=schedule,
            microbatches=4,
            loss=lambda y, words: nn.functional.cross_entropy(y.flatten(0, 1), words.flatten()),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        ) as pipe:
            torch.manual_seed(3)
            losses = [pipe.step(words, target=words) for _ in range(8)]
            found.append((losses, dict(model.named_parameters())))
    for losses, weights in found[1:]:
        assert [float(loss) for loss in losses] == [float(loss) for loss in found[0][0]]
        loop.assert_same(weights, found[0][1])
    first, *_, last = found[0][0]
    assert last < first
