"""What optimizers keep in attributes of their own is in checkpoints, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import CheckpointError


class Slowing(torch.optim.SGD):
    """The n-th step is a n-th as long."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.begin()

    def begin(self) -> None:
        self.count: Any = 0

    def counted(self) -> float:
        self.count += 1
        return float(self.count)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.counted()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if not bool(torch.isfinite(parameter.grad).all()):
                        raise ArithmeticError("a gradient is not finite")
                    parameter.sub_(self.direction(parameter), alpha=group["lr"] / count)

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad


class ByFirstStep(Slowing):
    """Its count is there from its first step on."""

    def begin(self) -> None:
        pass

    def counted(self) -> float:
        self.count = getattr(self, "count", 0) + 1
        return float(self.count)


class ByTensor(Slowing):
    """It counts in a tensor."""

    def begin(self) -> None:
        self.count = torch.zeros(())


class ByDict(Slowing):
    """It counts in a list in a dict."""

    def begin(self) -> None:
        self.info: dict[str, Any] = {"counts": [0, torch.zeros(())]}

    def counted(self) -> float:
        self.info["counts"][0] += 1
        self.info["counts"][1] += 1
        return float(self.info["counts"][0])


class Heavy(Slowing):
    """It keeps momentum in a dict of its own."""

    def begin(self) -> None:
        super().begin()
        self.momenta: dict[Tensor, Tensor] = {}

    def direction(self, parameter: Tensor) -> Tensor:
        found = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
        return found.add_(super().direction(parameter))


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def compiled(
    model: nn.Module, kind: type[Slowing], *, whole: bool, cut: list[str], schedule: str = "1f1b"
) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        ["cpu"] * (len(cut) + 1),
        partition=cut,
        microbatches=2,
        loss=mse_loss,
        schedule=schedule,
        optimizer=kind(model.parameters()) if whole else kind,
    )


def train(pipe: fxpipe.Pipeline, steps: int) -> None:
    for _ in range(steps):
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


FORMS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (fxpipe.Pipeline.checkpoint, fxpipe.Pipeline.restore),
    (fxpipe.Pipeline.save, fxpipe.Pipeline.load),
]


@pytest.mark.parametrize("kind", [Slowing, ByTensor, ByDict, ByFirstStep])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_training_goes_on_with_the_attributes_of_a_checkpoint(
    kind: type[Slowing], whole: bool, schedule: str, tmp_path: Path
) -> None:
    model = built()
    with compiled(model, kind, whole=whole, cut=["1"], schedule=schedule) as pipe:
        train(pipe, 2)
        for index, (save, _) in enumerate(FORMS):
            save(pipe, tmp_path / str(index))
        train(pipe, 3)
        pipe.flush()
        expected = weights(model)
        pipe.restore(tmp_path / "0")  # which rewinds
        train(pipe, 3)
    assert all(map(torch.equal, weights(model), expected))
    for index, (_, load) in enumerate(FORMS):
        other = built()
        with compiled(other, kind, whole=whole, cut=["1", "2"], schedule=schedule) as pipe:
            load(pipe, tmp_path / str(index))
            train(pipe, 1)
            pipe.checkpoint(tmp_path / "again")
            train(pipe, 5)
            pipe.restore(tmp_path / "again")
            train(pipe, 2)
        assert all(map(torch.equal, weights(other), expected))


@pytest.mark.parametrize("whole", [False, True])
def test_tensors_by_parameter_outside_of_the_state_are_refused(whole: bool, tmp_path: Path) -> None:
    with compiled(built(), Heavy, whole=whole, cut=["1"]) as pipe:
        pipe.checkpoint(tmp_path / "first")  # there are none yet
        train(pipe, 1)
        for save, _ in FORMS:
            with pytest.raises(
                CheckpointError, match=r"Heavy keeps 'momenta', a dict.*self\.state"
            ):
                save(pipe, tmp_path / "later")
    assert not (tmp_path / "later").exists()


def test_an_attribute_that_the_optimizer_does_not_take_is_refused(tmp_path: Path) -> None:
    with compiled(built(), Slowing, whole=False, cut=["1"]) as pipe:
        train(pipe, 1)
        for optimizer in pipe.optimizers:
            vars(optimizer)["counted"] = 3
        pipe.checkpoint(tmp_path / "file")
    model = built()
    before = weights(model)
    with compiled(model, Slowing, whole=False, cut=["1"]) as pipe:
        pipe.prepare(torch.ones(4, 4), target=torch.zeros(4, 4))
        with pytest.raises(CheckpointError, match="has 3 for the attribute 'counted' of Slowing"):
            pipe.restore(tmp_path / "file")
    assert all(map(torch.equal, weights(model), before))
