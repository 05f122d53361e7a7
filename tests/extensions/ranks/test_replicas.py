"""Replicas of a pipeline give the bits of plain loops over their batches, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe import LossWeight
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import replicated_loop
from tests.oracles.replicated_loop import ReplicatedLoop

Results = dict[str, Tensor]
STEPS = 10 if DEEP else 4
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Scaled(nn.Linear):
    """It has a parameter of no dimension."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Model(nn.Module):
    """Four parts with BatchNorm, a convolution, a skip and a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3, padding=1)
        self.second = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.Conv1d(6, 6, 1))
        self.third = nn.Sequential(nn.Flatten(), nn.Linear(30, 7), nn.Tanh())
        self.fourth = Scaled(12 + 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a)
        c = self.third(b)
        out: Tensor = self.fourth(torch.cat([c, a.mean(2)], 1))
        return out


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, replica: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(samples, 2, 5, generator=generator)
    return x, torch.randn(samples, 3, generator=generator)


def pipe_of(
    mesh: DeviceMesh,
    *,
    shards: bool = False,
    in_order: bool = False,
    extensions: Sequence[Any] = (),
    **options: Any,
) -> fxpipe.Pipeline:
    """A pipe over replicas, whose sums are in many buckets."""
    devices = mesh["pp"].size()
    stages = devices * (2 if options.get("schedule") in ("interleaved-1f1b", "dualpipe-v") else 1)
    cuts = {1: [], 2: ["third"], 4: ["second", "third", "fourth"]}
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": OPTIMIZERS["adamw"],
        "partition": cuts[stages],
    }
    extensions = [fxpipe.Replicas(shards, bucket_cap_mb=1e-4, in_order=in_order), *extensions]
    return fxpipe.compile(made(), mesh, extensions=extensions, **{**defaults, **options})


def trained(
    mesh: DeviceMesh, optimizer: str = "adamw", steps: int = STEPS, scale: float = 1, **options: Any
) -> Results:
    """The losses of some steps, and the whole state after them."""
    replica = mesh["dp"].get_local_rank()
    if scale != 1:
        options["scaler"] = torch.amp.GradScaler(mesh.device_type, init_scale=scale)
    found: Results = {}
    with pipe_of(mesh, optimizer=OPTIMIZERS[optimizer], **options) as pipe:
        for step in range(steps):
            x, y = batch(step, replica)
            found[f"loss {step}"] = pipe.step(x, target=y).clone()
        pipe.flush()
        found |= pipe.state_dict(full=True)
        found |= pipe.state_dict()  # this rank's own, as in every replica
    return found


def looped(
    replicas: int,
    optimizer: str = "adamw",
    steps: int = STEPS,
    scale: float = 1,
    schedule: str = "1f1b",
    clip_norm: float | None = None,
) -> Results:
    """The same in plain loops."""
    model = made()
    made_by = OPTIMIZERS[optimizer](model.parameters())
    late = {"2bw": ("first", "second", "third", "fourth"), "pipedream": ("first", "second")}
    delayed = late.get(schedule, ())  # by a version; PipeDream's last stage reads the newest
    plain = ReplicatedLoop(
        model, made_by, F.mse_loss, 4, lambda name: int(name.startswith(delayed))
    )
    plain.clip, plain.scale = clip_norm, scale
    found: Results = {}
    for step in range(steps):
        x, y = zip(*(batch(step, replica) for replica in range(replicas)), strict=True)
        found[f"loss {step}"] = plain.step(x, y)
    return found | copy.deepcopy(model.state_dict())


CASES: Mapping[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "optimizer": "sgd"},
    "1f1b": {"schedule": "1f1b", "optimizer": "adamw"},
    "zb-h1": {"schedule": "zb-h1", "optimizer": "adam"},
    "interleaved-1f1b": {"schedule": "interleaved-1f1b", "optimizer": "sgd"},
    "dualpipe-v": {"schedule": "dualpipe-v", "optimizer": "adam"},
    "2bw": {"schedule": "2bw", "optimizer": "adamw"},
    "pipedream": {"schedule": "pipedream", "optimizer": "sgd"},
    "clipped": {"clip_norm": 0.05, "optimizer": "sgd"},
    "clipped, 2bw": {"clip_norm": 0.05, "schedule": "2bw", "optimizer": "adam"},
    "scaled": {"scale": 256.0, "clip_norm": 0.05, "schedule": "zb-h1"},
}
SHAPES = {
    (2, 2): ["dualpipe-v", "pipedream", "scaled"],
    (3, 1): ["zb-h1", "clipped, 2bw"],
}
if DEEP:
    SHAPES = {(2, 2): [*CASES], (3, 1): ["1f1b", "2bw", *SHAPES[3, 1]], (4, 1): ["zb-h1", "2bw"]}


def run_cases(mesh: DeviceMesh, names: list[str]) -> list[Results]:
    return [trained(mesh, **CASES[name]) for name in names]


@pytest.mark.parametrize("shape", [*SHAPES])
def test_replicas_give_the_bits_of_plain_loops(shape: tuple[int, int]) -> None:
    replicas, devices = shape
    ranks = on_ranks(replicas * devices, run_cases, SHAPES[shape], replicas=replicas)
    for index, name in enumerate(SHAPES[shape]):
        expected = looped(replicas, **CASES[name])
        for rank in ranks:
            assert_equal(rank[index], expected, name)


def assert_equal(found: Results, expected: Results, name: str) -> None:
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        assert torch.equal(found[key], value), f"{name}: {key}: {found[key]} is not {value}"


# what replicas do with batches that differ

SIZES = ((8, 8), (8, 5), (3, 8), (8, 8))
"""Step → replica → how many samples its batch has; the last ones as the first."""


def classes(step: int, replica: int, samples: int) -> tuple[Tensor, Tensor]:
    """A batch with classes, many of which are ignored; in one replica's second batch all are."""
    x, y = batch(step, replica, samples)
    target = torch.where(y[:, 1] > 0.3, -100, y.argmax(1))
    target[0] = 1
    return x, torch.full_like(target, -100) if (step, replica) == (1, 1) else target


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().sum()


def masked(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target).square() * (target > 0)).sum() / (target > 0).sum()


def positive(target: Tensor) -> Tensor:
    return (target > 0).sum()


OBJECTIVES: Mapping[str, dict[str, Any]] = {
    "samples": {},
    "ignored": {"loss": F.cross_entropy, "data": classes, "weight": counted},
    "sum": {"loss": squares, "reduction": "sum", "weight": lambda y: 1.0},
    "weighted": {"loss": masked, "extensions": [LossWeight(positive)], "weight": positive},
}

OVER = (
    {2: [*OBJECTIVES], 4: [*OBJECTIVES]}
    if DEEP
    else {2: ["samples", "sum"], 4: ["ignored", "weighted"]}
)
"""Ranks of two replicas → what is trained on them."""


def uneven(
    mesh: DeviceMesh,
    names: Sequence[str] = tuple(OBJECTIVES),
    look: Callable[[fxpipe.Pipeline, Results], object] = lambda *_: None,
) -> dict[str, Results]:
    """The losses and gradients of batches of other sizes in each replica, with what ``look`` adds
    to them for each pipe."""
    replica, every = mesh["dp"].get_local_rank(), {}
    for name in names:
        wanted = OBJECTIVES[name]
        options = {key: value for key, value in wanted.items() if key not in ("data", "weight")}
        found: Results = {}
        with pipe_of(mesh, optimizer=None, **options) as pipe:
            for step, sizes in enumerate(SIZES):
                x, y = wanted.get("data", batch)(step, replica, sizes[replica])
                found[f"loss {step}"] = pipe.step(x, target=y).clone()
            own = pipe.state_dict()
            for key, parameter in pipe.named_parameters():
                if key in own:
                    assert parameter.grad is not None
                    found[key] = parameter.grad.clone()
            assert pipe.program.replicas == 2
            look(pipe, found)
        every[name] = found
    return every


@pytest.mark.parametrize("size", OVER)
def test_losses_count_in_the_batches_of_all_replicas(size: int) -> None:
    ranks = on_ranks(size, uneven, OVER[size], replicas=2)
    for name in OVER[size]:
        model, wanted = made(), OBJECTIVES[name]
        weight = wanted.get("weight")
        total = wanted.get("reduction") == "sum"
        expected: Results = {}
        for step, sizes in enumerate(SIZES):
            batches = [wanted.get("data", batch)(step, r, size) for r, size in enumerate(sizes)]
            x, y = zip(*batches, strict=True)
            loss = wanted.get("loss", F.mse_loss)
            expected[f"loss {step}"] = replicated_loop.train(
                model, min(4, *sizes), x, y, loss=loss, weight=weight, total=total
            )
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected[key] = parameter.grad
        for found in (rank[name] for rank in ranks):
            assert_equal(found, {key: expected[key] for key in found}, name)
        assert {key for rank in ranks for key in rank[name]} == expected.keys()


GROWING = ((8, 8), (8, 9), (11, 8))
"""The same as SIZES; the first are equal, as the replicas decide with them."""


def decided(mesh: DeviceMesh) -> Results:
    """The number of micro-batches that is decided on, losses, and the gradients of all stages."""
    replica = mesh["dp"].get_local_rank()
    options: dict[str, Any] = {"schedule": "auto", "partition": "auto"}
    with pipe_of(mesh, microbatches=None, optimizer=None, **options) as pipe:
        found: Results = {}
        for step, sizes in enumerate(GROWING):
            x, y = batch(step, replica, sizes[replica])
            found[f"loss {step}"] = pipe.step(x, target=y).clone()
            found[f"microbatches {step}"] = torch.tensor(pipe.program.microbatches)
        own = pipe.state_dict()
        for key, parameter in pipe.named_parameters():
            if key in own:
                assert parameter.grad is not None
                found[key] = parameter.grad.clone()
    return found


@pytest.mark.deep
def test_replicas_whose_batches_grow_apart_decide_once_and_together() -> None:
    ranks = on_ranks(4, decided, replicas=2)
    model = made()
    expected: Results = {}
    for step, sizes in enumerate(GROWING):
        count = ranks[0][f"microbatches {step}"]
        x, y = zip(*(batch(step, r, size) for r, size in enumerate(sizes)), strict=True)
        expected[f"loss {step}"] = replicated_loop.train(model, int(count), x, y, loss=F.mse_loss)
        expected[f"microbatches {step}"] = ranks[0]["microbatches 0"]
    expected |= {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    for found in ranks:
        assert_equal(found, {key: expected[key] for key in found}, "auto")
    assert {key for rank in ranks for key in rank} == expected.keys()
