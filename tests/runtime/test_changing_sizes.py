"""Batch sizes that change: the first gets a graph of its own, all others share one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from examples.unet import UNet
from fxpipe.passes.tracing import capture
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import LEVELS, deep
from tests.oracles import loop


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every capture of a model from now on: the batch size that it is for, or "any"."""
    found: list[str] = []

    def counted(whole: capture.Whole, names: Any, as_export: bool) -> Any:
        found.append("any" if whole.symbolic else str(len(whole.tensors[0])))
        return captured(whole, names, as_export)

    captured = capture._captured
    monkeypatch.setattr(capture, "_captured", counted)
    return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def unet() -> nn.Module:
    return UNet(channels=2, base=2, depth=LEVELS)


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(model, ["cpu"] * 2, **{"microbatches": 2, "loss": mse_loss, **options})


def batch(samples: int, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(samples)
    x, y = torch.randn(2, samples, *(shape or (4,)), dtype=torch.float64).unbind()
    return x, y


@pytest.mark.traces
@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        *deep(((8, 8, 8), ["4"]), ((8, 7, 8, 7, 8), ["4", "3"]), ((7, 8, 10, 6), ["any"])),
        ((8, 8, 10, 12, 8, 7, 6, 9), ["4", "any"]),
        ((8, 7, 8, 10, 9, 6), ["4", "3", "any"]),
    ],
)
def test_a_model_is_traced_for_a_whole_batch_a_partial_one_and_all_sizes(
    traces: list[str], samples: Sequence[int], expected: list[str]
) -> None:
    model = mlp().double()
    alone = copy.deepcopy(model)
    with compiled(model) as pipe:
        for count in samples:
            x, y = batch(count)
            loop.clear(model, alone)
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert traces == expected


class Residual(nn.Module):
    """Adds what it makes to what it got: sums of several sizes have other names in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for layer in self.layers:
            x = x + layer(x[:, :4] * (1 / x.shape[0])).tanh()
        return x


@pytest.mark.parametrize("counts", [(4, 3, 6), (1, 4, 2)])
def test_microbatches_of_one_sample_and_of_more_go_together(counts: tuple[int, ...]) -> None:
    model = Residual().double()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, loss=mse_loss) as pipe:  # microbatches: at most 8
        for count in (*counts, 13):
            loop.clear(model, alone)
            x, y = batch(count)
            loss = pipe.step(x, target=y)
            expected = loop.train(alone, min(8, count), x, loss=mse_loss, target=y)
            assert torch.equal(loss, expected.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


class Sized(nn.Module):
    """A model that holds for one size at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        for _ in range(x.shape[0]):
            y = y * 0.9
        z: Tensor = self.second(y)
        return z


@pytest.mark.traces
def test_a_model_that_is_not_dynamic_is_traced_once_a_size(traces: list[str]) -> None:
    model = Sized().double()
    alone = copy.deepcopy(model)
    with compiled(model) as pipe:
        for count in (8, 10, 8, 12, 10, 8):
            x, y = batch(count)
            loop.clear(model, alone)
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert traces == ["4", "any", "any"]


class Decoder(nn.Module):
    """Causal attention over positions, and an output that is one position shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.read = nn.Embedding(16, 8), nn.Linear(4, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.read(x) + self.place(torch.arange(length))
        parts = (part.view(batch, length, 2, 4) for part in self.qkv(self.norm(h)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(h + mixed.transpose(1, 2).reshape(batch, length, 8))
        return y[:, :-1] / length


class Encoder(nn.Module):
    """PyTorch's own layers, with a mask made for the length."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype).triu(1)
        y: Tensor = self.out(self.layers(self.read(x), mask))
        return y[:, :-1]


class Unrolled(nn.Module):
    """A loop over the length, of which each needs a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(x[:, 0])
        for place in range(1, x.shape[1]):
            state = torch.tanh(state + x[:, place])
        y: Tensor = self.second(state)
        return y[:, None].expand(-1, x.shape[1] - 1, -1)


class Shorter(nn.Module):
    """Computes each position by itself, and leaves out the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y[:, :-1] / x.shape[1]


class Branching(nn.Module):
    """Computes something else from some length on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return (y if x.shape[1] > 6 else y * 2)[:, :-1]


@pytest.mark.traces
@pytest.mark.parametrize(
    ("model", "shapes", "expected"),
    [
        (Decoder, [(8, 5), (8, 7), (8, 5), (8, 3), (7, 16)], ["4", "any"]),
        *deep(
            (Decoder, [(8, 5), (8, 12), (8, 3), (7, 9), (4, 8), (8, 16)], ["4", "any"]),
            (Decoder, [(8, 5), (6, 5), (6, 7), (10, 9), (8, 5)], ["4", "any", "any"]),
        ),
        (Shorter, [(8, 5), (6, 5), (6, 7), (10, 9), (8, 5)], ["4", "any", "any"]),
        (Unrolled, [(8, 5), (8, 7), (8, 9), (8, 7), (8, 4)], ["4", "any", "4", "4"]),
        *deep((Branching, [(8, 5), (8, 7), (8, 9), (8, 4)], ["4", "any", "4"])),
        (Branching, [(8, 8), (8, 9), (8, 5), (8, 12), (8, 4)], ["4", "any", "any"]),
        *deep((Encoder, [(8, 5), (8, 7), (8, 12), (6, 3), (8, 5)], ["4", "any"])),
    ],
)
def test_lengths_share_a_graph_if_one_holds_for_all(
    traces: list[str], model: type[nn.Module], shapes: Sequence[tuple[int, int]], expected: Any
) -> None:
    torch.manual_seed(0)
    made = model().double()
    alone = copy.deepcopy(made)
    with compiled(made) as pipe:
        for count, length in shapes:
            torch.manual_seed(count + length)
            x = torch.randn(count, length, 4, dtype=torch.float64)
            y = torch.randn(count, length - 1, 4, dtype=torch.float64)
            loop.clear(made, alone)
            loss = pipe.step(x, target=y)
            assert torch.equal(loss, loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
            loop.assert_same(loop.gradients(made), loop.gradients(alone))
    assert traces == expected


class Random(nn.Module):
    """Dropout between layers, in attention, and numbers drawn for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, 0.3, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.first(x).tanh())
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.drop(h) + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)
        y: Tensor = self.last(h)
        return y


@pytest.mark.traces
def test_masks_do_not_depend_on_which_graph_draws_them(traces: list[str]) -> None:
    def run(first: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        torch.manual_seed(0)
        net = Random().double()
        with compiled(net) as pipe:
            x, y = batch(first, 2, 4)
            pipe.prepare(x, target=y)
            x, y = batch(8, 2, 4)
            torch.manual_seed(1)
            return pipe.step(x, target=y), loop.gradients(net)

    alone, shared = run(8), run(7)
    assert traces == ["4", "any"]
    torch.testing.assert_close(alone[0], shared[0], rtol=1e-12, atol=0)
    loop.assert_same(alone[1], shared[1], 1e-12)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("model", "shape", "schedule"),
    [
        (mlp, (4,), "1f1b"),
        (mlp, (4,), "2bw"),
        *deep((unet, (2, 8, 8), "1f1b"), (unet, (2, 8, 8), "2bw")),
        *deep((transformer, (5, 8), "1f1b"), (transformer, (5, 8), "2bw")),
    ],
)
def test_another_size_keeps_stages_optimizers_and_the_program(
    traces: list[str], model: Callable[[], nn.Module], shape: tuple[int, ...], schedule: str
) -> None:
    torch.manual_seed(0)
    net = model().double()
    with compiled(net, schedule=schedule, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)) as pipe:
        found = []
        for samples in (8, 10, 8, 6):
            x, y = batch(samples, *shape)
            pipe.step(x, target=y)
            held = [[a.target for a in stage.parameters] for stage in pipe.plan.stages]
            found.append((held, list(made_by(pipe)), pipe.program))
        assert traces == ["4", "any"]
        for held, optimizers, program in found[1:]:
            assert held == found[0][0]
            assert all(a is b for a, b in zip(optimizers, found[0][1], strict=True))
            assert program is found[0][2]


class Told(nn.Module):
    """Returns what a graph for one size does not tell the batch of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x).tanh())
        return {
            "y": y,
            "turned": y.T,
            "table": self.table * 2,  # as many rows as a micro-batch
            "samples": x.shape[0],
            "columns": x.shape[1],
            "text": "y",
        }


def _told(output: dict[str, Any], target: Tensor) -> Tensor:
    value: Tensor = mse_loss(output["y"], target) + output["table"].square().mean()
    return value


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [(8, 8), (8, 10, 8), (7, 8), (2,)])
def test_outputs_are_joined_along_the_batch(
    traces: list[str], samples: Sequence[int], training: bool
) -> None:
    model = Told().double().train(training)
    with compiled(model, loss=_told) as pipe:
        for count in samples:
            x, y = batch(count)
            expected = model(x)
            for output in (pipe.step(x, target=y, return_output=True)[1], pipe(x)):
                assert output.keys() == expected.keys()
                for name in ("y", "turned", "table"):
                    torch.testing.assert_close(output[name], expected[name])
                assert (output["samples"], output["columns"], output["text"]) == (count, 4, "y")
    assert len(traces) <= 4  # a step and a call, each for one size and for any


class Strict(nn.Module):
    """Takes no zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not x.any():
            raise ValueError("zeros")
        h = self.first(x).tanh().reshape(x.shape[0] * 2, 2)
        y: Tensor = self.second(h.reshape(x.shape[0], 4))
        return y


def test_a_model_that_takes_no_zeros_is_trained_in_its_one_size() -> None:
    with compiled(Strict().double()) as pipe:
        for _ in range(2):
            x, y = batch(8)
            pipe.step(x, target=y)


def test_no_batch_is_kept() -> None:
    model = mlp().double()
    with compiled(model) as pipe:
        for outputs, count in product((False, True), (8, 10)):
            x, y = batch(count)
            x = x.clone()
            kept = weakref.ref(x), weakref.ref(x.untyped_storage())
            pipe.step(x, target=y, return_output=outputs)
            del x, y
            gc.collect()
            assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize("sizes", [(8, 10), (10, 8), (7, 8)])
def test_a_checkpoint_goes_on_with_another_first_size(
    tmp_path: Any, sizes: tuple[int, int]
) -> None:
    def started(net: nn.Module) -> fxpipe.Pipeline:
        return compiled(net, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))

    def step(pipe: fxpipe.Pipeline, samples: int) -> Tensor:
        x, y = batch(samples)
        made: Tensor = pipe.step(x, target=y)
        return made

    nets = [mlp().double() for _ in range(2)]
    with started(nets[0]) as pipe:
        step(pipe, sizes[0])
        pipe.checkpoint(tmp_path / "run")
        expected = [step(pipe, size) for size in (sizes[1], sizes[0])]
    with started(nets[1]) as pipe:
        pipe.restore(tmp_path / "run")
        assert [step(pipe, size) for size in (sizes[1], sizes[0])] == expected
    loop.assert_same(nets[1].state_dict(), nets[0].state_dict())


class Last(nn.Module):
    """The logits of each sample at a position of its own, for which the export fixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, words: Tensor, at: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.embedding(words).relu())
        return logits.take_along_dim(at[:, None, None], 1).squeeze(1)


@pytest.mark.traces
def test_an_output_is_joined_where_a_graph_for_other_lengths_fixes_the_batch() -> None:
    model = Last().double().eval()
    with fxpipe.compile(model, 2, microbatches=2) as pipe, torch.no_grad():
        for length in (6, 1, 4, 1):
            words, at = torch.randint(9, (8, length)), torch.full((8,), length - 1)
            torch.testing.assert_close(pipe(words, at), model(words, at))
