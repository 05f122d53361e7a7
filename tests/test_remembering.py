"""What tests remember of a model stands for like models, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.passes import runner
from tests.helpers import remembered

Options = Mapping[str, Any]


class Model(nn.Module):
    """Two layers, and an attribute that is part of its graph."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.first(x)) * self.scale)
        return out


def frozen() -> Model:
    model = Model()
    model.first.weight.requires_grad_(False)
    return model


def tied() -> Model:
    model = Model()
    model.last.weight = model.first.weight
    return model


def dropping() -> Model:
    model = Model()
    model.drop.p = 0.5
    return model


def half_as_much(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target) / 2


OTHERS: Mapping[str, tuple[Callable[[], nn.Module], Options]] = {
    "an attribute": (lambda: Model(3.0), {}),
    "a frozen weight": (frozen, {}),
    "a tied weight": (tied, {}),
    "an attribute of a part": (dropping, {}),
    "another dtype": (lambda: Model().double(), {}),
    "the loss": (Model, {"loss": half_as_much}),
    "the size of micro-batches": (Model, {"microbatches": 4}),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lists of passes that run."""
    ran: list[str] = []

    def run_all(given: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
        ran.extend(each.name for each in given)
        return runner.run_all(given, facts)

    monkeypatch.setattr(remembered, "run_all", run_all)
    monkeypatch.setattr(remembered, "_made", {})
    return ran


def step(model: nn.Module, devices: int = 2, sizes: Sequence[int] = (8,), **options: Any) -> Tensor:
    """The loss of the last of some steps, of batches of these sizes."""
    given = {"microbatches": 2, "loss": F.mse_loss, **options}
    torch.manual_seed(0)
    dtype = next(model.parameters()).dtype
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with remembered.remembering(), fxpipe.compile(model, devices, **given) as pipe:
        for size in sizes:
            x = torch.ones(size, 4, dtype=dtype)
            loss: Tensor = pipe.step(x, target=x)
    return loss


def measured(made: list[str]) -> int:
    return made.count("measure")


def test_a_like_model_is_captured_measured_and_divided_once(made: list[str]) -> None:
    first = step(Model())
    before = list(made)
    assert "capture" in before and measured(before) == 1
    assert torch.equal(step(Model()), first)
    after = made[len(before) :]
    assert "capture" not in after and not measured(after) and "divide" not in after


def test_another_cut_or_way_back_is_divided_for_itself(made: list[str]) -> None:
    first = step(Model())
    others: list[tuple[dict[str, Any], int]] = [
        ({"devices": 1, "partition": []}, 1),
        ({"schedule": "zb-h1"}, 2),  # once more for the plan that is measured: it has halves, too
    ]
    for options, times in others:
        before = list(made)
        assert torch.equal(step(Model(), **options), first)
        after = made[len(before) :]
        assert "capture" not in after and after.count("divide") == times, options


def test_a_graph_for_any_size_is_captured_once_and_fits_all_like_models(made: list[str]) -> None:
    sizes = 8, 12, 16, 12
    first = step(Model(), sizes=sizes)
    before = list(made)
    assert before.count("capture") == 2 and before.count("divide") > 1
    assert torch.equal(step(Model(), sizes=sizes), first)
    after = made[len(before) :]
    assert "capture" not in after and "divide" not in after


def test_a_model_that_differs_has_a_graph_for_any_size_of_its_own(made: list[str]) -> None:
    sizes, others = (8, 12), (8, 20, 12)
    step(Model(), sizes=sizes)
    before = made.count("capture")
    assert not torch.equal(step(Model(3.0), sizes=sizes), step(Model(), sizes=sizes))
    assert made.count("capture") == before + 2
    step(Model(), sizes=others)  # captured with symbols for another size
    assert made.count("capture") == before + 3


@pytest.mark.parametrize("what", OTHERS)
def test_a_model_that_differs_is_traced_for_itself(made: list[str], what: str) -> None:
    model, options = OTHERS[what]
    step(Model())
    before = measured(made)
    step(model(), **options)
    assert measured(made) == before + 1


def test_another_forward_is_traced_for_itself(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = step(Model())
    monkeypatch.setattr(Model, "forward", lambda self, x: self.last(self.first(x)))
    assert not torch.equal(step(Model()), first)


def test_a_model_with_a_tensor_for_an_attribute_is_never_remembered(made: list[str]) -> None:
    for scale in (1.0, 2.0):
        model = Model()
        model.scale = torch.tensor(scale)  # type: ignore[assignment]
        before = measured(made)
        step(model)
        assert measured(made) == before + 1


class Counting(nn.Module):
    """Knows how often it is called as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return x


def test_leaf_modules_are_those_of_the_model_itself(made: list[str]) -> None:
    for _ in range(2):
        model, own = Model(), Counting()
        model.drop = own  # type: ignore[assignment]
        step(model, extensions=[fxpipe.LeafModules("drop")])
        assert own.calls[-2:] == [4, 4]
