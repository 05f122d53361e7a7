"""Replicas that each keep a part of the optimizers' state train as those that keep all of it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.counted import counted
from fxpipe.errors import InputError
from fxpipe.extensions.replicas.collectives import Collectives
from fxpipe.extensions.replicas.exchanges import owners
from fxpipe.ir.program import Program
from tests.extensions.ranks.test_replicas import (
    CASES,
    OPTIMIZERS,
    STEPS,
    Results,
    assert_equal,
    batch,
    looped,
    made,
    pipe_of,
    trained,
)
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Tiny
from tests.oracles.replicated_loop import ReplicatedLoop

pytestmark = pytest.mark.usefixtures("one_thread")

SHARDED = [fxpipe.Replicas(shard_optimizer=True)]
SHAPES = {
    (2, 2): ["interleaved-1f1b", "clipped, 2bw"],
    (3, 1): ["1f1b"],
}
if DEEP:
    SHAPES = {(2, 2): [*CASES], (3, 1): ["1f1b", "2bw", "clipped"]}


def run_cases(mesh: DeviceMesh, names: list[str]) -> list[Results]:
    return [trained(mesh, shards=True, **CASES[name]) for name in names]


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [*SHAPES])
def test_sharded_optimizers_give_the_bits_of_whole_ones(shape: tuple[int, int]) -> None:
    replicas, devices = shape
    ranks = on_ranks(replicas * devices, run_cases, SHAPES[shape], replicas=replicas)
    for index, name in enumerate(SHAPES[shape]):
        expected = looped(replicas, **CASES[name])
        for rank in ranks:
            assert_equal(rank[index], expected, name)


GRID = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "2bw") if DEEP else ("zb-h1",)
KINDS = (*OPTIMIZERS,) if DEEP else ("adamw",)


def recording(name: str, logs: dict[int, list[list[Tensor]]]) -> Callable[..., Any]:
    """An optimizer that notes the gradients of each of its steps, under its first parameter's
    id."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[name](parameters)
        kind: Any = type(made)

        class Recording(kind):  # type: ignore[misc]
            def step(self, closure: Any = None) -> None:
                every = [p for group in self.param_groups for p in group["params"]]
                logs.setdefault(id(every[0]), []).append([p.grad.clone() for p in every])
                super().step()

        made.__class__ = Recording
        return made

    return make


def grid(mesh: DeviceMesh) -> dict[tuple[str, str, bool], tuple[Results, Results]]:
    """Schedule, optimizer and whether it is sharded → losses and weights, and all gradients."""
    replica, found = mesh["dp"].get_local_rank(), {}
    for case in product(GRID, KINDS, (False, True)):
        logs: dict[int, list[list[Tensor]]] = {}
        seen: Results = {}
        schedule, name, shards = case
        optimizer = recording(name, logs)
        with pipe_of(mesh, schedule=schedule, optimizer=optimizer, shards=shards) as pipe:
            for step in range(STEPS):
                x, y = batch(step, replica)
                seen[f"loss {step}"] = pipe.step(x, target=y).clone()
            pipe.flush()
            seen |= pipe.state_dict()
            names = {parameter: key for key, parameter in pipe.named_parameters()}
            gradients = {
                f"{names[parameter]} {step}": gradient
                for each in filter(None, made_by(pipe))
                for step, own in enumerate(logs[id(each.param_groups[0]["params"][0])])
                for parameter, gradient in zip(each.param_groups[0]["params"], own, strict=True)
            }
        found[case] = seen, gradients
    return found


def test_losses_gradients_and_weights_are_those_of_a_loop_with_and_without_shards() -> None:
    ranks = on_ranks(4, grid, replicas=2)
    for schedule, name, shards in ranks[0]:
        logs: dict[int, list[list[Tensor]]] = {}
        model = made()
        optimizer = recording(name, logs)(model.parameters())
        delay = int(schedule == "2bw")
        loop = ReplicatedLoop(model, optimizer, F.mse_loss, 4, lambda _, d=delay: d)
        expected: Results = {}
        for step in range(STEPS):
            x, y = zip(*(batch(step, replica) for replica in range(2)), strict=True)
            expected[f"loss {step}"] = loop.step(x, y)
        expected |= model.state_dict()
        names = [key for key, _ in model.named_parameters()]
        for found in ranks:
            seen, gradients = found[schedule, name, shards]
            assert_equal(seen, {key: expected[key] for key in seen}, f"{schedule} {name}")
            whole = {
                f"{key} {step}": g
                for step, own in enumerate(logs[id(optimizer.param_groups[0]["params"][0])])
                for key, g in zip(names, own, strict=True)
            }
            assert len(gradients) >= STEPS
            assert_equal(gradients, {key: whole[key] for key in gradients}, f"{schedule} {name}")


def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices alone."""
    plain = [p for p in parameters if p.ndim < 2]
    matrices = [p for p in parameters if p.ndim >= 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}], lr=0.01
    )


def state_bytes(pipe: fxpipe.Pipeline) -> int:
    """The bytes of what the optimizers keep for elements."""
    states = [state for each in made_by(pipe) if each for state in each.state.values()]
    return sum(v.nbytes for state in states for key, v in state.items() if key != "step")


def figures(mesh: DeviceMesh) -> dict[str, Any]:
    """What sharding saves and sends, with groups of parameters and learning rates that change."""
    replica, found = mesh["dp"].get_local_rank(), dict[str, Any]()
    for schedule in ("1f1b", "2bw"):
        for shards in (False, True):
            with pipe_of(mesh, schedule=schedule, optimizer=groups, shards=shards) as pipe:
                x, y = batch(0, replica)
                pipe.prepare(x, target=y)
                rate = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.5)
                for step in range(3):
                    x, y = batch(step, replica)
                    pipe.step(x, target=y)
                    rate.step()
                pipe.flush()
                if shards:
                    with pytest.raises(InputError, match=r"use pipe\.save and pipe\.load"):
                        pipe.optimizer.state_dict()
                program, simulated = pipe.program, pipe.simulate(steps=3)
                assert Program.parse(str(program)) == program.verify()
                group: Any = pipe._group
                device, sent = group.device, simulated.summed(replica)
                assert group.summed == sent[device] > 0
                found[f"{schedule} {shards}"] = pipe.state_dict(full=True)
                found[f"{schedule} {shards} state"] = state_bytes(pipe), sent
                memory = [each.parts["optimizer"] for each in simulated.memory]
                found[f"{schedule} {shards} memory"] = memory, repr(pipe).count("memory")
    return found


@pytest.mark.smoke
def test_optimizer_state_is_divided_by_the_replicas_and_half_as_many_bytes_more_are_sent() -> None:
    ranks = on_ranks(3, figures, replicas=3)
    for schedule in ("1f1b", "2bw"):
        whole, part = f"{schedule} False", f"{schedule} True"
        for rank in ranks:
            assert_equal(rank[part], rank[whole], schedule)
            assert rank[f"{part} memory"] == ranks[0][f"{part} memory"]
        full = ranks[0][f"{whole} state"][0]
        sent, parts_sent = (
            sum(sum(rank[f"{kind} state"][1]) for rank in ranks) for kind in (whole, part)
        )
        parts = [rank[f"{part} state"][0] for rank in ranks]
        assert sum(parts) == full == 2 * 4 * sum(p.numel() for p in made().parameters())
        assert max(parts) - min(parts) <= 2 * 4 * max(p.numel() for p in made().parameters())
        assert parts_sent == sent * 3 // 2
        assert ranks[0][f"{part} memory"][0][0] < ranks[0][f"{whole} memory"][0][0]


def let_go(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, after which gloo's threads have time to let go of what they have sent: they
    hold the tensors of a collective for a moment longer than its ``wait``."""

    def called(*args: Any) -> Any:
        found = method(*args)
        time.sleep(0.1)
        return found

    return called


def peaks(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The predicted and the counted peak of memory of steps: of a few samples, of which the update
    is the largest part, and of many."""
    found = []
    for name in ("_waited", "all_gather", "gather_weights"):
        setattr(Collectives, name, let_go(getattr(Collectives, name)))
    for schedule, shards, cap, rows, kind in (
        ("1f1b", True, math.inf, 512, "adam"),
        ("1f1b", True, 0.05, 16, "adam"),
        ("1f1b", True, 0.1, 16, "sgd"),
        ("1f1b", False, 0.1, 2048, "adam"),
        ("gpipe", False, 0.1, 2048, "adam"),
        ("zb-h1", True, 0.1, 512, "sgd"),
        ("2bw", False, math.inf, 16, "adam"),
        ("2bw", True, math.inf, 16, "adam"),
    ):
        torch.manual_seed(0)
        layers = [each for _ in range(4) for each in (nn.Linear(128, 128), nn.Tanh())]
        x = torch.randn(rows, 128)
        extensions: list[Any] = [fxpipe.Replicas(shards, cap)]
        extensions += ["offload"] if schedule == "gpipe" else []
        with fxpipe.compile(
            nn.Sequential(*layers),
            mesh,
            schedule=schedule,
            loss=F.mse_loss,
            microbatches=4,
            optimizer=OPTIMIZERS[kind],
            extensions=extensions,
        ) as pipe:
            pipe.prepare(x, target=x)
            with counted(pipe) as (device,):
                for step in range(4):
                    if step == 2:
                        device.clear()
                    pipe.step(x, target=x)
            found.append((pipe.simulate().memory[0].peak, device.peak))
    return found


def test_the_memory_of_a_step_of_replicas_is_as_predicted() -> None:
    """Where batches overlap, it depends on the other replica's pace what is held at once: there the
    prediction is the most that there can be."""
    for found in on_ranks(2, peaks, replicas=2):
        *flushed, whole, sharded = found
        for predicted, held in flushed:
            assert predicted == pytest.approx(held, rel=0.03), found
        for predicted, held in (whole, sharded):
            assert held / 1.03 <= predicted < 2 * held, found


class Normed(torch.optim.Optimizer):
    """Steps by the norm of each whole gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


def normed(mesh: DeviceMesh) -> list[Results]:
    """The weights that an optimizer makes that needs whole gradients, whole and sharded."""
    found = []
    for shards in (False, True):
        with pipe_of(mesh, optimizer=Normed, shards=shards) as pipe:
            for step in range(STEPS):
                x, y = batch(step, mesh["dp"].get_local_rank())
                pipe.step(x, target=y)
            found.append(pipe.state_dict(full=True))
    return found


def test_an_optimizer_that_needs_whole_parameters_trains_in_shards() -> None:
    for whole, sharded in on_ranks(2, normed, replicas=2):
        assert_equal(sharded, whole, "normed")


@pytest.mark.smoke
def test_parameters_are_dealt_out_by_bytes() -> None:
    loads = [0, 0]
    assert owners([5, 1, 4, 3, 2], loads) == [0, 0, 1, 1, 0]
    assert loads == [8, 7]
    assert owners([4, 4], loads) == [1, 0]  # of another stage of the device
    assert loads == [12, 11]
    assert owners([7], [0, 0, 0]) == [0]
    assert owners([], loads) == []


@pytest.mark.smoke
def test_what_cannot_be_sharded_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="there is no optimizer; give optimizer="):
        fxpipe.compile(Tiny(), 2, extensions=SHARDED)
    for cap in (0, -1, "25", None, True):
        with pytest.raises(InputError, match=r"bucket_cap_mb is .*; give a number of MiB above 0"):
            given = fxpipe.Replicas(bucket_cap_mb=cap)  # type: ignore[arg-type]
            fxpipe.compile(Tiny(), 2, extensions=[given])
    with pytest.raises(InputError, match="shard_optimizer is 1; give True or False"):
        given = fxpipe.Replicas(shard_optimizer=1)  # type: ignore[arg-type]
        fxpipe.compile(Tiny(), 2, extensions=[given])


class Chooses(nn.Module):
    """Uses one of two layers, as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) if x.sum() > 0 else self.second(x)
        return y


def unlike(mesh: DeviceMesh) -> str:
    """What a step says in which replicas have gradients for other parameters."""
    model, x = nn.Sequential(Chooses(), nn.Linear(4, 2)), torch.ones(4, 4)
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss}
    with (
        fxpipe.compile(model, mesh, extensions=[fxpipe.LeafModules("0")], **options) as pipe,
        pytest.raises(fxpipe.ExecutionError) as raised,
    ):
        pipe.step(x * (1 - 2 * mesh["dp"].get_local_rank()), target=torch.zeros(4, 2))
    return str(raised.value)


def test_a_parameter_that_a_replica_leaves_out_is_named() -> None:
    for told in on_ranks(2, unlike, replicas=2):
        assert re.search(r"'0\.(first|second)\.weight' has no gradient in this batch", told)


def late_leaf(mesh: DeviceMesh) -> Results:
    """Some overlapping batches of a model of which a module is called as it is."""
    return trained(mesh, steps=6, schedule="2bw", extensions=[fxpipe.LeafModules("second")])


@pytest.mark.smoke
def test_leaf_modules_train_over_replicas_in_batches_that_overlap() -> None:
    expected = looped(2, steps=6, schedule="2bw")
    for rank in on_ranks(2, late_leaf, replicas=2):
        assert_equal(rank, {key: expected[key] for key in rank}, "2bw")


def test_one_replica_shards_nothing() -> None:
    x, y = batch(0, 0)
    states = []
    for shards in (False, True):
        with fxpipe.compile(
            made(),
            1,
            loss=F.mse_loss,
            optimizer=OPTIMIZERS["adamw"],
            extensions=SHARDED if shards else [],
            microbatches=2,
        ) as pipe:
            pipe.step(x, target=y)
            assert "gather_weights" not in pipe.program.opcodes
            states.append({key: value.clone() for key, value in pipe.state_dict().items()})
    assert_equal(states[1], states[0], "one replica")


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=4), st.integers(1, 5)
)
def test_no_replica_has_more_than_its_part_and_the_largest_parameter(
    stages: list[list[int]], replicas: int
) -> None:
    loads = [0] * replicas
    for sizes in stages:
        assert len(owners(sizes, loads)) == len(sizes)
    whole = sum(map(sum, stages))
    assert sum(loads) == whole
    assert max(loads) <= whole / replicas + max(map(max, filter(None, stages)), default=0)
