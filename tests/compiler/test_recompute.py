"""Recomputation: the same gradients, masks and statistics, and less that is kept."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.recipe import RECIPES, find_recipe
from fxpipe.kernels.recompute import fingerprint
from fxpipe.passes.schedule import add_recompute
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return UNet(channels=1, base=4, depth=2), torch.randn(7, 1, 16, 16), torch.randn(7, 1, 16, 16)


@pytest.mark.parametrize(
    ("schedule", "recompute", "kept"),
    [
        ("gpipe", "never", [3, 3]),
        ("gpipe", "always", [1, 1]),
        ("gpipe", "except_last", [2, 2]),
        ("gpipe", ["always", "never"], [1, 3]),
        ("gpipe", {1: "always"}, [3, 1]),
        ("1f1b", "always", [1, 1]),
        ("zb-h1", "except_last", None),
        ("interleaved-1f1b", "always", None),
    ],
)
def test_what_runs_again_gives_the_same_gradients_and_counts_once(
    schedule: str, recompute: Any, kept: list[int] | None
) -> None:
    model, x, y = unet()
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 3, x, loss=nn.functional.mse_loss, target=y)
    with fxpipe.compile(
        model,
        2,
        schedule=schedule,
        microbatches=3,
        recompute=recompute,
        loss=nn.functional.mse_loss,
    ) as pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
        if kept is not None:
            assert [pipe.stashed[stage] for stage in range(2)] == kept
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


def test_a_call_that_is_differentiated_recomputes_too() -> None:
    model, *given = unet()
    x, y = (each.double() for each in given)
    alone = copy.deepcopy(model.double())
    loop.train(alone, 3, x, loss=nn.functional.mse_loss, target=y)
    with fxpipe.compile(model, 2, microbatches=3, recompute="always") as pipe:
        out = pipe(x)
        nn.functional.mse_loss(out, y).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_recomputation_reads_the_version_that_the_forward_read() -> None:
    model, data = make("mlp", 8, 5)
    expected = DelayedLoop.beside(model, ADAMW, 4)
    with compiled(model, 3, 4, ADAMW, recompute="always") as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        assert set(pipe.stashed.values()) == {1}
    expected.assert_same(model)


class Told(nn.Module):
    """A module with dropout that is called as it is, and writes down how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(fxpipe.is_recomputing())
        out: Tensor = self.drop(self.linear(x))
        return out


@pytest.mark.parametrize("tracer", ["export", "symbolic"])
def test_a_leaf_knows_that_it_runs_again_and_draws_the_same_mask(tracer: Any) -> None:
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        told = Told()
        model = nn.Sequential(nn.Linear(6, 6), told, nn.Linear(6, 2))
        x, y = torch.randn(6, 6), torch.randn(6, 2)
        with fxpipe.compile(
            model,
            2,
            microbatches=2,
            recompute=recompute,
            tracer=tracer,
            leaf_modules=[Told],
            loss=nn.functional.mse_loss,
        ) as pipe:
            pipe.prepare(x, target=y)
            told.calls.clear()
            torch.manual_seed(7)
            pipe.step(x, target=y)
        found.append(loop.gradients(model))
        assert sorted(told.calls) == (
            [False] * 2 if recompute == "never" else [False] * 2 + [True] * 2
        )
    loop.assert_same(found[1], found[0])
    assert not fxpipe.is_recomputing()


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"inference"}))
def test_every_schedule_of_the_library_can_recompute(name: str) -> None:
    for devices, microbatches in ((1, 1), (2, 3), (3, 2)):
        schedule = find_recipe(name)(devices, microbatches)
        again = add_recompute(schedule, ["always"] * schedule.stages)
        assert again.verify() is again
        kinds = [task.kind for row in again.rows for task in row]
        assert kinds.count("R") == microbatches * schedule.stages


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("allways", "there is no mode 'allways' of recompute: did you mean 'always'"),
        (True, "there is no mode True of recompute"),
        (["always"], "recompute has 1 modes for 2 stages"),
        ({3: "always"}, "recompute names stage 3; the stages are 0 to 1"),
        ({0: "often"}, "there is no mode 'often'"),
    ],
)
def test_a_wrong_mode_is_refused(recompute: Any, message: str) -> None:
    with pytest.raises(fxpipe.InputError, match=message):
        fxpipe.compile(nn.Sequential(nn.Linear(2, 2)), 2, recompute=recompute)


# recomputations that make something else


class Fickleness:
    """How much an operation adds, more at every call."""

    amount = 0.0
    calls = 0


@torch.library.custom_op("fxpipe_tests::fickle", mutates_args=())
def fickle(x: Tensor) -> Tensor:
    Fickleness.calls += 1
    return x + Fickleness.amount * Fickleness.calls


fickle.register_fake(lambda x: torch.empty_like(x))
fickle.register_autograd(lambda ctx, gradient: gradient)


class Fickle(nn.Module):
    """Three layers, with a fickle operation behind one of them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.drop = nn.Dropout(0.5)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.drop(torch.tanh(layer(x)))
            if index == self.at:
                x = fickle(x).sin()  # the line that is fickle
        return x


X, Y = torch.randn(6, 4), torch.randn(6, 4)


@pytest.fixture
def fickleness(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(Fickleness, "amount", 1e-6)


def rechecked(model: nn.Module, schedule: str = "1f1b", **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule=schedule,
        microbatches=3,
        partition=["layers.1"],
        loss=nn.functional.mse_loss,
        **{"recompute": "always", "recompute_check": True, **options},
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "2bw"])
@pytest.mark.parametrize(("at", "stage"), [(0, 0), (1, 1)])
def test_a_recomputation_that_makes_something_else_names_its_node(
    schedule: str, at: int, stage: int, fickleness: Callable[[], None]
) -> None:
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} if schedule == "2bw" else {}
    with rechecked(Fickle(at), schedule, **options) as pipe:
        pipe.step(X, target=Y)
        pipe.step(X, target=Y)  # as long as it makes the same, all is well
        pipe.flush()
        fickleness()
        with pytest.raises(fxpipe.ExecutionError) as raised:
            pipe.step(X, target=Y)
            pipe.flush()
    cause = raised.value.__cause__
    assert isinstance(cause, fxpipe.RecomputeError)
    assert raised.value.stage == stage
    text = str(cause)
    assert f"stage {stage} recomputes something else for micro-batch " in text
    assert "node " in text and "the line that is fickle" in text


@pytest.mark.parametrize(
    "options", [{"recompute": ["never", "always"]}, {"recompute_check": False}]
)
def test_what_is_not_recomputed_or_not_checked_may_be_fickle(
    options: dict[str, Any], fickleness: Callable[[], None]
) -> None:
    with rechecked(Fickle(0), **options) as pipe:
        pipe.prepare(X, target=Y)
        fickleness()
        pipe.step(X, target=Y)


def test_leaf_modules_are_checked_by_what_they_return(fickleness: Callable[[], None]) -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = fickle(x)
            return y

    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), leaf=Leaf(), last=nn.Linear(4, 4)))
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=3,
        partition=["last"],
        leaf_modules=["leaf"],
        loss=nn.functional.mse_loss,
        recompute="always",
        recompute_check=True,
    ) as pipe:
        pipe.step(X, target=Y)
        fickleness()
        with pytest.raises(fxpipe.ExecutionError, match="stage 0 recomputes something else"):
            pipe.step(X, target=Y)


@given(st.data())
def test_fingerprints_differ_where_a_bit_or_a_place_does(data: st.DataObject) -> None:
    dtype = data.draw(
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
        )
    )
    rows = data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = (torch.randn(rows, 4) > 0 if dtype is torch.bool else 9 * torch.randn(rows, 4)).to(dtype)
    same = x.clone().t().contiguous().t()  # laid out otherwise
    assert torch.equal(fingerprint(x), fingerprint(same))
    other = x.clone()
    place = data.draw(st.integers(0, 3))
    other[0, place] = ~x[0, place] if dtype is torch.bool else x[0, place] + 8
    assert not torch.equal(fingerprint(x), fingerprint(other))
    turned = x.roll(1, dims=1)
    assert torch.equal(x, turned) == torch.equal(fingerprint(x), fingerprint(turned))


def test_all_patterns_of_a_few_booleans_have_fingerprints_of_their_own() -> None:
    patterns = [*itertools.product((False, True), repeat=12)]
    assert len({fingerprint(torch.tensor(each)).item() for each in patterns}) == len(patterns)


def test_nothing_has_a_fingerprint_too() -> None:
    assert fingerprint(torch.empty(0, 3)).item() == 0
