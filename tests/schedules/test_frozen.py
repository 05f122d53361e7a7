"""Frozen micro-batches: stages whose weight gradients are left out, from the language to a step."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError, ParseError, Program, Recipe, Schedule, VerificationError
from fxpipe.ir.recipe import find_recipe, fixed
from fxpipe.schedules import one_f_one_b, two_bw, zb_h1
from tests.helpers.faults import faults_of
from tests.helpers.plans import chain_program
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

SOME = [(1, 0), (3, 0), (0, 1), (2, 1)]
"""Micro-batches and stages, as TimelyFreeze leaves them out (arXiv 2602.05754)."""


@st.composite
def freezing(draw: st.DrawFn) -> Schedule:
    recipe = find_recipe(draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v"])))
    devices, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    stages = st.integers(0, recipe.stages(devices) - 1)
    frozen = draw(st.sets(stages | st.tuples(st.integers(0, microbatches - 1), stages)))
    return replace(recipe, frozen=frozen)(devices, microbatches)


def most_kept(schedule: Schedule, stage: int) -> int:
    """The most micro-batches between a forward and the last half of its backward."""
    kept = most = 0
    for task in schedule.rows[schedule.placement[stage]]:
        if task.stage == stage:
            alone = (task.microbatch, stage) in schedule.frozen
            kept += (task.kind == "F") - (task.kind in ("BI" if alone else "BW"))
            most = max(most, kept)
    return most


@given(freezing())
def test_a_frozen_backward_is_an_input_gradient_alone(schedule: Schedule) -> None:
    schedule.verify()
    assert Schedule.parse(str(schedule)) == fixed(schedule)(schedule.devices, schedule.microbatches)
    assert Schedule.parse(str(schedule)) == schedule
    kinds = {
        pair: "".join(
            task.kind
            for row in schedule.rows
            for task in row
            if (task.microbatch, task.stage) == pair
        )
        for pair in schedule.frozen
    }
    assert kinds == dict.fromkeys(schedule.frozen, "FI")
    assert schedule.kept().stages == tuple(most_kept(schedule, s) for s in range(schedule.stages))
    program = chain_program(schedule).verify()
    assert Program.parse(str(program)) == program


def test_what_is_frozen_stands_behind_the_places() -> None:
    assert str(replace(one_f_one_b, frozen=[0, (1, 1)])(2, 2)) == (
        "schedule 1f1b stages=2 microbatches=2 delay=0\nplace 0 | 1\nfrozen 0@0 1@0 1@1\n"
        "0: F0 F1 I0 I1 U\n1: F0 B0 F1 I1 U\n"
    )


def test_a_weight_gradient_that_is_left_out_is_a_fault_unless_it_is_frozen() -> None:
    whole = zb_h1(2, 2)
    dropped = replace(
        whole, rows=tuple(tuple(t for t in row if t.kind != "W") for row in whole.rows)
    )
    with pytest.raises(
        VerificationError, match="stage 0 has no weight gradient of micro-batches 0-1"
    ):
        dropped.verify()
    assert replace(dropped, frozen=frozenset((i, s) for i in range(2) for s in range(2))).verify()
    for schedule in (
        replace(each, frozen=frozenset([(1, 0)])) for each in (whole, one_f_one_b(2, 2))
    ):
        (fault,) = faults_of(schedule)
        assert fault.what == "stage 0 is frozen for micro-batch 1"
        assert fault.cure == "give it one I, and neither B nor W"


def test_clips_wait_for_the_last_gradient_that_is_added() -> None:
    text = """schedule clipping stages=2 microbatches=2 delay=0
place 0 | 1
frozen 1@0
0: F0 F1 I0 I1 C W0 U
1: F0 B0 F1 B1 C U
"""
    (fault,) = faults_of(Schedule.parse(text))
    assert fault.what == "it comes before W0@0, position 5, which it needs"
    Schedule.parse(text.replace("C W0", "W0 C")).verify()


def test_a_program_says_what_is_frozen() -> None:
    text = re.sub(" +", " ", str(chain_program(replace(zb_h1, frozen=[(0, 1)])(2, 1))))
    assert "input_grad s1[0] v0 frozen" in text
    with pytest.raises(VerificationError, match="stage 1 has no weight gradient of micro-batch 0"):
        Program.parse(text.replace(" frozen", "")).verify()
    frozen = text.replace("input_grad s0[0] v0", "input_grad s0[0] v0 frozen")
    with pytest.raises(VerificationError, match="stage 0 is frozen for micro-batch 0"):
        Program.parse(frozen).verify()


def test_what_is_frozen_is_checked() -> None:
    for frozen in {(2, 0)}, {(0, 2)}:
        (fault,) = faults_of(replace(zb_h1(2, 2), frozen=frozenset(frozen)))
        assert fault.what == f"{next(iter(frozen))} is frozen"
    wrong: list[Any] = [[0], {(0, 0, 0)}]
    for frozen in wrong:
        with pytest.raises(InputError, match=r"frozen of a schedule is .*; give pairs of a micro"):
            replace(zb_h1(2, 2), frozen=frozen)
    with pytest.raises(InputError, match="frozen='ab' gives no stages"):
        replace(zb_h1, frozen="ab")(2, 2)  # type: ignore[arg-type]


def test_what_is_no_pair_is_refused_where_it_stands() -> None:
    text = "schedule a stages=2 microbatches=2 delay=0\nplace 0 | 1\nfrozen 0@\n0: F0\n1: F0\n"
    message = "line 3, column 10: expected the second number of a pair, such as frozen 1@2"
    with pytest.raises(ParseError, match=message):
        Schedule.parse(text)


def made(stages: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(stages) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(8, 8), torch.randn(8, 8)


def train(
    model: nn.Sequential,
    x: Tensor,
    y: Tensor,
    frozen: Collection[tuple[int, int]],
    share: float = 1,
) -> None:
    """The plain loop over four micro-batches, without the gradients of what is frozen."""
    for i, (a, b) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
        before = loop.gradients(model)
        (mse_loss(model(a), b) * (share / 4)).backward()
        for name, parameter in model.named_parameters():
            if (i, int(name.partition(".")[0]) // 2) in frozen:
                parameter.grad = before[name]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.models
@pytest.mark.parametrize("frozen", [SOME, [0], [(3, 1), 0], [0, 1]], ids=str)
@pytest.mark.parametrize("recipe", [one_f_one_b, zb_h1, two_bw], ids=lambda recipe: recipe.name)
def test_a_step_leaves_out_the_gradients_of_what_is_frozen(recipe: Recipe, frozen: Any) -> None:
    model, x, y = made(2)
    alone = copy.deepcopy(model)
    recipe = replace(recipe, frozen=frozen)
    train(alone, x, y, recipe(2, 4).frozen)
    options: dict[str, Any] = {"partition": ["2"], "loss": mse_loss, "microbatches": 4}
    if recipe.name != "2bw":
        summed = copy.deepcopy(model)
        with fxpipe.compile(summed, ["cpu"] * 2, schedule=recipe, **options) as pipe:
            pipe.step(x, target=y)
            loop.assert_same(loop.gradients(summed), loop.gradients(alone))
            assert pipe.kept == dict(enumerate(recipe(2, 4).kept().stages))
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        options["clip_norm"] = 0.1
    sgd(alone.parameters()).step()
    with fxpipe.compile(model, ["cpu"] * 2, schedule=recipe, optimizer=sgd, **options) as pipe:
        pipe.step(x, target=y)
        pipe.flush()
        loop.assert_same(pipe.state_dict(), alone.state_dict())


def on_rank(mesh: DeviceMesh, name: str, frozen: Any, replicas: int) -> dict[str, Tensor]:
    """The weights of this rank after a step, and those of the loop under the same names."""
    model, x, y = made(2)
    alone, recipe = copy.deepcopy(model), replace(find_recipe(name), frozen=frozen)
    parts = [*zip(x.repeat(2, 1).chunk(2), y.flip(0).repeat(2, 1).chunk(2), strict=True)]
    parts = [(part[0] + k, part[1]) for k, part in enumerate(parts)][:replicas]
    for a, b in parts:
        train(alone, a, b, recipe(2, 4).frozen, 1 / replicas)
    sgd(alone.parameters()).step()
    a, b = parts[mesh.get_local_rank("dp") if replicas > 1 else 0]
    options: dict[str, Any] = {"partition": ["2"], "loss": mse_loss, "microbatches": 4}
    with fxpipe.compile(model, mesh, schedule=recipe, optimizer=sgd, **options) as pipe:
        pipe.step(a, target=b)
        found = dict(pipe.state_dict())
    return {name: value - alone.state_dict()[name] for name, value in found.items()}


@pytest.mark.models
def test_a_stage_whose_parameters_are_frozen_needs_no_weight_gradients() -> None:
    model, x, y = made(3)
    model[2].requires_grad_(False)
    alone = copy.deepcopy(model)
    train(alone, x, y, ())
    options: dict[str, Any] = {"partition": ["2", "4"], "loss": mse_loss, "microbatches": 4}
    with fxpipe.compile(model, 3, schedule=replace(zb_h1, frozen=[1]), **options) as pipe:
        pipe.step(x, target=y)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.deep
@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "frozen", "replicas"),
    [("zb-h1", SOME, 2), ("1f1b", [0], 2), ("chimera", SOME, 1), ("chimera", [0], 1)],
    ids=["replicas", "a whole stage of replicas", "copies", "a whole stage with copies"],
)
def test_what_is_frozen_adds_nothing_to_sums_over_ranks(
    name: str, frozen: Any, replicas: int
) -> None:
    options = {"replicas": 2} if replicas > 1 else {}
    for differences in on_ranks(2 * replicas, on_rank, name, frozen, replicas, **options):
        assert differences
        assert all(float(each.abs().max()) < 1e-7 for each in differences.values())
