"""Stages by CUDA graphs on a real device; skipped without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import green_contexts

import fxpipe
from fxpipe import CaptureError, ExecutionError
from fxpipe.runtime.choice import Dispatches
from tests.extensions.cuda_graphs.captured_pipes import kernels
from tests.oracles import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BOUND = 1e-5
"""How far results may be from those without graphs: a library may choose other kernels."""


class Model(nn.Module):
    """A skip over the middle, statistics, convolutions and products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.last = nn.Linear(8 * 16 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last((self.middle(h) + h).flatten(1))
        return y


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 3, 16, 16, generator=generator)
    return x, torch.randint(5, (16,), generator=generator)


def streams(count: int) -> list[Any]:
    return [torch.cuda.Stream() for _ in range(count)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def compiled(model: nn.Module, devices: list[Any], **options: Any) -> fxpipe.Pipeline:
    given: dict[str, Any] = {"microbatches": 4, "optimizer": adam, **options}
    given.setdefault("extensions", ["cuda_graphs"])
    return fxpipe.compile(model, devices, loss=nn.functional.cross_entropy, **given)


def home(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.cpu() for name, g in loop.gradients(model).items()}


@pytest.mark.parametrize("dispatch", ["device", "thread"])
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("gpipe", "never"),
        ("1f1b", "always"),
        ("zb-h1", "never"),
        ("interleaved-1f1b", "except_last"),
        ("2bw", "never"),
    ],
)
def test_training_equals_that_without_graphs(
    schedule: str, recompute: str, dispatch: Dispatches
) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {
        "schedule": schedule,
        "recompute": recompute,
    }
    graphs, threads = [fxpipe.CudaGraphs()], [fxpipe.Dispatch(dispatch)]
    with (
        compiled(model, streams(2), extensions=[*graphs, *threads], **options) as pipe,
        compiled(plain, streams(2), extensions=threads, **options) as other,
    ):
        for each in (pipe, other):
            x, y = batch(0)
            each.prepare(x, target=y)
        counts = []
        for step in range(8):
            x, y = batch(step)
            made, expected = pipe.step(x, target=y), other.step(x, target=y)
            assert torch.allclose(made.cpu(), expected.cpu(), atol=1e-4)
            pipe.flush()
            counts.append(sum(kernel.captures for kernel in kernels(pipe)))
        assert counts[4] == counts[-1] > 0
        assert not any(kernel.overflows for kernel in kernels(pipe))
        other.flush()
    loop.assert_same(home(model), home(plain), 1e-3)


def test_gradients_are_those_without_graphs() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    x, y = batch(0)
    with (
        compiled(model, streams(2), optimizer=None) as pipe,
        compiled(plain, streams(2), optimizer=None, extensions=()) as other,
    ):
        for _ in range(3):
            pipe.step(x, target=y)
            other.step(x, target=y)
        found, wanted = gradients(model), gradients(plain)
    loop.assert_same(found, wanted, BOUND)


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_a_step_of_replays_waits_for_nothing(dispatch: Dispatches) -> None:
    x, y = (value.cuda() for value in batch(0))
    extensions = [fxpipe.CudaGraphs(), fxpipe.Dispatch(dispatch)]
    with compiled(Model(), streams(2), optimizer=None, extensions=extensions) as pipe:
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pipe.step(x, target=y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_default_stream_and_inference_are_captured_too() -> None:
    torch.manual_seed(0)
    model = Model()
    x, y = batch(0)
    with compiled(model, [torch.cuda.default_stream(), torch.cuda.Stream()]) as pipe:
        first = pipe.step(x, target=y).item()
        assert pipe.step(x, target=y).item() < first
        pipe.eval()
        made = [pipe(x).cpu() for _ in range(2)]
    expected = model.eval()(x.cuda()).cpu()
    assert all(torch.allclose(each, expected, atol=1e-4) for each in made)


def test_a_green_context_replays_on_its_own_part() -> None:
    try:
        context: Any = green_contexts.GreenContext.create(num_sms=8, device_id=0)
        stream = context.Stream()
    except RuntimeError as error:
        pytest.skip(f"the driver makes no green context: {error}")
    x, y = batch(0)
    with compiled(Model(), [stream, torch.cuda.Stream()]) as pipe:
        losses = [pipe.step(x, target=y).item() for _ in range(4)]
    assert losses[-1] < losses[0]


@torch.library.custom_op("fxpipe_tests::peek", mutates_args=())
def peek(x: Tensor) -> Tensor:
    """It asks the device for a number, which no capture can."""
    return x * (2.0 if x.sum().item() == 0 else 1.0)


@peek.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_: Any, gradient: Tensor) -> Tensor:
    return gradient.clone()


peek.register_autograd(_backward)


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(peek(torch.relu(self.first(x))))
        return y


def test_what_cannot_be_captured_is_named_and_the_device_can_go_on() -> None:
    model = Peeking()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    with (
        compiled(model, streams(2), partition=["last"]) as pipe,
        pytest.raises(
            ExecutionError,
            match=r"of stage 0 cannot be captured.*the extension CudaGraphs",
        ) as raised,
    ):
        pipe.step(x, target=y)
    assert isinstance(raised.value.__cause__, CaptureError)
    with compiled(model, streams(2), partition=["last"], extensions=()) as pipe:
        assert pipe.step(x, target=y).isfinite()
