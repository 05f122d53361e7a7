"""Attributes that each call sets before it reads them are in the graph, and cause no new one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

import fxpipe
from tests.oracles import loop


class Sets(nn.Module):
    """Sets an attribute anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.kept: Any = None

    def keep(self, hidden: Tensor) -> None:
        self.kept = hidden.square().mean()

    def read(self) -> Tensor:
        kept: Tensor = self.kept
        return kept

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.keep(hidden)
        y: Tensor = self.second(hidden)
        return y + self.read()


class FillsDict(Sets):
    """Has a dict that a hook fills."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}
        self.first.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.kept["first"] = output.mean()

    def keep(self, hidden: Tensor) -> None:
        pass

    def read(self) -> Tensor:
        kept: Tensor = self.kept["first"]
        return kept


class FillsList(Sets):
    """Has a list that each call empties and fills."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def keep(self, hidden: Tensor) -> None:
        self.kept.clear()
        self.kept.extend([hidden.mean(), hidden.square().mean()])

    def read(self) -> Tensor:
        kept: Tensor = sum(self.kept, torch.zeros(()))
        return kept


class Grows(FillsList):
    """Has a list that grows with every call."""

    def keep(self, hidden: Tensor) -> None:
        self.kept.append(hidden.mean())


class SetsInTraining(Sets):
    """Reads, in evaluation, what the last call of training has left."""

    def keep(self, hidden: Tensor) -> None:
        if self.training:
            super().keep(hidden)


class Adds(FillsDict):
    """Has a dict of which one entry is read before it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"first": torch.zeros(())}

    def hook(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.kept["first"] = self.kept["first"] + output.mean().detach()


def made(make: Callable[[], Sets]) -> Sets:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", [Sets, FillsDict, FillsList])
def test_they_cause_no_new_graph_and_one_warning(
    make: Callable[[], Sets], caplog: pytest.LogCaptureFixture
) -> None:
    model, alone = made(make), made(make)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(
            model, ["cpu"] * 2, partition=["second"], microbatches=2, loss=mse_loss
        ) as pipe,
    ):
        for size in (8, 8, 4, 8, 4):
            x, y = torch.randn(2, size, 4)
            expected = loop.train(alone, 2, x, loss=mse_loss, target=y)
            assert torch.equal(pipe.step(x, target=y), expected.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
            model.zero_grad()
            alone.zero_grad()
        with torch.no_grad():
            x = torch.randn(8, 4)
            expected_output = torch.cat([alone(part) for part in x.chunk(2)])
            assert torch.equal(pipe.eval()(x), expected_output)
    said = [record.getMessage() for record in caplog.records]
    assert sum("compiled" in text for text in said) == 3  # steps of two sizes, and the call
    assert not [text for text in said if "anew" in text or "itself" in text]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and f"sets {make.__name__}.kept in every call" in warnings[0]
    left = model.kept.values() if isinstance(model.kept, dict) else model.kept
    for tensor in [left] if isinstance(left, Tensor) else left:
        assert type(tensor) is Tensor and tensor.isfinite()  # none of a capture's, without data


@pytest.mark.parametrize("make", [Grows, Adds])
def test_what_an_earlier_call_has_left_is_refused(make: Callable[[], Sets]) -> None:
    x = torch.randn(8, 4)
    with (
        fxpipe.compile(made(make), ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe,
        pytest.raises(fxpipe.TraceError, match=rf"every call changes {make.__name__}\.kept"),
    ):
        pipe.step(x, target=x)


def test_what_calls_of_another_mode_set_is_refused_where_it_is_read() -> None:
    x = torch.randn(8, 4)
    with fxpipe.compile(made(SetsInTraining), ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:
        pipe.step(x, target=x)
        with pytest.raises(fxpipe.TraceError, match=r"SetsInTraining\.kept .* before it is set"):
            pipe.eval()(x)
        pipe.train().step(x, target=x)


def weight_normed(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", [weight_normed, nn.utils.spectral_norm, pruned])
def test_weights_that_hooks_compute_in_each_call_cause_no_warning(
    change: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        change(model[2])
        return model

    model, alone = made(), made()
    with fxpipe.compile(model, 2, microbatches=2, loss=mse_loss) as pipe:
        for each in (model, alone):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            torch.manual_seed(1)
            for _ in range(3):
                x, y = torch.randn(2, 8, 4)
                optimizer.zero_grad()
                if each is model:
                    pipe.step(x, target=y)
                else:
                    loop.train(alone, 2, x, loss=mse_loss, target=y)
                optimizer.step()
        pipe.eval()(x)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(model(x), alone.eval()(x), rtol=0, atol=0)
