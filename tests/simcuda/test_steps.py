"""Steps and calls on simulated devices: nothing races, and the host waits for no device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import fxpipe
from tests.helpers.profiles import deep
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.training import Setting, compare

pytestmark = simulated

LAZY, RANDOM, STARVING = 1, 2, 3
PLACES = ["cuda:0", "cuda:1"]
MODES = [(LAZY, 0), (RANDOM, 1), (STARVING, 2)]


class Tokens(nn.Module):
    """Returns the loss of its tokens, which it computes as asked."""

    weight: Tensor

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 9)
        self.loss = loss
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.last(torch.tanh(self.middle(self.embedding(x)))).flatten(0, 1)
        if self.loss == "shifted":
            y = pad(y, (0, 1), value=-100)[:, 1:]
        if self.loss == "weighted":
            return cross_entropy(made, y.flatten(), self.weight)
        if self.loss == "two terms":
            return cross_entropy(made, y.flatten()) + cross_entropy(made.tanh(), y.flatten())
        return cross_entropy(made, y.flatten())


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """A batch of which other targets are ignored in each step; in one, all of a micro-batch."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(9, (8, 5), generator=generator) for _ in range(2))
    y[: step + 1, 2:] = -100
    y[5, :step] = -100
    if step == 2:
        y[:2] = -100
    return x, y


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_deferred_batchnorm_trains_on_devices(schedule: str) -> None:
    setting = Setting("unet", {"schedule": schedule, "extensions": ["deferred_batchnorm"]})
    assert not on_devices(compare, setting, PLACES, MODES[:2])


def called(devices: Sequence[str], inputs: str, side: bool) -> list[Tensor]:
    """Calls of a pipe and backwards, with current streams that are not the default ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    made: list[Tensor] = []
    if side:
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_stream(torch.cuda.Stream(device))
    with fxpipe.compile(model, devices, microbatches=4, partition=["2"]) as pipe:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 4, generator=generator).to(inputs).requires_grad_()
            out = pipe(x)
            loss = cross_entropy(out, (torch.arange(8) % 3).to(out.device))
            loss.backward()
            assert x.grad is not None and x.grad.device == x.device
            made += [loss.detach(), x.grad]
        if side:
            for device in range(torch.cuda.device_count()):
                torch.cuda.set_stream(torch.cuda.default_stream(device))
                torch.cuda.synchronize(device)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.cpu() + 0 for x in (*made, *gradients, *pipe.state_dict().values())]


def calls(inputs: str, side: bool) -> list[str]:
    from tests.simcuda import cuda

    wanted = called(["cpu"] * 2, "cpu", False)
    wrong = []
    for mode, seed in MODES:
        cuda.configure(cuda.Mode(mode), seed)
        made = called(PLACES, inputs, side)
        if not all(map(torch.equal, made, wanted)):
            wrong.append(f"other numbers in mode {mode}")
        wrong += cuda.take().races
    return wrong


@pytest.mark.parametrize(
    ("inputs", "side"),
    [
        ("cuda:1", True),
        ("cuda:2", True),  # no device of the pipe
        *deep(*((inputs, False) for inputs in ("cpu", "cuda:0", "cuda:1"))),
        *deep(("cpu", True), ("cuda:0", True)),
    ],
)
def test_a_call_and_its_backward_follow_the_callers_streams(inputs: str, side: bool) -> None:
    assert not on_devices(calls, inputs, side, devices=3)


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_a_batch_on_another_device_is_read_once_the_callers_stream_has_written_it(
    schedule: str,
) -> None:
    setting = Setting("dropout", {"schedule": schedule}, extra="side", inputs="outside")
    assert not on_devices(compare, setting, PLACES, MODES[1:], devices=3)


def test_memory_of_losses_is_not_used_again_while_the_caller_reads_them() -> None:
    """Devices go on launching, and receive the norms of other stages into such small blocks."""
    options = {"schedule": "1f1b-async", "microbatches": 8}
    setting = Setting("tied", options, extra="scaler", stages=4)
    places = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert not on_devices(compare, setting, places, [(RANDOM, 58)])


@pytest.mark.parametrize("schedule", ["pipedream", *deep("2bw")])
def test_the_first_evaluation_leaves_delayed_weights_as_they_were(schedule: str) -> None:
    """It traces the model on the first device, which must not look like a change by the user."""
    setting = Setting("dropout", {"schedule": schedule}, extra="evaluation")
    assert not on_devices(compare, setting, PLACES, MODES[:1])


class Annealed(nn.Module):
    """Reads a number of its own, which changes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.beta = nn.Linear(4, 16), nn.Linear(16, 3), 0.5

    def forward(self, x: Tensor, scale: float) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)) * scale) * self.beta
        return y


def annealed(devices: Sequence[str], schedule: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, made = Annealed(), []
    with fxpipe.compile(
        model,
        devices,
        schedule=schedule,
        microbatches=4,
        loss=cross_entropy,
        partition=["last"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.5),
    ) as pipe:
        for step in range(5):
            model.beta = 1 + step / 4
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            made.append(pipe.step(x, 1 + step / 2, target=torch.arange(8) % 3))
        pipe.flush()
        return [x.cpu() + 0 for x in (*made, *pipe.state_dict().values())]


def anneals(schedule: str) -> list[str]:
    from tests.simcuda import cuda

    wanted = annealed(["cpu"] * 2, schedule)
    wrong = []
    for mode, seed in MODES:
        cuda.configure(cuda.Mode(mode), seed)
        if not all(map(torch.equal, annealed(PLACES, schedule), wanted)):
            wrong.append(f"other numbers in mode {mode}")
        wrong += cuda.take().races
    return wrong


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_numbers_that_change_reach_devices_with_their_batch(schedule: str) -> None:
    assert not on_devices(anneals, schedule)
