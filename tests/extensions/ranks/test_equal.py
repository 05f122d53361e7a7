"""Whatever runs on the devices of one process gives the same bits on several ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

Devices = DeviceMesh | int

Results = dict[str, Any]


class Skips(nn.Module):
    """Four parts with BatchNorm, dropout, and skips to the next part but one and to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.5), nn.ReLU())
        self.fourth = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a)
        c = self.third(b + a)
        out: Tensor = self.fourth(torch.cat([c, a], 1))
        return out


class Tied(nn.Module):
    """The last part reads the embedding of the first, and the batch's length travels along."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.fourth = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.third(torch.tanh(self.second(self.embed(tokens))))
        return F.linear(self.fourth(h), self.embed.weight)


def images(step: int, samples: int = 8) -> Tensor:
    return torch.randn(samples, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Tensor:
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(step))


def token_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def pipe_of(devices: Devices, model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    count = devices if isinstance(devices, int) else devices.size()
    schedule = options.setdefault("schedule", "1f1b")
    stages = count * (2 if schedule in ("interleaved-1f1b", "zb-v") else 1)
    parts = ["first" if isinstance(model, Skips) else "embed", "second", "third", "fourth"]
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.mse_loss if isinstance(model, Skips) else token_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "partition": {1: [], 2: ["third"], 3: parts[1:3], 4: parts[1:]}[stages],
    }
    places = ["cpu"] * count if isinstance(devices, int) else devices
    return fxpipe.compile(model, places, **{**defaults, **options})


def state(pipe: fxpipe.Pipeline) -> Results:
    """What this process owns: weights, buffers and gradients."""
    own = {f"state {name}": value.clone() for name, value in pipe.state_dict().items()}
    grads = {
        f"grad {name}": parameter.grad.clone()
        for name, parameter in pipe.named_parameters()
        if parameter.grad is not None and f"state {name}" in own
    }
    return own | grads


def train(devices: Devices, model: nn.Module, steps: int = 3, **options: Any) -> Results:
    """Three steps; the losses, and what they leave behind."""
    found: Results = {}
    with pipe_of(devices, model, **options) as pipe:
        for step in range(steps):
            x = images(step) if isinstance(model, Skips) else tokens(step)
            loss = pipe.step(x, target=x)
            found[f"loss {step}"] = loss.clone()
        found |= state(pipe)
        found["batches"] = pipe.batches
        if pipe.grad_norm is not None:
            found["norm"] = pipe.grad_norm
    return found


def skips() -> Skips:
    torch.manual_seed(0)
    return Skips()


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def changing(devices: Devices) -> Results:
    """Other batch sizes, evaluation between steps, outputs, and a call that is differentiated."""
    found: Results = {}
    with pipe_of(devices, skips()) as pipe:
        for step, samples in enumerate((8, 6, 8, 3)):
            x = images(step, samples)
            loss, out = pipe.step(x, target=x, return_output=True)
            found |= {f"loss {step}": loss, f"output {step}": out}
            pipe.eval()
            with torch.no_grad():
                found[f"evaluated {step}"] = pipe(x)
            pipe.train()
        found |= state(pipe)
    return found


def differentiated(devices: Devices) -> Results:
    """The gradients of inputs and parameters of a call of the pipe."""
    with pipe_of(devices, skips(), optimizer=None) as pipe:
        x = images(0).requires_grad_()
        out = pipe(x)
        out.square().mean().backward()
        return {"output": out.detach(), "input": x.grad} | state(pipe)


def uncollected(devices: Devices) -> Results:
    """What a step has made goes with it, while no garbage is collected."""
    with pipe_of(devices, skips()) as pipe:
        pipe.step(images(0), target=images(0))
        pipe.step(images(0), target=images(0))
        gc.collect()
        before = count_tensors()
        gc.disable()
        try:
            for _ in range(3):
                pipe.step(images(0), target=images(0))
            after = min(count_tensors() for _ in range(5))  # a thread may just let go of some
            assert after <= before, f"{after} tensors, and {before} before"
        finally:
            gc.enable()
        return {"batches": pipe.batches}


def count_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def recipes(model: Callable[[], nn.Module], **options: Any) -> Callable[[Devices], Results]:
    return lambda devices: train(devices, model(), **options)


def called(model: Callable[[], nn.Module], **options: Any) -> Callable[[Devices], Results]:
    """``recipes``, with a submodule that is called as it is."""
    return lambda devices: train(
        devices, model(), extensions=[fxpipe.LeafModules("second")], **options
    )


def half(devices: Devices) -> Results:
    kind = "cpu" if isinstance(devices, int) else devices.device_type
    scaler = torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=2)
    found = train(devices, skips(), scaler=scaler, clip_norm=0.1)
    return found | {"scale": scaler.get_scale()}


def own_task(devices: Devices) -> Results:
    """A schedule that was written by hand, with a task that halves the gradients."""

    def run(context: fxpipe.TaskContext) -> None:
        for gradient in context.gradients.values():
            gradient.mul_(0.5)

    halve = fxpipe.define_task(
        "H", "halve", run=run, cost=0.1, reads=("gradients",), writes=("gradients",)
    )

    def naive(device: int, devices: int, microbatches: int) -> Iterator[fxpipe.Task]:
        for i in range(microbatches):
            yield fxpipe.F(i)
            yield fxpipe.B(i)
        yield halve()
        yield fxpipe.U()

    found = train(devices, skips(), schedule=naive)
    plain = train(devices, skips(), schedule="naive")
    assert any(not torch.equal(found[n], plain[n]) for n in found if n.startswith("state"))
    return found


CASES: Mapping[str, Callable[[Devices], Results]] = {
    "1f1b": recipes(skips),
    "gpipe": recipes(skips, schedule="gpipe"),
    "zb-h1": recipes(skips, schedule="zb-h1"),
    "2bw": recipes(skips, schedule="2bw"),
    "pipedream": recipes(skips, schedule="pipedream"),
    "tied, pipedream": recipes(tied, schedule="pipedream"),
    "tied": recipes(tied),
    "tied, 2bw": recipes(tied, schedule="2bw"),
    "clipped": recipes(skips, clip_norm=0.05),
    "clipped, 2bw": recipes(skips, clip_norm=0.05, schedule="2bw"),
    "scaled": half,
    "recomputed": recipes(skips, recompute="always"),
    "deferred": recipes(skips, extensions=["deferred_batchnorm"]),
    "deferred, 2bw": recipes(skips, extensions=["deferred_batchnorm"], schedule="2bw"),
    "gradients": recipes(skips, optimizer=None),
    "leaf": called(skips),
    "chimera": recipes(
        skips, schedule="chimera", extensions=["deferred_batchnorm"], clip_norm=0.05
    ),
    "chimera, tied": recipes(tied, schedule="chimera"),
    "chimera, leaf": called(tied, schedule="chimera"),
    "chimera, gradients": recipes(tied, schedule="chimera", optimizer=None),
    "own task": own_task,
    "changing": changing,
    "differentiated": differentiated,
    "uncollected": uncollected,
    **({"compiled": recipes(skips, extensions=["inductor"])} if DEEP else {}),  # a minute
}

ONLY_TWO: Mapping[str, Callable[[Devices], Results]] = {
    "interleaved-1f1b": recipes(skips, schedule="interleaved-1f1b"),
    "zb-v": recipes(skips, schedule="zb-v"),
}


LINKS: Mapping[int, Sequence[str]] = {
    2: [
        *("scaled", "recomputed", "deferred"),
        *("leaf", "own task", "differentiated", "chimera", "zb-v"),
    ],
    3: [  # a first rank, one between, and a last one
        *("zb-h1", "tied, 2bw", "clipped, 2bw", "changing"),
    ],
    4: ["pipedream"],
}
"""Ranks → the cases that are run over links; four parts are too few for two on each of more."""

if DEEP:
    LINKS = {2: [*CASES, *ONLY_TWO], 3: [*CASES], 4: [*CASES]}


def run_cases(devices: Devices, names: Sequence[str]) -> dict[str, Results]:
    """Case → its results, with tensors on the CPU."""
    cases = {**CASES, **ONLY_TWO}
    found: dict[str, Results] = {}
    for name in names:
        torch.manual_seed(7)
        try:
            results = cases[name](devices)
            found[name] = {
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in results.items()
            }
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


@pytest.fixture(scope="module")
def on_links() -> Callable[[int], list[dict[str, Results]]]:
    return cache(lambda size: on_ranks(size, run_cases, LINKS[size]))


@pytest.fixture(scope="module")
def alone() -> Callable[[int, str], Results]:
    """What one process gives."""
    return cache(lambda size, name: run_cases(size, [name])[name])


@pytest.mark.parametrize(("size", "name"), [(size, n) for size in LINKS for n in LINKS[size]])
def test_ranks_give_the_bits_of_one_process(
    on_links: Callable[[int], list[dict[str, Results]]],
    alone: Callable[[int, str], Results],
    size: int,
    name: str,
) -> None:
    equal([found[name] for found in on_links(size)], alone(size, name))


def equal(ranks: list[Results], alone: Results) -> None:
    assert "error" not in alone, alone["error"]
    seen: set[str] = set()
    for here in ranks:
        assert "error" not in here, here["error"]
        for key, value in here.items():
            expected = alone[key]
            same = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
            assert same, f"{key}: {value} is not {expected}"
        seen |= here.keys()
    assert seen == alone.keys()


def cast(mesh: DeviceMesh) -> dict[str, float]:
    """The losses of two steps, a call and its backward under autocast, each beside the loop's."""
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    differences: dict[str, float] = {}
    for what in ("step", "call"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        alone = copy.deepcopy(model)
        with fxpipe.compile(model, mesh, microbatches=2, loss=F.mse_loss, partition=["2"]) as pipe:
            for turn in range(2):
                with around():
                    made = pipe.step(x, target=y) if what == "step" else F.mse_loss(pipe(x), y)
                if what == "call":
                    made.backward()
                expected = loop.train(alone, 2, x, loss=F.mse_loss, target=y, around=around)
                differences[f"{what} {turn}"] = float(made.detach() - expected.loss)
            wanted = loop.gradients(alone)
            for name, own in loop.gradients(model).items():
                if own is not None and (other := wanted[name]) is not None:
                    differences[f"{what} {name}"] = float((own - other).abs().max())
    return differences


def test_under_autocast_ranks_train_as_a_loop_does() -> None:
    for differences, layer in zip(on_ranks(2, cast), (0, 2), strict=True):
        for what, bound in (("step", 0), ("call", 1e-3)):  # a call's loss is of all outputs at once
            for kind in (0, 1, f"{layer}.weight", f"{layer}.bias"):
                assert abs(differences[f"{what} {kind}"]) <= bound
