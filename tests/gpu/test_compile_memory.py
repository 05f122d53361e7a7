"""What CUDA devices hold while a pipe is compiled: they need at least two, and are skipped else."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe import TraceError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no CUDA devices")

WIDTH = 256


class Layers(nn.Module):
    """Residual layers, the first weight of each of which tells its number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
        self.layers = nn.Sequential(*layers)
        with torch.no_grad():
            for number, layer in enumerate(layers):
                layer.weight[0, 0] = mark(number)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def mark(number: int) -> float:
    return (2 * number + 1) / 4096


class Sightings(TorchDispatchMode):
    """Notes where operations find weights, or copies of them.

    Attributes:
        seen: number of a layer → the devices where its weight was.
    """

    def __init__(self, model: Layers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, set[torch.device]] = defaultdict(set)
        self._numbers = {mark(number): number for number in range(len(model.layers))}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs, result)):
            if type(x) in (Tensor, nn.Parameter) and x.is_cuda and x.shape == (WIDTH, WIDTH):
                number = self._numbers.get(float(x.detach()[0, 0].cpu()))
                if number is not None:
                    self.seen[number].add(x.device)
        return result


@contextmanager
def peaks(devices: int) -> Iterator[list[int]]:
    """Device → the most bytes that it has held inside, after the block."""
    made: list[int] = []
    gc.collect()  # what earlier tests have left in cycles
    for device in range(devices):
        torch.cuda.reset_peak_memory_stats(device)
    yield made
    made.extend(torch.cuda.max_memory_allocated(device) for device in range(devices))


def cuda(devices: int) -> list[str]:
    return [f"cuda:{device}" for device in range(devices)]


def data(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def test_no_parameter_is_ever_on_a_device_that_does_not_run_its_stage() -> None:
    model = Layers(4)
    x, y = data(8)
    with (
        fxpipe.compile(
            model,
            cuda(2),
            microbatches=4,
            partition=["layers.2"],
            loss=nn.functional.mse_loss,
        ) as pipe,
        Sightings(model) as sightings,
    ):
        pipe.prepare(x, target=y)
        pipe.prepare(x[:4], target=y[:4])
        pipe.eval()
        pipe(x[:4])
        pipe.train()
        str(pipe)
        pipe.step(x[:6], target=y[:6])
    homes = [torch.device("cuda", number // 2) for number in range(4)]
    assert sightings.seen == {number: {home} for number, home in enumerate(homes)}
    assert [layer.weight.device for layer in model.layers] == homes


def test_a_model_larger_than_a_device_trains_and_resumes(tmp_path: Path) -> None:
    """A device holds its stage, the optimizer's state for it, its gradients, and what one layer
    needs, also while it is compiled and while a checkpoint is loaded."""
    count = torch.cuda.device_count()
    model, whole = Layers(2 * count), 2 * count * WIDTH * WIDTH * 4
    share = whole // count
    x, y = data(4 * count)

    def pipe_of(model: nn.Module) -> fxpipe.Pipeline:
        return fxpipe.compile(
            model,
            cuda(count),
            microbatches=2 * count,
            partition=[f"layers.{2 * stage}" for stage in range(1, count)],
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        )

    with peaks(count) as held, pipe_of(model) as pipe:
        losses = [float(pipe.step(x, target=y)) for _ in range(3)]
        pipe.eval()
        pipe(x)
        pipe.train()
        pipe.checkpoint(tmp_path / "run")
        losses += [float(pipe.step(x, target=y)) for _ in range(2)]
    assert max(held) <= 4 * share
    del model, pipe
    again = Layers(2 * count)
    with peaks(count) as held, pipe_of(again) as pipe:
        pipe.restore(tmp_path / "run")
        resumed = [float(pipe.step(x, target=y)) for _ in range(2)]
    assert resumed == losses[3:]
    assert max(held) <= 4 * share


def test_a_check_that_fails_leaves_the_model_where_it_was() -> None:
    class Hidden(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * hidden[0].to(x.device))

    hidden = [torch.ones((), requires_grad=True)]
    model = Hidden(2)
    before = [(x, x.data_ptr()) for x in model.parameters()]
    x, y = data(8)
    with (
        fxpipe.compile(model, cuda(2), microbatches=4, loss=nn.functional.mse_loss) as pipe,
        pytest.raises(TraceError, match="requires a gradient and is no parameter"),
    ):
        pipe.step(x, target=y)
    assert all(tensor.is_cpu and tensor.data_ptr() == place for tensor, place in before)
