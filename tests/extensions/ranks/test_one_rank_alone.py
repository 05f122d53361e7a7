"""What is other on one rank of a pipeline alone, such as a setting or the order of samples, is
refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import fxpipe
from fxpipe.extensions.ranks.agreement import sampled
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def compiled(
    model: nn.Module, mesh: DeviceMesh, schedule: str, optimizer: object
) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        mesh,
        microbatches=2,
        loss=F.mse_loss,
        partition=["2"],
        schedule=schedule,
        optimizer=optimizer,  # type: ignore[arg-type]
    )


def stepped(pipe: fxpipe.Pipeline) -> float | str:
    x = torch.ones(4, 4)
    try:
        return float(pipe.step(x, target=x[:, :2]))
    except fxpipe.RankError as error:
        return str(error)


def settings(mesh: DeviceMesh, schedule: str) -> dict[str, list[float | str]]:
    """The losses of three steps, before the second of which rank 1 alone changes something, or what
    it is told."""
    alone = mesh.get_local_rank() == 1
    found: dict[str, list[float | str]] = {}
    for what in ("nothing", "given", "of a function", "scheduler", "made with"):
        model = built()
        optimizer: object = sgd
        if what in ("given", "made with"):
            rate = 0.5 if alone and what == "made with" else 0.1
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        told = found[what] = []
        with compiled(model, mesh, schedule, optimizer) as pipe:
            for step in range(3):
                pipe.flush()
                if step == 1 and alone and what in ("given", "of a function"):
                    pipe.optimizer.param_groups[0]["lr"] = 0.5
                elif step == 1 and alone and what == "scheduler":
                    LambdaLR(pipe.optimizer, lambda count: 0.5)
                told.append(stepped(pipe))
    return found


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "2bw"])
def test_a_setting_of_the_one_optimizer_that_differs_on_a_rank_is_an_error_on_all(
    schedule: str,
) -> None:
    first, second = on_ranks(2, settings, schedule)
    assert first == second
    rate = "'lr of optimizer group 0: {}' on rank {}"
    for what, lines in {
        "given": [rate.format(0.1, 0), rate.format(0.5, 1)],
        "made with": [rate.format(0.1, 0), rate.format(0.5, 1)],
        "of a function": [rate.format(0.1, 0), rate.format(0.5, 1)],
        "scheduler": [rate.format(0.1, 0), rate.format(0.05, 1)],
    }.items():
        told = first[what][-1]
        assert isinstance(told, str)
        assert "the call differs between ranks" in told
        assert all(line in told for line in lines)
        assert isinstance(first[what][0], float)
    assert all(isinstance(loss, float) for loss in first["nothing"])


def set_back(mesh: DeviceMesh) -> dict[str, list[float | str]]:
    """The losses of three steps, or what a rank is told; rank 1 alone changes a rate before the
    second and sets it back before the next one."""
    found: dict[str, list[float | str]] = {}
    for what in ("nothing", "given", "of a function"):
        model = built()
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        told = found[what] = []
        with compiled(model, mesh, "1f1b", given if what == "given" else sgd) as pipe:
            for step in range(4):
                if what != "nothing" and mesh.get_local_rank() == 1 and step in (1, 2):
                    rate = 0.5 if step == 1 else float("0.1")  # another object
                    pipe.optimizer.param_groups[0]["lr"] = rate
                if what != "nothing" or step != 1:
                    told.append(stepped(pipe))
    return found


def test_a_setting_that_one_rank_sets_back_is_no_error_any_more() -> None:
    first, second = on_ranks(2, set_back)
    assert first == second
    for what in ("given", "of a function"):
        assert "the call differs between ranks" in str(first[what].pop(1))
        assert first[what] == first["nothing"]


def drifted(mesh: DeviceMesh) -> list[float | str]:
    """The losses of two epochs, or what a rank is told; rank 1 alone draws a number in between."""
    model = built()
    told: list[float | str] = []
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), 16, shuffle=True)
    with compiled(model, mesh, "1f1b", sgd) as pipe:
        for _ in range(2):
            for x, y in data:
                try:
                    told.append(float(pipe.step(x, target=y)))
                except fxpipe.RankError as error:
                    told.append(str(error))
            if mesh.get_local_rank() == 1:
                torch.rand(1)
    return told


def test_loaders_that_shuffle_in_other_orders_after_a_while_are_an_error_on_all_ranks() -> None:
    """Else the first stage would see other samples than the loss has targets of."""
    first, second = on_ranks(2, drifted)
    assert first == second
    assert [type(told) for told in first] == [float] * 4 + [str] * 4
    assert "the call differs between ranks: " in str(first[4])
    assert "'input: (16, 4) torch.float32, " in str(first[4])


@pytest.mark.parametrize("shape", [(8, 3, 40, 40), (6, 1000), (500,), (1,), ()])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_samples_of_tensors_differ_where_all_values_do(
    shape: tuple[int, ...], kind: torch.dtype
) -> None:
    values = torch.arange(torch.Size(shape).numel()).remainder(2).reshape(shape).to(kind)
    assert sampled(values) == sampled(values.clone()) != ""
    assert sampled(values) != sampled((1 - values.int()).to(kind))
    assert sampled(values.to("meta")) == sampled(values[:0] if shape else values.to("meta")) == ""
