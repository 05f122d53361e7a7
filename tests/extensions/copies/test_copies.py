"""Stages on several devices: equal to a loop that sums in the same parts, and refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import ExecutionError, InputError
from fxpipe.extensions.copies.lowering import check_copies
from fxpipe.extensions.copies.opcodes import Add, Give, Share
from fxpipe.extensions.replicas.lowering import add_reduce
from fxpipe.ir import instruction as ins
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import Machine, Store
from tests.extensions.overlapping.test_delay_rules import stage_of
from tests.helpers.opcodes import take_away
from tests.helpers.overlapping import ADAMW, OPTIMIZERS, SGD, compiled, make
from tests.helpers.profiles import DEEP
from tests.helpers.tiny import batch, pipe_of
from tests.oracles import loop
from tests.oracles.copied_loop import CopiedLoop
from tests.oracles.delayed_loop import MSE

DUALPIPE = """
schedule dualpipe stages=2 microbatches=4 delay=0
place 0 +1 | 1 +0
0: F0@0 F1@1 F2@0 B1@1 F3@1&B0@0 B3@1 I2@0 W2@0 U@0
1: F1@0 F0@1 F3@0 B0@1 F2@1&B1@0 B2@1 I3@0 W3@0 U@1
"""
"""With two devices, in the order of its authors' program."""


def rule_of(schedule: Schedule) -> Callable[[str, int], int]:
    """Name of a parameter of the six layers and micro-batch → the number of the copy."""

    def copy_of(name: str, i: int) -> int:
        stage = stage_of(name, schedule.stages)
        return schedule.devices_of(stage).index(schedule.device_of(stage, i))

    return copy_of


def copied(model: nn.Module, schedule: Schedule, optimizer: Any = SGD) -> CopiedLoop:
    """A loop over a copy of the layers that sums as a schedule does."""
    alone = copy.deepcopy(model)
    theirs = optimizer(alone.parameters())
    return CopiedLoop(alone, theirs, MSE, schedule.microbatches, rule_of(schedule))


def spread(
    name: str, devices: int, microbatches: int, stage: int, to: list[int], reduces: bool
) -> Schedule:
    """A schedule whose micro-batches of one stage are shared out to devices of their own.

    Args:
        name: a schedule with one stage a device.
        devices: of it.
        microbatches: of it.
        stage: the stage that gets copies.
        to: micro-batch → 0, or the number of the copy.
        reduces: whether the schedule says where gradients are summed; else a pass does.
    """
    plain = find_recipe(name)(devices, microbatches)
    own = [task for task in plain.rows[stage] if task.microbatch is None]
    parts = [
        [t for t in plain.rows[stage] if t.microbatch is not None and to[t.microbatch] == number]
        for number in range(max(to) + 1)
    ]
    rows = [*plain.rows[:stage], (*parts[0], *own), *plain.rows[stage + 1 :]]
    places = [str(each) for each in range(devices)] + ["+" + str(stage)] * max(to)
    text = [f"schedule spread stages={devices} microbatches={microbatches} delay=0"]
    text.append("place " + " | ".join(places))
    for device, row in enumerate([*rows, *parts[1:]]):
        text.append(f"{device}: " + " ".join(str(t) for t in row))
    made = Schedule.parse("\n".join(text))
    return add_reduce(made) if reduces else made


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Both pipelines of Chimera, or of DualPipe with its pairs, or one stage of others on several
    devices."""
    microbatches = draw(st.integers(1, 5))
    if draw(st.booleans()):
        if draw(st.booleans()):
            return Schedule.parse(DUALPIPE)
        return find_recipe("chimera")(draw(st.integers(1, 4)), microbatches)
    devices = draw(st.integers(1, 3))
    to = draw(st.lists(st.integers(0, 2), min_size=microbatches, max_size=microbatches))
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    stage = draw(st.integers(0, devices - 1))
    return spread(name, devices, microbatches, stage, to, draw(st.booleans()))


@pytest.mark.smoke
@settings(max_examples=200 if DEEP else 4)
@given(schedules(), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([None, 0.05]))
def test_copies_train_as_a_loop_that_sums_in_the_same_parts(
    schedule: Schedule, optimizer: str, clip: float | None
) -> None:
    model, data = make("mlp", 3, 7)
    alone = copied(model, schedule, OPTIMIZERS[optimizer])
    alone.clip = clip
    even = [str(stage * 6 // schedule.stages) for stage in range(1, schedule.stages)]
    with fxpipe.compile(
        model,
        schedule.devices,
        schedule=schedule,
        loss=MSE,
        optimizer=OPTIMIZERS[optimizer],
        partition=even or "auto",
        clip_norm=clip,
    ) as pipe:
        losses = [pipe.step(x, target=y) for x, y in data]
        assert all(map(torch.equal, losses, alone.run(data)))
        alone.assert_same(model)
        assert pipe.kept == dict(enumerate(pipe.schedule.kept().stages))


def test_without_an_optimizer_gradients_are_added_to_those_that_are_there() -> None:
    model, data = make("mlp", 2, 8)
    schedule = find_recipe("chimera")(2, 4)
    alone = copied(model, schedule)
    with compiled(model, 2, 4, None, schedule="chimera") as pipe:  # type: ignore[arg-type]
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), alone.backward(x, y))
            loop.assert_same(loop.gradients(model), loop.gradients(alone.model))


def test_what_stands_on_a_device_is_as_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while it runs, and written down: p/2 + 1 … p, of two stages each."""
    most: dict[int, int] = {}
    keep = Store.keep

    def counted(store: Store, *given: Any) -> None:
        keep(store, *given)
        most[id(store)] = max(most.get(id(store), 0), sum(store.kept.values()))

    monkeypatch.setattr(Store, "keep", counted)
    p, m = 4, 8
    model, [(x, y)] = make("mlp", 1, m)
    with compiled(model, p, m, schedule="chimera") as pipe:
        pipe.step(x, target=y)
        assert sorted(most.values()) == sorted(standing(p))


def standing(p: int) -> list[int]:
    """Device → the most micro-batches that Chimera keeps there at once."""
    return [min(p // 2 + 1 + min(d, p - 1 - d), p) for d in range(p)]


def test_random_masks_do_not_depend_on_the_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
    )
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    found: list[Tensor] = []
    for schedule in ("1f1b", "chimera"):
        with compiled(copy.deepcopy(model), 4, 4, schedule=schedule) as pipe:
            torch.manual_seed(1)
            found.append(pipe.step(x, target=y))
    assert torch.equal(*found)


@pytest.mark.smoke
def test_recomputed_copies_give_the_same() -> None:
    model, data = make("mlp", 2, 8)
    alone = copied(model, find_recipe("chimera")(4, 4), ADAMW)
    with compiled(model, 4, 4, ADAMW, schedule="chimera", recompute="always") as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        alone.assert_same(model)


def test_a_short_batch_leaves_copies_out_that_have_nothing_to_do() -> None:
    model, [(x, y)] = make("mlp", 1, 8)
    alone = copied(model, find_recipe("chimera")(2, 4), ADAMW)
    with compiled(model, 2, 4, ADAMW, schedule="chimera") as pipe:
        for samples in (8, 1, 3):
            alone.microbatches = min(4, samples)
            made = pipe.step(x[:samples], target=y[:samples])
            assert torch.equal(made, alone.step(x[:samples], y[:samples]))
        alone.assert_same(model)


def test_calls_and_checkpoints_know_of_no_copies(tmp_path: Path) -> None:
    model, data = make("mlp", 4, 8)
    alone = copied(model, find_recipe("chimera")(2, 4), ADAMW)
    other = copy.deepcopy(model)
    with compiled(model, 2, 4, ADAMW, schedule="chimera") as pipe:
        for x, y in data[:2]:
            pipe.step(x, target=y)
        alone.run(data[:2])
        torch.testing.assert_close(pipe(data[0][0]), alone.model(data[0][0]))
        pipe.save(tmp_path / "whole")
    with compiled(other, 2, 4, ADAMW, schedule="chimera") as pipe:
        pipe.prepare(data[0][0], target=data[0][1])
        pipe.load(tmp_path / "whole")
        for x, y in data[2:]:
            pipe.step(x, target=y)
        alone.run(data[2:])
        alone.assert_same(other)


@pytest.mark.parametrize("kind", [Share, Give, Add])
def test_a_failure_between_copies_leaves_the_weights_as_they_were(
    monkeypatch: pytest.MonkeyPatch, kind: type[ins.Instruction]
) -> None:
    model, [(x, y)] = make("mlp", 1, 8)
    alone = copied(model, find_recipe("chimera")(2, 4), ADAMW)
    before = copy.deepcopy(model.state_dict())

    def fails(machine: Machine, instruction: ins.Instruction) -> None:
        raise ValueError("on purpose")

    with compiled(model, 2, 4, ADAMW, schedule="chimera") as pipe:
        with monkeypatch.context() as patched:
            patched.setitem(interpreter.HANDLERS, kind, fails)
            with pytest.raises(ExecutionError, match=f"{kind.__name__.lower()} s[01]"):
                pipe.step(x, target=y)
        loop.assert_same(model.state_dict(), before)
        assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        alone.assert_same(model)


@pytest.mark.smoke
def test_batchnorm_is_refused_unless_its_statistics_wait() -> None:
    with pipe_of(2, "chimera") as pipe:
        x, y = batch()
        with pytest.raises(InputError, match="stage 0 on several devices, and its forward writes"):
            pipe.step(x, target=y)
    states: list[dict[str, Tensor]] = []
    for schedule in ("1f1b", "chimera"):
        with pipe_of(2, schedule, extensions=["deferred_batchnorm"]) as pipe:
            pipe.step(x, target=y)
            states.append(pipe.state_dict())
    loop.assert_same(states[1], states[0], bound=1e-6)
    assert any("running_mean" in name for name in states[0])


@pytest.mark.smoke
def test_other_devices_are_refused_by_name() -> None:
    recipe = find_recipe("chimera")
    check_copies(recipe, torch.device("cpu"))
    with pytest.raises(InputError, match=r"'chimera', which has .* not possible on cuda devices"):
        check_copies(recipe, torch.device("cuda", 0))


@pytest.mark.smoke
def test_without_the_extension_a_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "check_copies", "share")
    with pytest.raises(InputError, match="schedule 'chimera' needs the extension"):
        pipe_of(2, "chimera")
