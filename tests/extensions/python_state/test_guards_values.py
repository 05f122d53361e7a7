"""What a graph holds as a plain number counts: values of tensors, made names, an order of keys."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop

pytestmark = pytest.mark.traces

GAIN = torch.ones(())


class Gained(nn.Module):
    """Scales by a number that it has in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gain = torch.ones(())  # no buffer
        self.gains = [torch.ones(2)]
        vars(self.gains[0])["scale"] = 1.0
        self.factor_1 = 1.0
        self.table = {"a": 1.0, "b": 2.0}
        self.parts = nn.ModuleDict({"tanh": nn.Tanh(), "sigmoid": nn.Sigmoid()})

    def gained(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.gained(self.first(x)))
        return made


class AsFloat(Gained):
    def gained(self, x: Tensor) -> Tensor:
        return x * float(self.gain)


class AsGlobal(Gained):
    def gained(self, x: Tensor) -> Tensor:
        return x * GAIN.item()


class AsLimit(Gained):
    def gained(self, x: Tensor) -> Tensor:
        return x.clamp(max=self.gain.item() / 2)


class AsList(Gained):
    def gained(self, x: Tensor) -> Tensor:
        made: Tensor = x * self.gains[0].tolist()[1]
        return made


class AsText(Gained):
    def gained(self, x: Tensor) -> Tensor:
        return x * (2 if str(self.gain) == "tensor(1.)" else 3)


class OfATensor(Gained):
    def gained(self, x: Tensor) -> Tensor:
        made: Tensor = x * self.gains[0].scale  # type: ignore[attr-defined]
        return made


class ByAddedName(Gained):
    def gained(self, x: Tensor) -> Tensor:
        made: Tensor = x * getattr(self, "factor_" + str(1))
        return made


class ByFormattedName(Gained):
    def gained(self, x: Tensor) -> Tensor:
        made: Tensor = x * getattr(self, "factor_{}".format(len(self.gains)))  # noqa: UP032
        return made


class ByNamesInside(Gained):
    def gained(self, x: Tensor) -> Tensor:
        made: Tensor = x * max(getattr(self, "factor_" + letter) for letter in "1")
        return made


class ByOrder(Gained):
    def gained(self, x: Tensor) -> Tensor:
        return x * next(iter(self.table.values()))


class ByOrderOfModules(Gained):
    def gained(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def _reverse(values: Any) -> None:
    first = next(iter(values))
    values[first] = values.pop(first)


CASES: dict[type[Gained], Callable[[Any], Any]] = {
    AsFloat: lambda model: model.gain.fill_(2.0),
    AsGlobal: lambda model: GAIN.fill_(2.0),
    AsLimit: lambda model: model.gain.fill_(0.2),
    AsList: lambda model: model.gains[0].fill_(2.0),
    AsText: lambda model: model.gain.fill_(2.0),
    OfATensor: lambda model: setattr(model.gains[0], "scale", 2.0),
    ByAddedName: lambda model: setattr(model, "factor_1", 2.0),
    ByFormattedName: lambda model: setattr(model, "factor_1", 2.0),
    ByNamesInside: lambda model: setattr(model, "factor_1", 2.0),
    ByOrder: lambda model: _reverse(model.table),
    ByOrderOfModules: lambda model: _reverse(model.parts),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plain_number_that_a_graph_holds_counts_from_the_next_step_on(case: type[Gained]) -> None:
    GAIN.fill_(1.0)
    torch.manual_seed(0)
    model = case()
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        microbatches=2,
        loss=F.cross_entropy,
        partition=["last"],
    ) as pipe:
        before = pipe.step(x, target=target)
        CASES[case](model)
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=target)
    expected = loop.train(alone, 2, x, loss=F.cross_entropy, target=target)
    assert torch.equal(made, expected.loss)
    assert not torch.equal(made, before)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_number_of_a_tensor_that_comes_back_has_its_graphs_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = AsFloat()
    x = torch.ones(4, 4)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2) as pipe,
        torch.no_grad(),
    ):
        for gain in (1.0, 2.0, 1.0, 2.0):
            model.gain.fill_(gain)
            assert torch.equal(pipe(x), model(x))
    assert caplog.text.count("anew") == 1
    assert "AsFloat is traced anew, as what model.gain holds has changed" in caplog.text
