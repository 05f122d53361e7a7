"""Ranks notice that they were given something else, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.options import Options
from fxpipe.compiler.placement import Placement
from fxpipe.extend import Extension
from fxpipe.ir.instruction import Free
from fxpipe.ir.program import Program
from fxpipe.passes.runner import Pass
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks


def train(mesh: DeviceMesh) -> list[str]:
    """What a rank is told where it is given other inputs, and then where all have the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    told = []
    x = torch.randn(4, 4)
    with fxpipe.compile(model, mesh, microbatches=2, loss=F.mse_loss, partition=["2"]) as pipe:
        with pytest.raises(fxpipe.RankError) as caught:
            pipe.step(x + mesh.get_local_rank(), target=x[:, :2])
        told.append(str(caught.value))
        told.append(str(pipe.step(x, target=x[:, :2])))
    return told


def test_other_inputs_on_one_rank_are_an_error_on_all() -> None:
    first, second = on_ranks(2, train)
    for told in (first[0], second[0]):
        assert "the call differs between ranks" in told
        assert "'x: (4, 4)" in told or "'input: (4, 4)" in told
    assert first[1] == second[1]


def lowering(mesh: DeviceMesh, who: int) -> str:
    """What a rank is told where one alone frees a value later, as another version might do."""
    alone = mesh.get_local_rank() == who

    def late(program: Program) -> Program:
        row = [x for x in program.lists[who] if not isinstance(x, Free)]
        freed = [x for x in program.lists[who] if isinstance(x, Free)]
        rows = list(program.lists)
        rows[who] = (*row, *freed) if alone else rows[who]
        return replace(program, lists=tuple(rows))

    class Late(Extension):
        def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
            return {"program": [("free", Pass(late, "program", "program", apart=True))]}

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.ones(4, 4)
    with (
        fxpipe.compile(
            model, mesh, microbatches=2, loss=F.mse_loss, partition=["1", "2"], extensions=[Late()]
        ) as pipe,
        pytest.raises(fxpipe.RankError) as caught,
    ):
        pipe.step(x, target=x)
    return str(caught.value)


@pytest.mark.parametrize("who", [*deep(0, 1), 2])
def test_another_program_on_one_rank_is_an_error_on_all(who: int) -> None:
    told = on_ranks(3, lowering, who)
    for each in told:
        assert "the compiled program differs between ranks: line" in each
        assert "'free" in each and "on rank 0" in each and f"on rank {who or 1}" in each


class Scaled(nn.Module):
    """What it computes depends on attributes, on a mode and on what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 2)
        self.scale, self.doubled = 1.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x) * self.scale)
        return out * 2 if self.doubled else out


def switching(mesh: DeviceMesh, what: str) -> list[str | int]:
    """What a rank is told where it goes back alone to a state that all have been in."""
    torch.manual_seed(0)
    model = Scaled()
    x = torch.randn(4, 4)
    alone = mesh.get_local_rank() == 1
    told: list[str | int] = []
    with fxpipe.compile(
        model, mesh, microbatches=2, loss=F.mse_loss, partition=["last"], optimizer=None
    ) as pipe:
        for state in (False, True, False, alone):
            if what == "number":
                model.scale = 2.0 if state else 1.0
            elif what == "attribute":
                model.doubled = state
            elif what == "mode":
                model.first[1].train(not state)
            else:
                model.last.bias.requires_grad_(not state)
            try:
                pipe.step(x, target=x[:, :2])
            except fxpipe.RankError as error:
                told.append(str(error))
        told.append(pipe.batches)
    return told


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("number", "model.scale: 2.0"),
        ("attribute", "attributes, globals and hooks that its code reads: those of call "),
        *deep(
            ("mode", "the pipe is in training mode, but for first.1"),
            ("frozen", "parameters without gradients: last.bias"),
        ),
    ],
)
def test_another_state_that_is_known_on_one_rank_is_an_error_on_all(what: str, line: str) -> None:
    for told, batches in on_ranks(2, switching, what):
        assert line in told
        assert batches == 3


def meshes(mesh: DeviceMesh) -> dict[str, tuple[int, int] | str]:
    """What a pipe has of meshes of other shapes: devices and replicas, or why they are refused."""
    made = {
        "one replica": DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "pp")),
        "replicas": DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "pp")),
        "replicas alone": DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
        "another order": DeviceMesh("cpu", [[[0, 1]]], mesh_dim_names=("x", "pp", "dp")),
        "another name": DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("pp", "tp")),
        "no names": DeviceMesh("cpu", [[0, 1]]),
        "unlike": DeviceMesh("cpu", [1, 0] if mesh.get_local_rank() else [0, 1]),
        "alone": DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("x", "pp"))["pp"],
    }
    x = torch.ones(4, 4)
    told: dict[str, tuple[int, int] | str] = {}
    for name, each in made.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        try:
            with fxpipe.compile(model, each, microbatches=2, loss=F.mse_loss) as pipe:
                pipe.step(x, target=x[:, :2])
                told[name] = pipe.program.devices, pipe.program.replicas
                if name == "replicas":
                    told["text"] = str(pipe).partition(",")[0]
        except fxpipe.InputError as error:
            told[name] = str(error)
    return told


def test_a_mesh_has_all_its_ranks_in_the_pipe() -> None:
    for told in on_ranks(2, meshes):
        assert (told["one replica"], told["alone"]) == ((2, 1), (1, 1))
        assert {told[name] for name in ("replicas", "replicas alone", "another order")} == {(1, 2)}
        assert str(told["text"]).endswith("over 1 devices in 2 replicas")
        assert told["another name"] == (1, 1)  # each rank has all of what is not divided
        assert 'mesh_dim_names=("dp", "pp")' in str(told["no names"])
        expected = "rank 1 has a mesh of the ranks ((1, 0),), and rank 0 one of ((0, 1),); make"
        assert str(told["unlike"]).startswith(expected)


def measured(mesh: DeviceMesh) -> tuple[list[float], int]:
    """The costs of the stages, and how many times this rank has measured a graph."""
    count = 0

    def timed(self: Placement, facts: Mapping[str, Any]) -> Any:
        nonlocal count
        count += 1
        return original(self, facts)

    original = Placement._timed
    Placement._timed = timed  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.ones(4, 4)
    with fxpipe.compile(model, mesh, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(x, target=x[:, :2])
        costs = [stage.costs for stage in pipe.plan.stages]
    return [cost.forward for cost in costs if cost is not None], count


def test_one_rank_measures_for_all() -> None:
    (costs, count), *others = on_ranks(2, measured)
    assert count == 1
    assert len(costs) == 2
    assert others == [(costs, 0)]


def in_order(mesh: DeviceMesh, order: list[int]) -> tuple[int, list[str]]:
    """The stage that this rank runs, and what it trains, in a mesh of another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.ones(4, 4)
    other = DeviceMesh("cpu", order, mesh_dim_names=("pp",))
    with fxpipe.compile(
        model, other, microbatches=2, loss=F.mse_loss, partition=["1", "2"]
    ) as pipe:
        pipe.step(x, target=x[:, :2])
        return mesh.get_local_rank(), sorted(pipe.state_dict())


def test_stages_are_on_the_ranks_in_the_order_of_the_mesh() -> None:
    found = dict(on_ranks(3, in_order, [2, 0, 1]))
    assert found == {
        2: ["0.bias", "0.weight"],
        0: ["1.bias", "1.weight"],
        1: ["2.bias", "2.weight"],
    }
