"""Random operations are functions of a seed and their number, wherever they run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

import fxpipe
from fxpipe import random
from fxpipe.errors import TraceError
from fxpipe.ir.traced import SEED, Traced
from tests.helpers.draws import Draws, drawn
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    run_graph,
    run_plan,
    whole,
)
from tests.helpers.profiles import some


@functools.cache
def ones(function: Callable[[Tensor], Any]) -> Traced:
    """The function's graph for ones; it is traced once for all tests."""
    return front_end(Draws(function), torch.ones(50, 4))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "dropout1d": lambda x: nn.functional.dropout1d(x[..., None], 0.3),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.3, training=True),
    "rand": lambda x: torch.rand(x.shape[0], 4),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape[0], 4),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, 9, (x.shape[0], 4)),
    "randint from 0": lambda x: torch.randint(9, (x.shape[0], 4)),
    "bernoulli of chances": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "randperm": lambda x: torch.randperm(100),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x),
    "normal of a size": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 4)),
    "normal in place": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(1.0, 2.0),
    "exponential in place": lambda x: torch.empty_like(x).exponential_(),
    "gumbel softmax": nn.functional.gumbel_softmax,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like from 3": lambda x: torch.randint_like(x, 3, 9),
    "randint_like of a tensor": lambda x: torch.randint_like(x, torch.tensor(9)),
    "integers in place": lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    "numbers that count, in place": lambda x: torch.empty_like(x).random_(),
    "integers below 9 in place": lambda x: torch.empty_like(x).random_(9),
    "bernoulli of chances in place": lambda x: torch.empty_like(x).bernoulli_(x * 0.3),
    "bernoulli of a row of chances in place": lambda x: torch.empty_like(x).bernoulli_(
        torch.full((4,), 0.3)
    ),
    "log normal in place": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy in place": lambda x: torch.empty_like(x).cauchy_(),
    "geometric in place": lambda x: torch.empty_like(x).geometric_(0.2),
    "geometric integers in place": lambda x: torch.empty_like(x, dtype=torch.int64).geometric_(0.2),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "multinomial of a row": lambda x: torch.multinomial(torch.ones(50), 9, replacement=True),
    "poisson": lambda x: torch.poisson(x * 5),
}

operations = pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS.keys())
some_operations = pytest.mark.parametrize("function", some(OPERATIONS.values()))


@operations
def test_a_draw_is_a_function_of_the_seed(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(50, 4)
    model, traced = Draws(function), ones(function)
    first = run_graph(model, traced, x, seed=5)[0]
    torch.rand(7)  # whatever else draws
    run_graph(model, traced, x, seed=6)
    torch.manual_seed(3)
    assert torch.equal(run_graph(model, traced, x, seed=5)[0], first)
    assert not torch.equal(run_graph(model, traced, x, seed=6)[0], first)


@operations
def test_draws_leave_torchs_generator_alone(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(50, 4)
    before = torch.get_rng_state()
    run_graph(Draws(function), ones(function), x)
    assert torch.equal(torch.get_rng_state(), before)


@some_operations
def test_two_draws_of_one_graph_differ_and_depend_on_nothing_else_in_it(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.ones(50, 4)
    one, _, two = drawn(lambda x: (function(x), x.exp().sum(), function(x)), x)
    assert torch.equal(run_graph(Draws(function), ones(function), x)[0], one)
    assert not torch.equal(one, two)


@some_operations
def test_shapes_and_types_are_torchs(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(50, 4)
    double = drawn(function, x.double()), function(x.double())
    for here, there in (double, (run_graph(Draws(function), ones(function), x)[0], function(x))):
        assert (here.shape, here.dtype, here.stride()) == (there.shape, there.dtype, there.stride())


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kept: Tensor, scale: float
) -> Tensor:
    """Attention in plain loops over batch and heads, with a mask of kept weights."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:-1])).tolist():
        *batch, row = at
        group = q.shape[-3] // k.shape[-3]
        held = (*batch[:-1], batch[-1] // group)
        scores = (k[held] @ q[tuple(at)]) * scale
        if mask is not None:
            here = mask.expand(*q.shape[:-1], k.shape[-2])[tuple(at)]
            scores = (
                torch.where(here, scores, -math.inf) if here.dtype == torch.bool else scores + here
            )
        if causal:
            scores = torch.where(torch.arange(len(scores)) <= row, scores, -math.inf)
        out[tuple(at)] = (scores.softmax(0) * kept[tuple(at)]) @ v[held]
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.eye(5).bool().logical_not()},
        {"attn_mask": torch.linspace(-2, 2, 25, dtype=torch.float64).reshape(5, 5)},
        {"enable_gqa": True},
        {"enable_gqa": True, "is_causal": True, "scale": 2.0},
    ],
    ids=str,
)
def test_attention_with_dropout_is_the_formula(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in options else 4
    q = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    k, v = torch.randn(2, 3, heads, 5, 6, dtype=torch.float64)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, dropout_p=0.4, **options)

    model = Attention()
    traced = front_end(model, q, k, v)
    assert traced.seeded
    here = run_graph(model, traced, q, k, v, seed=9)[0]
    weights = torch.ones(3, 4, 5, 5, dtype=torch.float64)
    kept, _ = random.native_dropout(weights, 0.4, True, torch.tensor(9), 0)
    there = formula(
        q,
        k,
        v,
        options.get("attn_mask"),
        options.get("is_causal", False),
        kept,
        options.get("scale", 1 / math.sqrt(6)),
    )
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [torch.ones(3, 3).bool(), torch.zeros(3, 3)], ids=str)
def test_attention_to_no_key_is_zero_as_in_torch_and_so_are_its_gradients(mask: Tensor) -> None:
    mask[1] = False if mask.dtype == torch.bool else -math.inf

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return attend(h, h, h, attn_mask=mask, dropout_p=0.2)

    model, x = Attention(), torch.randn(1, 2, 3, 4)
    traced = front_end(model, x)
    ran = run_plan(model, traced, differentiated(model, traced, whole(traced), x), x, seed=4)
    made = run_graph(model, traced, x, seed=4)[0]
    assert torch.equal(made[:, :, 1], torch.zeros(1, 2, 4))
    assert all(gradient.isfinite().all() for gradient in (made, *ran.gradients.values()))


def test_attention_in_half_precision_scales_before_it_multiplies() -> None:
    q = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)
    seed = torch.tensor(0)
    here = random.attention(q, q, q, None, 0.5, False, None, False, seed, 0)
    kept, _ = random.native_dropout(torch.full((1, 1, 4, 4), 0.25), 0.5, True, seed, 0)
    torch.testing.assert_close(here, kept.half() @ q)


def test_attention_without_dropout_stays_torchs_own() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q, is_causal=True)

    q = torch.randn(3, 4, 5, 6)
    traced = front_end(Attention(), q)
    assert not traced.seeded
    assert torch.equal(run_graph(Attention(), traced, q)[0], attend(q, q, q, is_causal=True))


@torch.library.custom_op(
    "fxpipe_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_dropout_between_the_layers_of_one_lstm_takes_the_seed() -> None:
    model, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5), torch.randn(5, 3, 3)
    traced = front_end(model, x)
    assert traced.seeded
    one, again, other = (run_graph(model, traced, x, seed=seed)[0][0] for seed in (4, 4, 5))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not front_end(model.eval(), x).seeded


@pytest.mark.parametrize(
    ("function", "name"),
    [(noise, r"fxpipe_tests\.noise"), (torch._standard_gamma, r"aten\._standard_gamma")],
)
def test_an_operation_without_a_seeded_form_is_refused_by_name(
    function: Callable[[Tensor], Tensor], name: str
) -> None:
    with pytest.raises(TraceError, match=rf"random operation {name}.*torch\.rand"):
        front_end(Draws(function), torch.rand(5, 4))


def test_a_graph_without_random_operations_is_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU())
    traced = front_end(model, torch.randn(3, 4))
    assert not traced.seeded
    assert all(node.name != SEED for node in traced.graph.nodes)


def test_evaluation_draws_nothing() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True)
    model = nn.Sequential(layer, nn.Dropout(0.5)).eval()
    x = torch.randn(3, 5, 8)
    traced = front_end(model, x)
    assert not traced.seeded
    torch.testing.assert_close(run_graph(model, traced, x)[0], model(x))


def test_backward_uses_the_masks_of_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4, bias=False))
    x = torch.randn(5, 4)
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x)
    ran = run_plan(model, traced, plan, x, seed=4)
    kept, _ = random.native_dropout(torch.ones(5, 6), 0.5, True, torch.tensor(4), 0)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers[2](self.layers[0](x) * kept)
            return y

    expected = {n.removeprefix("layers."): g for n, g in Answer(Masked(), x).gradients.items()}
    assert sorted(ran.gradients) == sorted(expected)
    for name, gradient in ran.gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_gradients_flow_through_chances_as_in_torch() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.bernoulli(x.sigmoid()) * x + torch.rand_like(x) * x.exp()

    model = nn.Sequential(nn.Linear(4, 4), Draws(function))
    x = torch.randn(5, 4)
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x)
    again = [run_plan(model, traced, plan, x, seed=4).gradients for _ in range(2)]
    assert_equal(*again)
    assert set(again[0]) == {"0.weight", "0.bias"}


def test_an_input_may_be_called_seed() -> None:
    class Seeded(nn.Module):
        def forward(self, x: Tensor, seed: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) * seed

    x, seed = torch.ones(50, 4), torch.full((50, 4), 3.0)
    traced = front_end(Seeded(), x, seed)
    assert set(run_graph(Seeded(), traced, x, seed)[0].unique().tolist()) == {0.0, 6.0}


def test_the_model_and_the_loss_draw_apart() -> None:
    def loss(y: Tensor) -> Tensor:
        return (torch.rand_like(y) - y).abs().mean()

    model = nn.Sequential(nn.Linear(4, 4), Draws(lambda x: torch.rand_like(x) + 0 * x))
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=loss, partition=["1"]) as pipe:
        torch.manual_seed(0)
        first = pipe.step(torch.ones(40, 4))
        assert float(first) > 0.1  # one and the same draw would give 0
        torch.manual_seed(0)
        assert torch.equal(pipe.step(torch.ones(40, 4)), first)


def test_what_is_compiled_is_checked_with_the_same_draws_as_the_models() -> None:
    def every(x: Tensor) -> Tensor:
        chances = x.sigmoid()
        made = [function(chances).to(x.dtype).mean() for function in OPERATIONS.values()]
        return x * torch.stack(made).sum()

    model = nn.Sequential(nn.Linear(4, 4), Draws(every), nn.Linear(4, 1))
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=lambda y: y.mean()) as pipe:
        torch.manual_seed(0)
        first = pipe.step(torch.ones(8, 4))
        torch.manual_seed(0)
        assert torch.equal(pipe.step(torch.ones(8, 4)), first)
