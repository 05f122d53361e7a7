"""Replicas that each keep a part of gradients and weights train as those that keep all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from benchmarks.counted import counted
from fxpipe.errors import ExecutionError, InputError
from fxpipe.extensions.replicas.collectives import Collectives
from fxpipe.extensions.sharding import running
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from tests.extensions.ranks.test_replicas import (
    OPTIMIZERS,
    STEPS,
    Results,
    assert_equal,
    batch,
    looped,
    made,
)
from tests.helpers.flushing import FLUSHING
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder
from tests.helpers.tiny import Tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS: dict[int, Any] = {1: [], 2: ["third"], 4: ["second", "third", "fourth"]}
SCHEDULES = FLUSHING if DEEP else ["zb-h1", "looped-bfs"]


def pipe_of(
    mesh: DeviceMesh, kind: str, gathers: str = "runs", ahead: bool | None = None, **options: Any
) -> fxpipe.Pipeline:
    """A pipe over replicas that send gradients in many buckets."""
    stages = find_recipe(options.get("schedule", "1f1b")).stages(mesh["pp"].size())
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": OPTIMIZERS["adamw"],
        "partition": CUTS.get(stages, "auto"),
        "extensions": [fxpipe.Sharding(kind, gathers, ahead, bucket_cap_mb=1e-4)],
    }
    return fxpipe.compile(made(), mesh, **{**defaults, **options})


def trained(
    mesh: DeviceMesh,
    kind: str,
    gathers: str = "runs",
    ahead: bool | None = None,
    scale: float = 1,
    **options: Any,
) -> Results:
    """The losses of some steps, with the state, and an output in eval mode after them."""
    replica = mesh["dp"].get_local_rank()
    if scale != 1:
        options["scaler"] = torch.amp.GradScaler(mesh.device_type, init_scale=scale)
    found: Results = {}
    with pipe_of(mesh, kind, gathers, ahead, **options) as pipe:
        for step in range(STEPS):
            x, y = batch(step, replica)
            found[f"loss {step}"] = pipe.step(x, target=y).clone()
        assert Program.parse(str(pipe.program)) == pipe.program.verify()
        assert pipe.program.buckets
        found |= pipe.state_dict(full=True)
        own = pipe.state_dict()
        assert_equal(own, {name: found[name] for name in own}, "this rank's own")
        pipe.eval()
        with torch.no_grad():
            found["output"] = pipe(batch(0, 0)[0])
    return found


def expected(schedule: str, clip_norm: float | None = None, scale: float = 1) -> Results:
    found = looped(2, "adamw", schedule=schedule, clip_norm=clip_norm, scale=scale)
    model = made()
    model.load_state_dict({n: x for n, x in found.items() if not n.startswith("loss")})
    with torch.no_grad():
        parts = batch(0, 0)[0].split(2)  # as the pipe does
        found["output"] = torch.cat([model.eval()(part) for part in parts])
    return found


def run_cases(mesh: DeviceMesh, cases: list[dict[str, Any]]) -> list[Results]:
    return [trained(mesh, **case) for case in cases]


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        found.append({"kind": "zero3", "schedule": schedule})
        if DEEP or schedule == "zb-h1":
            found.append({"kind": "zero2", "schedule": schedule, "clip_norm": 0.05, "scale": 256.0})
        if DEEP:
            found.append({"kind": "zero3", "schedule": schedule, "gathers": "step"})
        if DEEP or schedule == "looped-bfs":
            found.append({"kind": "zero3", "schedule": schedule, "ahead": True, "clip_norm": 0.05})
    recomputed = {"kind": "zero3", "schedule": "1f1b", "recompute": "always"}
    return [*found, *deep(recomputed)]


@pytest.mark.smoke
def test_losses_weights_and_outputs_have_the_bits_of_a_plain_loop() -> None:
    """Gradients go in buckets."""
    every = cases()
    for rank in on_ranks(4, run_cases, every, replicas=2):
        for case, found in zip(every, rank, strict=True):
            told = ("schedule", "clip_norm", "scale")
            options = {key: value for key, value in case.items() if key in told}
            assert_equal(found, expected(**options), str(case))


WIDTH = 64
LAYER = (WIDTH + 1) * WIDTH * 4
"""The bytes of a layer's weights."""


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def figures(mesh: DeviceMesh, each: int) -> dict[str, tuple[int, int, int, int]]:
    """Bytes of weights at rest, sent in a step, and both as predicted, of four stages of so many
    layers."""
    found, x = {}, torch.randn(16, WIDTH)
    for kind, gathers in (("zero2", "runs"), ("zero3", "runs"), ("zero3", "step")):
        model = layers(4 * each)
        with fxpipe.compile(
            model,
            mesh,
            schedule="looped-bfs",
            partition=[str(each * stage) for stage in (1, 2, 3)],
            microbatches=4,
            loss=F.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            extensions=[fxpipe.Sharding(kind, gathers, bucket_cap_mb=0.01)],
        ) as pipe:
            group: Any = pipe._group
            for _ in range(2):
                before = group.summed
                pipe.step(x, target=x)
            simulated = pipe.simulate()
            found[f"{kind} {gathers}"] = (
                sum(p.nbytes for p in model.parameters() if not p.is_meta),
                group.summed - before,
                simulated.memory[group.device].resting,
                simulated.summed(group.replica)[group.device],
            )
    return found


@pytest.mark.parametrize("each", [1, 2])
def test_bytes_at_rest_and_bytes_sent_are_those_of_the_formulas_and_as_predicted(each: int) -> None:
    """P bytes a device, of N replicas: at rest P / N with zero3. Sent in units of (N − 1) / N · P:
    gradients 1, and weights 1 once a step, or for looped-bfs with two stages a device 3 / 2. A
    bucket has the gradients of a layer. Where a stage has one matrix, the device's other stage
    evens out what its replicas have; what they send is so on average."""
    device, unit = 2 * each * LAYER, each * LAYER
    ranks = on_ranks(4, figures, each, replicas=2)
    for name, rest, sent in (
        ("zero2 runs", device, 2 * unit),
        ("zero3 step", device // 2, 2 * unit),
        ("zero3 runs", device // 2, 5 * unit // 2),
    ):
        found = [rank[name] for rank in ranks]
        assert sum(moved for _, moved, *_ in found) == 4 * sent, name
        for at_rest, moved, *predicted in found:
            assert (at_rest, each == 1 or moved) == (rest, each == 1 or sent), name
            assert predicted == [at_rest, moved], name


def let_go(function: Any) -> Any:
    """The same function, after which gloo's threads have time to let go of what they have sent."""

    def called(*args: Any) -> Any:
        result = function(*args)
        time.sleep(0.05)
        return result

    return called


BUCKET = 129 * 128 * 4
"""The bytes of the gradients of a layer, which fill a bucket of 0.05 MiB."""


def peaks(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The predicted and the counted peak of memory of steps."""
    found = []
    for name in ("await_weights", "added"):
        setattr(running, name, let_go(getattr(running, name)))
    setattr(Collectives, "gather_weights", let_go(Collectives.gather_weights))  # noqa: B010
    for schedule, kind, rows, gathers, bucket in (
        ("looped-bfs", "zero3", 16, "runs", 25),
        ("looped-bfs", "zero3", 512, "runs", 25),
        ("1f1b", "zero3", 64, "step", 25),
        ("1f1b", "zero2", 64, "runs", 25),
        ("looped-bfs", "zero3", 16, "runs", 0.05),
        ("1f1b", "zero2", 64, "runs", 0.05),
    ):
        x = torch.randn(rows, 128)
        torch.manual_seed(0)
        model = nn.Sequential(
            *(each for _ in range(4) for each in (nn.Linear(128, 128), nn.Tanh()))
        )
        with fxpipe.compile(
            model,
            mesh,
            schedule=schedule,
            loss=F.mse_loss,
            microbatches=4,
            optimizer=OPTIMIZERS["sgd"],
            extensions=[fxpipe.Sharding(kind, gathers, bucket_cap_mb=bucket)],
        ) as pipe:
            pipe.prepare(x, target=x)
            assert bool(pipe.program.buckets) == (bucket < 1)
            with counted(pipe) as (device,):
                for step in range(4):
                    if step == 2:
                        device.clear()
                    pipe.step(x, target=x)
            found.append((pipe.simulate().memory[0].peak, device.peak))
    return found


def test_the_memory_of_a_step_is_as_predicted() -> None:
    for found in on_ranks(2, peaks, replicas=2):
        for predicted, held in found[:4]:
            assert predicted == pytest.approx(held, rel=0.01), found
        for predicted, held in found[4:]:  # replicas have other shares of each bucket
            assert predicted == pytest.approx(held, abs=BUCKET + 0.01 * held), found


def continued(
    mesh: DeviceMesh | int,
    kind: str,
    load: Path | None,
    save: Path | None,
    steps: tuple[int, int],
    prepared: bool,
) -> Results:
    """The state after some steps, from one folder and to another."""
    assert isinstance(mesh, DeviceMesh)
    replica = mesh["dp"].get_local_rank()
    extensions = [fxpipe.Sharding(kind) if kind else fxpipe.Replicas()]
    with pipe_of(mesh, kind or "zero2", extensions=extensions) as pipe:
        if prepared:
            x, y = batch(0, replica)
            pipe.prepare(x, target=y)
        if load is not None:
            pipe.load(load)
        for step in range(*steps):
            x, y = batch(step, replica)
            pipe.step(x, target=y)
        if save is not None:
            pipe.save(save)
        state: Results = pipe.state_dict(full=True)
    return state


@pytest.mark.smoke
def test_checkpoints_load_with_any_number_of_replicas_and_devices(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in "abc")
    on_ranks(4, continued, "zero3", None, one, (0, 2), False, replicas=2)
    on_ranks(2, continued, "", one, two, (2, 3), True, replicas=2)
    ranks = on_ranks(2, continued, "zero3", two, three, (3, 5), True, replicas=2)
    wanted = looped(2, "adamw", 5)
    assert_equal(ranks[1], {key: wanted[key] for key in ranks[1]}, "weights")
    with fxpipe.compile(made(), 1, loss=F.mse_loss, optimizer=OPTIMIZERS["adamw"]) as pipe:
        pipe.load(three)
        assert pipe.batches == 5
        assert_equal(pipe.state_dict(), ranks[0], "weights")


def failing(mesh: DeviceMesh) -> Results:
    """A batch with which one rank fails, between others; and a checkpoint that all load again."""
    replica = mesh["dp"].get_local_rank()
    found: Results = {}
    with pipe_of(mesh, "zero3", schedule="looped-bfs") as pipe:
        for step in range(2):
            x, y = batch(step, replica)
            found[f"loss {step}"] = pipe.step(x, target=y).clone()
        pipe.save(shared_folder() / "run")
        held = pipe.state_dict(full=True)
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == 3:
                patch.setattr(running, "drop_others", broken)
            with pytest.raises((ExecutionError, fxpipe.RankError)):
                pipe.step(x, target=y)
        assert_equal(pipe.state_dict(full=True), held, "after a failure")
        x, y = batch(2, replica)
        found["loss 2"] = pipe.step(x, target=y).clone()
        pipe.load(shared_folder() / "run")
        assert torch.equal(pipe.step(x, target=y), found["loss 2"])
        found |= pipe.state_dict(full=True)
    return found


def broken(*_: Any) -> None:
    raise OSError("here")


def test_after_a_failed_step_the_weights_are_as_before_and_all_go_on() -> None:
    wanted = looped(2, "adamw", 3)
    for found in on_ranks(4, failing, replicas=2):
        assert_equal(found, wanted, "a failure")


def refused(mesh: DeviceMesh) -> None:
    x, _ = batch(0, 0)
    with pytest.raises(InputError, match="'2bw' keeps several versions of the weights"):
        pipe_of(mesh, "zero3", schedule="2bw")
    with pytest.raises(InputError, match="leave Replicas out"):
        pipe_of(mesh, "", extensions=[fxpipe.Replicas(), fxpipe.Sharding("zero2")])
    with (
        pipe_of(mesh, "zero3") as pipe,
        pytest.raises(InputError, match="would add gradients; train with step"),
    ):
        pipe(x)


@pytest.mark.smoke
def test_what_cannot_be_sharded_is_refused_before_anything_runs() -> None:
    on_ranks(2, refused, replicas=2)
    with pytest.raises(InputError, match="there is no optimizer; give optimizer="):
        fxpipe.compile(Tiny(), 2, extensions=[fxpipe.Sharding("zero3")])
    for given, what in (
        (fxpipe.Sharding("zero4"), "kind of Sharding is 'zero4'; give 'zero2' or 'zero3'"),
        (
            fxpipe.Sharding("zero3", "often"),
            "gathers of Sharding is 'often'; give 'runs' or 'step'",
        ),
        (fxpipe.Sharding("zero3", ahead=3), "ahead of Sharding is 3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=what):
            fxpipe.compile(Tiny(), 2, optimizer=OPTIMIZERS["sgd"], extensions=[given])


def chosen(mesh: DeviceMesh, extensions: list[Any]) -> tuple[str, float, list[int]]:
    """What "auto" chooses within a limit, and the peaks that it predicts; or why nothing fits."""
    torch.manual_seed(0)
    pairs = ((nn.Linear(128, 128), nn.Tanh()) for _ in range(8))
    model = nn.Sequential(*(each for pair in pairs for each in pair))
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    limit = 800_000.0
    with fxpipe.compile(
        model,
        mesh,
        schedule="auto",
        loss=F.mse_loss,
        memory_limits=limit,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        extensions=extensions,
    ) as pipe:
        try:
            pipe.step(x, target=x)
        except fxpipe.PartitionError as error:
            return str(error), limit, []
        return "fits", limit, [memory.peak for memory in pipe.simulate().memory]


@pytest.mark.deep
def test_an_automatic_schedule_counts_the_memory_that_sharding_saves() -> None:
    for found, limit, peaks in on_ranks(4, chosen, [fxpipe.Sharding("zero3")], replicas=2):
        assert found == "fits"
        assert max(peaks) <= limit
    for found, *_ in on_ranks(4, chosen, [fxpipe.Replicas()], replicas=2):
        assert "too little" in found


class Mixed(nn.Module):
    """Dropout, a BatchNorm, a weight that two stages share, one that nobody trains, and one of no
    element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 6)
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
        shared = nn.Linear(6, 6)
        self.second = nn.Sequential(shared, nn.Tanh())
        self.third = nn.Linear(6, 6, bias=False)
        self.third.weight = shared.weight
        self.head = nn.Linear(6, 9)
        self.head.weight = self.table.weight
        self.still = nn.Parameter(torch.ones(6), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(self.table(x)))
        out: torch.Tensor = self.head(self.third(h) * self.still + self.none.sum())
        return out


def mixed(mesh: DeviceMesh, cases: list[dict[str, Any]]) -> list[Results]:
    """Losses, gradients' norms and states of a model that has a bit of everything."""
    every = []
    for case in cases:
        found: Results = {}
        options: dict[str, Any] = {"schedule": "1f1b", "clip_norm": 0.5, **case}
        with fxpipe.compile(
            Mixed(),
            mesh,
            microbatches=2,
            loss=F.cross_entropy,
            optimizer=OPTIMIZERS["adamw"],
            partition=["second", "third", "head"] if "bfs" in options["schedule"] else ["third"],
            **options,
        ) as pipe:
            torch.manual_seed(3)
            for step in range(3):
                x = torch.arange(8).add(step + mesh["dp"].get_local_rank()).remainder(9)
                found[f"loss {step}"] = pipe.step(x, target=x.flip(0)).clone()
                found[f"norm {step}"] = torch.tensor(pipe.grad_norm)
            found |= pipe.state_dict(full=True)
            pipe.eval()
            with torch.no_grad():
                found["output"] = pipe(x)
        every.append(found)
    return every


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs", "zb-h1"])
def test_draws_statistics_and_tied_weights_are_those_of_whole_weights(schedule: str) -> None:
    kinds: list[Any] = [fxpipe.Replicas(), fxpipe.Sharding("zero2", bucket_cap_mb=1e-4)]
    kinds += [fxpipe.Sharding("zero3", bucket_cap_mb=1e-4), fxpipe.Sharding("zero3", "step")]
    cases = [{"schedule": schedule, "extensions": [kind]} for kind in kinds]
    for whole, *others in on_ranks(4, mixed, cases, replicas=2):
        assert whole["norm 0"] > 0
        for other in others:
            assert_equal(other, whole, schedule)
