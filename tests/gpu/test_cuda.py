"""Pipes on CUDA devices: they need at least one, and are skipped without."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import DeviceMemoryError, InputError
from fxpipe.runtime.choice import Dispatches
from tests.gpu.real import SIMULATED, needs_gpu
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BOUND = 1e-5
"""How far gradients may be from the loop's: kernels may add in another order."""


class Model(nn.Module):
    """A skip over the middle, and a mask that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mask = torch.arange(64, device=x.device) % 2
        y: Tensor = self.last(torch.relu(self.middle(h) * mask + h))
        return y


def places(stages: int) -> list[str]:
    """One device a stage, as far as there are any; the last stands for the rest."""
    count = torch.cuda.device_count()
    return [f"cuda:{min(stage, count - 1)}" for stage in range(stages)]


def streams(count: int) -> list[Any]:
    """Streams of one GPU as devices."""
    return [torch.cuda.Stream() for _ in range(count)]


@pytest.mark.parametrize("dispatch", ["device", "thread"])
@pytest.mark.parametrize("make", [places, streams])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_gradients_are_the_loops(
    schedule: str, make: Callable[[int], list[Any]], dispatch: Dispatches
) -> None:
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model).cuda()
    x, y = torch.randn(32, 64), torch.randint(8, (32,))
    with fxpipe.compile(
        model,
        make(2),
        schedule=schedule,
        extensions=[fxpipe.Dispatch(dispatch)],
        microbatches=4,
        loss=nn.functional.cross_entropy,
    ) as pipe:
        for _ in range(3):
            made = pipe.step(x, target=y)
            ran = loop.train(alone, 4, x.cuda(), loss=nn.functional.cross_entropy, target=y.cuda())
            assert torch.allclose(made.cpu(), ran.loss.cpu(), atol=BOUND)
        found = at_home(model)
    loop.assert_same(found, at_home(alone), BOUND)


def at_home(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients on the CPU."""
    return {
        name: None if gradient is None else gradient.cpu()
        for name, gradient in loop.gradients(model).items()
    }


def test_parameters_stay_the_same_objects_on_their_stages_devices() -> None:
    model = Model()
    before = dict(model.named_parameters())
    x, y = torch.randn(8, 64), torch.randint(8, (8,))
    with fxpipe.compile(model, places(2), microbatches=2, loss=nn.functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        assert all(p is before[name] and p.is_cuda for name, p in model.named_parameters())


def test_a_step_does_not_wait_for_the_devices() -> None:
    model = Model()
    x, y = torch.randn(8, 64).cuda(), torch.randint(8, (8,)).cuda()
    with fxpipe.compile(model, places(2), microbatches=2, loss=nn.functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pipe.step(x, target=y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_autocast_reaches_every_stage() -> None:
    torch.manual_seed(0)
    model = Model()
    x, y = torch.randn(8, 64), torch.randint(8, (8,))
    with fxpipe.compile(model, places(2), microbatches=2, loss=nn.functional.cross_entropy) as pipe:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pipe.step(x, target=y)
        for stage in pipe.plan.stages:
            made = [node.meta.get("val") for node in stage.graph.graph.nodes]
            assert any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in made)


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_batches_that_overlap_train_as_the_delayed_loop(dispatch: Dispatches) -> None:
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model).cuda()
    loss = nn.functional.mse_loss
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = DelayedLoop(alone, sgd, loss, 4, lambda _: 1)
    batches = [(torch.randn(16, 64), torch.randn(16, 8)) for _ in range(4)]
    with fxpipe.compile(
        model,
        streams(2),
        schedule="2bw",
        extensions=[fxpipe.Dispatch(dispatch)],
        microbatches=4,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    ) as pipe:
        for x, y in batches:
            pipe.step(x, target=y)
            expected.step(x.cuda(), y.cuda())
        found = {name: value.cpu() for name, value in pipe.state_dict().items()}
    wanted = {name: value.cpu() for name, value in alone.state_dict().items()}
    loop.assert_same(found, wanted, BOUND)


@needs_gpu("times are not simulated")
def test_costs_are_those_of_the_device() -> None:
    """A layer of 64 times the work takes far longer, though both are launched as fast."""
    model = nn.Sequential(nn.Linear(4096, 512), nn.Linear(512, 512), nn.Linear(512, 4096 * 8))
    x, y = torch.randn(16384, 4096), torch.randn(16384, 4096 * 8)
    loss = nn.functional.mse_loss
    with fxpipe.compile(model, places(2), microbatches=2, loss=loss, partition=["2"]) as pipe:
        pipe.prepare(x, target=y)
        light, heavy = (stage.costs for stage in pipe.plan.stages)
    assert light is not None and heavy is not None
    assert heavy.forward > 2 * light.forward
    flops = 2 * 8192 * 512 * 4096 * 8
    assert heavy.forward > flops / 2e15  # no GPU is faster


class Greedy(nn.Module):
    """Wants, where the input is above 1e3, more memory than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(greedy(self.first(x), x))
        return y


@torch.library.custom_op("fxpipe_gpu_tests::greedy", mutates_args=())
def greedy(h: Tensor, x: Tensor) -> Tensor:
    if bool((x > 1e3).any()):
        return torch.empty(1 << 45, dtype=torch.uint8, device=h.device)
    return h.clone()


greedy.register_fake(lambda h, x: torch.empty_like(h))
greedy.register_autograd(lambda ctx, gradient: (gradient, None))


def test_without_memory_the_instruction_is_named_and_the_pipe_goes_on() -> None:
    x, y = torch.randn(8, 64), torch.randint(8, (8,))
    loss = nn.functional.cross_entropy
    with fxpipe.compile(Greedy(), places(2), microbatches=4, loss=loss, partition=["last"]) as pipe:
        before = pipe.step(x, target=y).item()
        x[5, 0] = 1e4
        with pytest.raises(DeviceMemoryError) as raised:
            pipe.step(x, target=y)
        error = raised.value
        assert error.microbatch == 2
        assert "the device has no memory left" in str(error)
        x[5, 0] = 0
        assert pipe.step(x, target=y).item() == pytest.approx(before, rel=0.5)


SIMULATOR = """
from tests.simcuda import cuda
cuda.install(1)
cuda.configure(cuda.Mode.{})
"""

LATE = """
import contextlib, torch, fxpipe
from torch import nn
if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    x, y = torch.randint(16, (8, 4)), torch.randint(8, (8, 4))
    loss = lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    pipe = fxpipe.compile(model, ["cuda:0"] * 2, microbatches=4, loss=loss, partition=["2"])
    pipe.step(x, target=y)
    torch.cuda.synchronize()
    x[5, 0] = 1 << 20  # outside of the table: the kernel asserts, on the device
    try:
        for _ in range(2):
            pipe.step(x, target=y)
            with contextlib.suppress(torch.AcceleratorError):
                torch.cuda.synchronize()
    except fxpipe.ExecutionError as error:
        print(type(error).__name__, "|", error, flush=True)
"""


@pytest.mark.parametrize("blocking", [False, True])
def test_a_kernel_that_fails_is_told_by_name_if_launches_wait(blocking: bool) -> None:
    """In a process of its own, which cannot use the device any more after that."""
    first = SIMULATOR.format("EAGER" if blocking else "LAZY") if SIMULATED else ""
    done = subprocess.run(
        [sys.executable, "-c", first + LATE],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1" if blocking else "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    kind, _, told = done.stdout.partition("|")
    assert kind.strip() == ("ExecutionError" if blocking else "DeviceError"), done.stderr
    assert ("s0[2]" if blocking else "CUDA_LAUNCH_BLOCKING=1") in told


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_recomputations_make_the_same_on_a_device(dispatch: Dispatches) -> None:
    losses = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8))
        x, y = torch.randn(8, 64), torch.randint(8, (8,))
        with fxpipe.compile(
            model,
            streams(2),
            microbatches=4,
            extensions=[fxpipe.Dispatch(dispatch)],
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            recompute=recompute,
            partition=["2"],
        ) as pipe:
            losses.append([float(pipe.step(x, target=y)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_devices_that_are_not_there_are_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(InputError, match=f"there is no cuda:{count}; the CUDA devices are cuda:0"):
        fxpipe.compile(Model(), ["cuda:0", f"cuda:{count}"])
    with pytest.raises(InputError, match=f"devices is {count + 1} and there are {count} CUDA"):
        fxpipe.compile(Model(), count + 1)
    with pytest.raises(InputError, match="name devices of one kind"):
        fxpipe.compile(Model(), ["cuda:0", "cpu"])
    stream = torch.cuda.Stream()
    with pytest.raises(InputError, match="stands twice in devices"):
        fxpipe.compile(Model(), [stream, stream])
