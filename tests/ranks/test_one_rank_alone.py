"""What a user changes on one rank of a pipeline alone: settings are refused, weights warned of."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
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
    for what in ("nothing", "given", "of a function", "scheduler", "made with", "of a stage"):
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
                elif step == 1 and alone and what == "of a stage":
                    own = pipe.optimizers[1]
                    assert own is not None
                    own.param_groups[0]["lr"] = 0.0
                told.append(stepped(pipe))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_setting_of_the_one_optimizer_that_differs_on_a_rank_is_an_error_on_all(
    schedule: str,
) -> None:
    first, second = on_ranks(2, settings, schedule)
    assert first == second
    rate = "'lr of optimizer group 0: {}' on rank {}"
    for what, lines in {
        "given": [rate.format(0.1, 0), rate.format(0.5, 1)],
        "made with": [rate.format(0.1, 0), rate.format(0.5, 1)],
        "of a function": ["is missing on rank 0", rate.format(0.5, 1)],
        "scheduler": ["is missing on rank 0", "'initial_lr of optimizer group 0: 0.1' on rank 1"],
    }.items():
        told = first[what][-1]
        assert isinstance(told, str)
        assert "the call differs between ranks" in told
        assert all(line in told for line in lines)
        assert isinstance(first[what][0], float) == (what != "made with")
    assert all(
        isinstance(loss, float) for what in ("nothing", "of a stage") for loss in first[what]
    )
    if schedule == "1f1b":  # the rate of a stage is its own
        assert first["of a stage"][:2] == first["nothing"][:2]
        assert first["of a stage"][2] != first["nothing"][2]


def set_back(mesh: DeviceMesh) -> dict[str, list[float | str]]:
    """The losses of three steps, or what a rank is told; rank 1 alone changes a rate before the
    first or the second and sets it back before the next one."""
    found: dict[str, list[float | str]] = {}
    for what in ("nothing", "given", "of a function"):
        for when in (0, 1):
            model = built()
            given = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer: object = given if what == "given" else sgd
            told = found[f"{what} {when}"] = []
            with compiled(model, mesh, "1f1b", optimizer) as pipe:
                for step in range(4):
                    if (
                        what != "nothing"
                        and mesh.get_local_rank() == 1
                        and step in (when, when + 1)
                    ):
                        rate = 0.5 if step == when else float("0.1")  # another object
                        pipe.optimizer.param_groups[0]["lr"] = rate
                    if what != "nothing" or step != when:
                        told.append(stepped(pipe))
    return found


def test_a_setting_that_one_rank_sets_back_is_no_error_any_more() -> None:
    first, second = on_ranks(2, set_back)
    assert first == second
    for when in (0, 1):
        for what in ("given", "of a function"):
            told = first[f"{what} {when}"]
            assert "the call differs between ranks" in str(told.pop(when))
            assert told == first[f"nothing {when}"]


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def writing(mesh: DeviceMesh, schedule: str) -> dict[str, list[str]]:
    """What is logged after weights were written in some way."""
    rank = mesh.get_local_rank()
    found: dict[str, list[str]] = {}
    for what in ("on all ranks", "on one rank", "without data", "its own"):
        with torch.device("meta" if what == "without data" else "cpu"):
            model, log = built(), Messages()
        logging.getLogger("fxpipe").addHandler(log)
        with compiled(model, mesh, schedule, sgd) as pipe:
            if what == "without data":
                pipe.prepare(torch.ones(4, 4), target=torch.ones(4, 2))
                pipe.reset_parameters()
            stepped(pipe)
            stepped(pipe)
            whole = pipe.state_dict(full=True)
            if what == "on all ranks" or (what == "on one rank" and rank == 0):
                model.load_state_dict({name: value * 2 for name, value in whole.items()})
            elif (what, rank) in (("its own", 1), ("without data", 0)):
                with torch.no_grad():
                    model.get_parameter("2.weight").mul_(2)
            stepped(pipe)
            stepped(pipe)
        logging.getLogger("fxpipe").removeHandler(log)
        found[what] = log.kept
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_weight_that_is_written_where_another_rank_trains_it_is_warned_of(schedule: str) -> None:
    for found in on_ranks(2, writing, schedule):
        for what, name in (("on one rank", "2.bias"), ("without data", "2.weight")):
            (told,) = found.pop(what)
            assert told.startswith("rank 0")
            assert f"has written the parameter {name!r}, which another rank" in told
        assert found == {"on all ranks": [], "its own": []}
