"""The tests of how much memory simulated devices need, while they may have no more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.compiler import options as compiler_options
from tests.helpers.mapped import copied_pages, mapped
from tests.helpers.profiles import deep
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.ranks import on_devices_of_ranks

pytestmark = simulated

WIDTH, ROWS = 256, 8

LAYER = (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of a layer's weight and bias."""

ACTIVATION = ROWS * WIDTH * 4
"""Bytes of a value between layers, of a micro-batch."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SGD = partial(torch.optim.SGD, lr=0.05)
Adam = partial(torch.optim.Adam, lr=1e-3)


class Layers(nn.Module):
    """Residual layers, all alike."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def made(count: int) -> Layers:
    torch.manual_seed(0)
    return Layers(count)


def data(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(microbatches * ROWS, WIDTH), torch.randn(microbatches * ROWS, WIDTH)


def pipe_of(
    model: nn.Module, places: int | DeviceMesh, optimizer: Optimizer, **options: Any
) -> fxpipe.Pipeline:
    """A pipe with as many layers on each device, of this process or of the ranks of a mesh."""
    devices: int = places if isinstance(places, int) else places.size()
    layers = model.get_submodule("layers")
    each = sum(1 for _ in layers.children()) // devices
    return fxpipe.compile(
        model,
        [f"cuda:{d}" for d in range(devices)] if isinstance(places, int) else places,
        partition=[f"layers.{each * stage}" for stage in range(1, devices)],
        loss=mse_loss,
        optimizer=optimizer,
        **options,
    )


@contextmanager
def within(devices: int, limit: float) -> Iterator[None]:
    """Limit every device's memory."""
    from tests.simcuda import cuda

    with ExitStack() as stack:
        for device in range(devices):
            stack.enter_context(cuda.within(device, int(limit)))
        yield


@contextmanager
def peaks(devices: int) -> Iterator[list[int]]:
    """Device → the most bytes that it has held inside, after the block."""
    found: list[int] = []
    gc.collect()
    for device in range(devices):
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.extend(torch.cuda.max_memory_allocated(device) for device in range(devices))


def use(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor) -> None:
    """Everything that may compile, run or measure something beside steps."""
    pipe.eval()
    pipe(x)
    pipe.train()
    str(pipe)
    pipe.step(x[:-3], target=y[:-3])
    pipe.flush()


Look = Callable[[fxpipe.Pipeline, Tensor, Tensor], object]


def lives(
    mesh: DeviceMesh | None,
    folder: Path,
    optimizer: Optimizer,
    limit: float,
    devices: int,
    fill: Callable[[fxpipe.Pipeline], None] | None = None,
) -> list[float]:
    """Losses of ten steps, and three times of two more: as they come, and from a checkpoint, also
    in another pipe. The model has data before it is compiled, or gets the same values by ``fill``
    later. It is on the ranks of a mesh, or on devices of this process. As any model of more than
    64 MiB, it is on no device as a whole."""
    compiler_options.WHOLE = 0
    microbatches = 8
    x, y = data(microbatches)

    def whole() -> fxpipe.Pipeline:
        with torch.device("meta" if fill else "cpu"):
            model = made(2 * devices)
        pipe = pipe_of(model, mesh or devices, optimizer, microbatches=microbatches)
        if fill:
            pipe.prepare(x, target=y)
        return pipe

    def steps(pipe: fxpipe.Pipeline, count: int = 2) -> list[float]:
        return [float(pipe.step(x, target=y)) for _ in range(count)]

    def first() -> list[float]:
        with whole() as pipe:
            if fill:
                fill(pipe)
            losses = steps(pipe, 10)
            use(pipe, x, y)
            pipe.save(folder / "folder")
            if mesh is None:
                pipe.checkpoint(folder / "file")
            losses += steps(pipe)
            pipe.load(folder / "folder")
            losses += steps(pipe)
            if mesh is None:
                pipe.restore(folder / "file")
                losses += steps(pipe)
            return losses

    def second() -> list[float]:
        with whole() as pipe:
            pipe.load(folder / "folder")
            return steps(pipe)

    with within(devices, limit):
        losses = first()
        gc.collect()
        return losses + second()


def limit_of(copies: float, devices: int) -> float:
    """What a device may hold, 5 % above the sum of docs/memory.md by hand: two layers, so many
    times; what each layer keeps of the micro-batches in flight, as many as there are devices, is
    its input and its tanh, and a device has at most four values that cross."""
    # an update comes when nothing is kept any more
    return 1.05 * (copies * 2 * LAYER + (0 if copies > 3 else (4 * devices + 4) * ACTIVATION))


# by Adam parameters, gradients, two moments, and what it computes from them for a whole stage; by
# SGD parameters, gradients, and one layer's gradient before it is added; always less than the
# parameters of the whole model
EIGHT = (SGD, 2.5, 8), (Adam, 5, 8)

several = pytest.mark.parametrize(
    ("optimizer", "copies", "devices"), [(SGD, 2.5, 4), *deep(*EIGHT)]
)

on_eight = pytest.mark.parametrize(("optimizer", "copies", "devices"), EIGHT)
"""Ranks also hold what they send, for which fewer of them would lack memory."""


def as_trained(losses: list[float], times: int) -> None:
    """Check that losses fell, and that the next two were the same so many times."""
    assert losses[9] < losses[0]
    assert losses[10:] == losses[10:12] * times


@several
def test_a_model_of_many_devices_memory_lives_on_these_devices(
    tmp_path: Path, optimizer: Optimizer, copies: float, devices: int
) -> None:
    args = tmp_path, optimizer, limit_of(copies, devices), devices
    as_trained(on_devices(lives, None, *args, devices=devices), 4)


@on_eight
@pytest.mark.deep
def test_a_model_of_many_devices_memory_lives_over_as_many_ranks(
    tmp_path: Path, optimizer: Optimizer, copies: float, devices: int
) -> None:
    args = tmp_path, optimizer, limit_of(copies, devices), devices
    for losses in on_devices_of_ranks(devices, lives, *args):
        as_trained(losses, 3)


def counted(
    options: Mapping[str, Any], optimizer: Optimizer, look: Look = use
) -> tuple[list[int], list[int], list[int]]:
    """Device → the bytes that it holds at most in steps, while compiling, and in everything else,
    with what ``look`` does."""
    devices = 2
    x, y = data(4)
    with pipe_of(made(8), devices, optimizer, microbatches=4, **options) as pipe:
        with peaks(devices) as compiling:
            pipe.prepare(x, target=y)
        for _ in range(6):
            pipe.step(x, target=y)
        with peaks(devices) as steps:
            for _ in range(3):
                pipe.step(x, target=y)
            pipe.flush()
        with peaks(devices) as others:
            look(pipe, x, y)
    return steps, compiling, others


@pytest.mark.parametrize("optimizer", [Adam, *deep(SGD)])
def test_compiling_takes_no_more_than_steps(optimizer: Optimizer) -> None:
    assert_within(*on_devices(counted, {"schedule": "1f1b"}, optimizer))


class Wide(nn.Module):
    """Of little state: nearly all that devices hold are values, the largest on the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        y: Tensor = self.last(torch.cat([torch.relu(self.second(h)), h], 1))
        return y


def wide() -> tuple[list[int], list[int]]:
    """Device → the bytes that it holds at most in steps, and while compiling."""
    x = torch.randn(16, 1, 32, 32)
    options: dict[str, Any] = {"partition": ["second"], "microbatches": 4, "optimizer": SGD}
    with fxpipe.compile(Wide(), ["cuda:0", "cuda:1"], loss=mse_loss, **options) as pipe:
        with peaks(2) as compiling:
            pipe.prepare(x, target=x)
        pipe.step(x, target=x)
        with peaks(2) as steps:
            pipe.step(x, target=x)
    return steps, compiling


def test_compiling_where_values_are_the_most_takes_no_more_than_the_fullest_device() -> None:
    """The first device measures the operations of all stages, one at a time."""
    steps, compiling = on_devices(wide)
    assert max(compiling) <= max(steps)


def planned() -> tuple[list[int], list[int], list[float], list[float]]:
    """Device → the bytes that GPipe needs, and those that what is planned for two thirds of it
    takes; and the losses of both, the second where devices have no more."""
    x, y = data(8)

    def losses(**options: Any) -> tuple[list[int], list[float]]:
        devices = ["cuda:0", "cuda:1"]
        with fxpipe.compile(made(4), devices, loss=mse_loss, optimizer=SGD, **options) as pipe:
            first = [float(pipe.step(x, target=y))]
            with peaks(2) as held:
                return held, first + [float(pipe.step(x, target=y)) for _ in range(3)]

    held, expected = losses(schedule="gpipe", microbatches=8)
    limit = max(held) * 2 // 3
    gc.collect()
    with within(2, 1.02 * limit):  # the first step has some of what was compiled beside it
        most, found = losses(schedule="auto", microbatches=8, memory_limits=limit)
    return held, most, expected, found


def test_what_is_planned_for_a_limit_trains_on_devices_that_have_no_more() -> None:
    needed, held, expected, found = on_devices(planned)
    assert max(held) < max(needed)
    assert found == pytest.approx(expected, rel=1e-5)


def loaded(folder: Path) -> list[int]:
    """Device → the bytes that it holds at most while a checkpoint takes the place of training."""
    x, y = data(4)
    with pipe_of(made(4), 2, Adam, microbatches=4) as pipe:
        pipe.step(x, target=y)
        pipe.save(folder / "run")
        with peaks(2) as loading:
            pipe.load(folder / "run")
    return loading


def test_a_checkpoint_that_is_loaded_takes_the_place_of_the_state(tmp_path: Path) -> None:
    """Parameters and two moments, each once."""
    assert max(on_devices(loaded, tmp_path)) <= 1.05 * 3 * 2 * LAYER


def moved(folder: Path) -> tuple[int, int, list[int]]:
    """KiB of mapped weights that are still in host memory, and that were copied there, and device →
    the bytes that it holds at most while compiling."""
    devices, file = 2, folder / "weights.pt"
    model = made(8)
    mapped(model, file)
    x, y = data(4)
    with pipe_of(model, devices, Adam, microbatches=4) as pipe:
        with peaks(devices) as compiling:
            pipe.prepare(x, target=y)
        pipe.step(x, target=y)
        assert all(parameter.is_cuda for parameter in model.parameters())
    return *copied_pages(file), compiling


def test_mapped_weights_go_from_their_file_to_their_devices(tmp_path: Path) -> None:
    resident, written, compiling = on_devices(moved, tmp_path)
    assert (resident, written) == (0, 0)
    assert max(compiling) <= 1.05 * 3 * 4 * LAYER


def assert_within(steps: list[int], *others: list[int]) -> None:
    for most in others:
        assert all(held <= 1.05 * step for held, step in zip(most, steps, strict=True))
