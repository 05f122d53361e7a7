"""Inputs, targets and outputs whose batch is not dimension 0, or that have none."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError
from tests.oracles import loop


class Net(nn.Module):
    """Takes (time, batch, 4), a table without batch, and returns outputs laid out differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, more: Any = None) -> dict[str, Any]:
        h = self.first(x).tanh() + table.mean(0)
        if more is not None:
            h = h + more["rows"][0]
        y = self.second(h)
        return {
            "y": y,
            "turned": y.transpose(0, 1),
            "last": y.permute(0, 2, 1)[0],
            "positive": y.argmax(2) > 1,
            "samples": x.shape[1],
            "time": x.shape[0],
            "mean": h.mean(),
        }


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return mse_loss(output["y"], target)


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    dims = {"x": 1, "table": None, "more": -2, "target": 1}
    return fxpipe.compile(
        model, ["cpu"] * 2, **{"microbatches": 3, "loss": loss, "batch_dims": dims, **options}
    )


def inputs(samples: int, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Any], Tensor]:
    """x, a table of 7 rows, which may well be as many as samples, a nested input, the target."""
    torch.manual_seed(seed)
    x, target = torch.randn(2, 5, samples, 4, dtype=torch.float64).unbind()
    more = {"rows": [torch.randn(5, samples, 4, dtype=torch.float64), None]}
    return x, torch.randn(7, 4, dtype=torch.float64), more, target


def test_a_step_splits_and_joins_along_the_dimension_that_is_the_batch() -> None:
    torch.manual_seed(0)
    model = Net().double()
    alone = copy.deepcopy(model)
    with compiled(model) as pipe:
        for seed, samples in enumerate((7, 6, 11)):
            loop.clear(model, alone)
            x, table, more, target = inputs(samples, seed)
            made, output = pipe.step(x, table, more, target=target, return_output=True)
            whole = alone(x, table, more)
            expected = loss(whole, target)
            expected.backward()
            torch.testing.assert_close(made, expected.detach())
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)
            assert output.keys() == whole.keys()
            for name in ("y", "turned", "last", "positive", "mean"):
                torch.testing.assert_close(output[name], whole[name].detach())
            assert (output["samples"], output["time"]) == (samples, 5)
        graphs = [graph.traced for graph in pipe._compiler.memo.values("graph")]
        assert len({id(graph.of) for graph in graphs}) == 1  # dynamic along that dimension


def test_a_call_gives_inputs_their_gradients_along_the_same_dimension() -> None:
    torch.manual_seed(0)
    model = Net().double()
    alone = copy.deepcopy(model)
    x, table, more, target = inputs(7)
    leaves = [x, table, more["rows"][0]]
    with compiled(model) as pipe:
        found = []
        for call in (pipe, alone):
            for leaf in leaves:
                leaf.requires_grad_().grad = None
            output = call(x, table, more)
            (mse_loss(output["turned"], target.transpose(0, 1)) + output["last"].sum()).backward()
            found.append({str(i): leaf.grad for i, leaf in enumerate(leaves)})
    loop.assert_same(found[0], found[1], 1e-12)
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_inputs_need_not_lie_as_their_shape_says() -> None:
    torch.manual_seed(0)
    model = Net().double()
    alone = copy.deepcopy(model)
    x, table, more, target = inputs(7)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    with compiled(model) as pipe:
        made = [pipe.step(value, table, more, target=target) for value in (x, other)]
        assert torch.equal(made[0], made[1])
    torch.testing.assert_close(made[0], loss(alone(x, table, more), target).detach())


@dataclass
class Pair:
    left: Tensor
    right: Tensor | None = None
    scale: float = 1.0


def test_a_dataclass_is_an_input_like_any_nest() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, pair: Pair) -> Tensor:
            h = self.first(pair.left).tanh() * pair.scale
            y: Tensor = self.second(h if pair.right is None else h + pair.right.T)
            return y

    torch.manual_seed(0)
    model = Takes().double()
    alone = copy.deepcopy(model)
    pair = Pair(torch.randn(7, 4).double(), torch.randn(4, 7).double(), 0.5)
    target = torch.randn(7, 4).double()
    with fxpipe.compile(
        model, ["cpu"] * 2, microbatches=3, loss=mse_loss, batch_dims={"pair.right": 1}
    ) as pipe:
        made = pipe.step(pair, target=target)
    expected = mse_loss(alone(pair), target)
    expected.backward()
    torch.testing.assert_close(made, expected.detach())
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


class Pairwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.first(x).tanh())
        return y, y @ y.T


def test_an_output_with_the_batch_in_two_dimensions_is_not_joined() -> None:
    x = torch.randn(6, 4)
    with fxpipe.compile(
        Pairwise(), ["cpu"] * 2, microbatches=3, loss=lambda output, y: mse_loss(output[0], y)
    ) as pipe:
        pipe.step(x, target=x)
        with pytest.raises(InputError, match="output 1 has the batch in dimensions 0 and 1"):
            pipe.step(x, target=x, return_output=True)


def test_a_loss_within_a_micro_batch_may_compare_its_samples() -> None:
    def within(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return mse_loss(output[1], torch.eye(len(y), dtype=torch.float64)) + output[0].mean()

    torch.manual_seed(0)
    model = Pairwise().double()
    alone = copy.deepcopy(model)
    x = torch.randn(7, 4).double()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=within) as pipe:
        made = pipe.step(x, target=x)
    assert torch.equal(made, loop.train(alone, 3, x, loss=within, target=x).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize(
    ("dims", "part"),
    [
        (1, "batch_dims is 1; give a dict from names of inputs to a dimension or None"),
        ({"x": 1.0}, "batch_dims has 'x': 1.0; give a dict"),
        ({"x": True}, "batch_dims has 'x': True; give a dict"),
        ({0: 1}, "batch_dims has 0: 1; give a dict"),
        ({"tabel": None}, "'tabel', which is no input of Net.forward: did you mean 'table'"),
        ({"targets": 1}, "'targets', which is no input of Net.forward: did you mean 'target'"),
    ],
    ids=["number", "float", "bool", "key", "input", "target"],
)
def test_what_names_no_input_or_dimension_is_refused(dims: Any, part: str) -> None:
    with pytest.raises(InputError) as raised:
        compiled(Net(), batch_dims=dims)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("dims", "part"),
    [
        ({"x": 3}, "batch_dims says 3 for 'x' and x has 3 dimensions; give one that it has"),
        ({"x": -4}, "batch_dims says -4 for 'x' and x has 3 dimensions"),
        ({"x": 0, "target": 1}, "x has 5, table has 7, more['rows'][0] has 5, target has 7"),
        ({"x": None, "table": None, "more": None, "target": None}, "no input is a tensor with"),
    ],
    ids=["too far", "too far back", "sizes", "none"],
)
def test_dimensions_that_do_not_fit_the_call_are_refused(dims: Any, part: str) -> None:
    x, table, more, target = inputs(7)
    with compiled(Net().double(), batch_dims=dims) as pipe, pytest.raises(InputError) as raised:
        pipe.step(x, table, more, target=target)
    assert part in str(raised.value)


class Free(nn.Module):
    """Its signature does not say what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, **given: Any) -> Tensor:
        h: Tensor = self.second(self.first(given["rows"]["x"]).tanh())
        return h if given.get("more") is None else h + given["more"]


@pytest.mark.parametrize(
    ("dims", "part"),
    [
        (
            {"x": 1},
            "batch_dims names 'x', and the call has no such input (where it is optional, give",
        ),
        ({"row": 1}, "optional, give it as None): did you mean 'rows'"),
        ({"rows['y']": 1}, "batch_dims names \"rows['y']\", and the call has no such input"),
        ({"rows": 1, "target[1]": 1}, "batch_dims names 'target[1]', and the call has no such"),
        ({"rows": 1, "more": 1, "target": 1}, "batch_dims names 'more', and the call has no such"),
    ],
    ids=["unlike", "near", "part", "target", "left out"],
)
def test_a_name_of_nothing_in_the_call_is_refused_by_that_name(dims: Any, part: str) -> None:
    x = torch.randn(3, 6, 4)
    for target in (x, x.transpose(0, 1)):  # also where the sizes disagree
        with (
            fxpipe.compile(Free(), ["cpu"], microbatches=3, loss=mse_loss, batch_dims=dims) as pipe,
            pytest.raises(InputError) as raised,
        ):
            pipe.step(rows={"x": x}, target=target)
        assert part in str(raised.value)


def test_what_is_given_as_none_or_declared_and_left_out_may_be_named() -> None:
    torch.manual_seed(0)
    model = Free().double()
    alone = copy.deepcopy(model)
    dims = {"rows['x']": 1, "more": 1, "more['left']": 1, "target": 1}
    x, y = torch.randn(2, 3, 7, 4).double()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=mse_loss, batch_dims=dims) as p:
        made = p.step(rows={"x": x}, more=None, target=y)
        torch.testing.assert_close(p(rows={"x": x}, more=None), alone(rows={"x": x}))
    torch.testing.assert_close(made, mse_loss(alone(rows={"x": x}), y).detach())
    x, table, _, target = inputs(6)
    with compiled(Net().double()) as pipe:  # whose signature has "more"
        pipe.step(x, table, target=target)
