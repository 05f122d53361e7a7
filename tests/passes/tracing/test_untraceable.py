"""A model that cannot be traced is refused: the line, the construct and the way out are told."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

import fxpipe
from fxpipe.errors import TraceError
from tests.helpers.around import Around
from tests.oracles import loop


class Inner(nn.Module):
    """Any function, with a counter, a list, a dict and a place for a tensor."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        self.count = 0
        self.log: list[int] = []
        self.table: dict[str, int] = {}
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return self.function(self, y)


def compiled(model: nn.Module, extensions: Any = (), **options: Any) -> None:
    x = torch.randn(8, 4)
    fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=2,
        loss=mse_loss,
        extensions=extensions,
        example=((x,), {"target": x}),
        **options,
    ).close()


def branches(self: Inner, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y  # here


def loops(self: Inner, y: Tensor) -> Tensor:
    while y.abs().sum() > 1:  # here
        y = y / 2
    return y


def array(self: Inner, y: Tensor) -> Tensor:
    return y + torch.from_numpy(y.detach().numpy())  # here


def counts(self: Inner, y: Tensor) -> Tensor:
    self.count += 1  # here
    return y * self.count


def following(number: int) -> int:
    return number + 1


def counts_by_another(self: Inner, y: Tensor) -> Tensor:
    self.count = following(self.count)  # here
    return y * self.count


def appends(self: Inner, y: Tensor) -> Tensor:
    self.log.append(1)  # here
    return y * len(self.log)


def tabulates(self: Inner, y: Tensor) -> Tensor:
    self.table[f"call {len(self.table)}"] = 1  # here
    return y * len(self.table)


def remembers(self: Inner, y: Tensor) -> Tensor:
    z = y if self.kept is None else y + self.kept
    self.kept = z.detach()  # here
    return z


def rolls(self: Inner, y: Tensor) -> Tensor:
    return y * random.random()  # here


def rolls_numpy(self: Inner, y: Tensor) -> Tensor:
    return y * float(numpy.random.rand())  # here


CALLS = [0]


def counts_outside(self: Inner, y: Tensor) -> Tensor:
    CALLS[0] += 1
    return y * CALLS[0]


@pytest.mark.parametrize(
    ("function", "construct"),
    [
        (branches, "what it computes depends on the values of a tensor"),
        (loops, "what it computes depends on the values of a tensor"),
        (array, "it makes a NumPy array of a tensor"),
    ],
)
def test_a_refusal_shows_the_line_the_construct_and_the_way_out(
    function: Callable[[Any, Tensor], Tensor], construct: str
) -> None:
    with pytest.raises(TraceError) as caught:  # in a submodule, it would be called as it is
        compiled(Inner(function))
    message = str(caught.value)
    assert "Inner cannot be traced at" in message
    assert f"{__file__}:" in message
    assert f"# here ({construct}" in message
    assert "fxpipe.LeafModules(" in message


@pytest.mark.parametrize(
    ("function", "construct"),
    [
        (counts, "a mutation of Python state: every call changes Inner.count"),
        (counts_by_another, "a mutation of Python state: every call changes Inner.count"),
        (appends, "a mutation of Python state: every call changes Inner.log"),
        (tabulates, "a mutation of Python state: every call changes Inner.table"),
        (remembers, "a mutation of Python state: every call changes Inner.kept"),
    ],
)
def test_an_attribute_that_every_run_changes_is_refused_by_name(
    function: Callable[[Any, Tensor], Tensor], construct: str
) -> None:
    with pytest.raises(TraceError) as caught:
        compiled(Around(Inner(function)))
    message = str(caught.value)
    assert f"Around cannot be traced at Inner.{construct.rpartition('.')[2]} (" in message
    assert construct in message
    assert "fxpipe.LeafModules('inner')" in message


@pytest.mark.parametrize(
    ("function", "generator"), [(rolls, "Python's random"), (rolls_numpy, "numpy.random")]
)
@pytest.mark.parametrize("leaves", [[], ["inner"]])
def test_a_model_that_draws_from_pythons_generators_is_refused_by_their_name(
    function: Any, generator: str, leaves: list[str]
) -> None:
    message = rf"Around cannot be traced at a line that draws from {generator}.*with torch.rand"
    model = Around(nn.Sequential(Inner(function)))
    with pytest.raises(TraceError, match=message):
        compiled(model, [fxpipe.LeafModules(*leaves)])


def test_a_graph_that_keeps_what_each_run_counts_is_refused() -> None:
    with pytest.raises(TraceError, match=r"does not compute what .* such as a counter"):
        compiled(Around(Inner(counts_outside)))


@pytest.mark.parametrize("function", [branches, loops, array, counts, appends, remembers])
def test_the_way_out_leads_out(function: Any) -> None:
    inner = Inner(function)
    if function in (array, remembers):
        # what it computes differs from call to call, so that it cannot be compared with itself
        inner.requires_grad_(False)
        if function is not array:
            pytest.skip("the check of the graph would see another result")
    if function in (counts, appends):
        inner.function = lambda self, y: (function(self, y), y)[1]
    compiled(Around(inner), [fxpipe.LeafModules("inner")])


def test_what_is_made_once_is_no_change() -> None:
    def makes(self: Inner, y: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(4.0)
            self.table["width"] = 4
        return y + self.kept

    compiled(Around(Inner(makes)))


def test_random_generators_are_as_before() -> None:
    def draws(self: Inner, y: Tensor) -> Tensor:
        return y * random.random()

    before = random.getstate()
    with pytest.raises(TraceError, match="draws from Python's random"):
        compiled(Inner(draws))
    assert random.getstate() == before


def test_an_index_by_tensors_depends_on_no_values_in_its_shape() -> None:
    def picks(self: Inner, y: Tensor) -> Tensor:
        return y[:, torch.tensor([3, 1, 2, 0])]

    compiled(Around(Inner(picks)))


class Gates(nn.Module):
    """Leaves an auxiliary loss on a submodule, or returns it."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.gate, self.expert, self.returns = nn.Linear(4, 4), nn.Linear(4, 4), returns
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        auxiliary, y = scores.square().mean(), self.expert(x) * scores
        if self.returns:
            return y, auxiliary
        self.auxiliary = auxiliary
        return y


def test_an_auxiliary_loss_that_is_an_output_is_trained() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    returned = Gates(True)
    alone = copy.deepcopy(returned)

    def loss(output: Any, y: Tensor) -> Tensor:
        total: Tensor = mse_loss(output[0], y) + output[1]
        return total

    with fxpipe.compile(returned, 2, microbatches=2, loss=loss) as pipe:
        assert pipe.step(x, target=x) == loop.train(alone, 2, x, loss=loss, target=x).loss
    loop.assert_same(loop.gradients(returned), loop.gradients(alone))


def test_one_pipe_alternates_between_losses_of_the_same_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, 2, microbatches=2) as pipe:
        for loss in (mse_loss, l1_loss, mse_loss):
            loss(pipe(x), x).backward()
            loss(torch.cat([alone(part) for part in x.split(2)]), x).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
