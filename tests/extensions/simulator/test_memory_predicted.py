"""The memory that a simulation predicts beside what CPU devices really hold, counted by storage."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.utils import _pytree as pytree

import fxpipe
from benchmarks.counted import Counted, counted
from benchmarks.models.gpt2 import GPT2, next_words
from benchmarks.models.unet import UNet
from fxpipe.extensions.simulator import Simulation
from fxpipe.extensions.simulator import optimizers as optimizer_module
from fxpipe.extensions.simulator.optimizers import optimizer_memory
from fxpipe.text.program import print_instruction
from tests.helpers.overlapping import MORE, OPTIMIZERS
from tests.helpers.profiles import deep

pytestmark = pytest.mark.models


Work = tuple[nn.Module, Tensor, Tensor, Any]


def unet() -> Work:
    return UNet(2, 8, depth=2), torch.randn(8, 3, 16, 16), torch.randn(8, 1, 16, 16), mse_loss


def transformer() -> Work:
    tokens = torch.randint(101, (8, 17))
    model = GPT2(101, 16, 2, 32, 2)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), next_words


def trained(work: Work, devices: int = 2, steps: int = 1, **options: Any) -> Any:
    """Predicted and counted, of steps in which everything is in its stride."""
    model, x, y, loss = work
    options = {"microbatches": 4, **options}
    with fxpipe.compile(model, ["cpu"] * devices, loss=loss, **options) as pipe:
        pipe.prepare(x, target=y)
        predicted = pipe.simulate()
        with counted(pipe) as found:
            for _ in range(6):  # the outputs of the first are kept, and compared, while others run
                pipe.step(x, target=y)
            for device in found:
                device.clear()
            for _ in range(steps):
                pipe.step(x, target=y)
            pipe.flush()
        return predicted, found


def error(predicted: Simulation, found: list[Counted]) -> float:
    """The largest of all devices, as a part of what was counted."""
    pairs = zip(predicted.memory, found, strict=True)
    return max(abs(memory.peak / device.peak - 1) for memory, device in pairs)


@pytest.mark.parametrize(
    ("make", "schedule", "recompute"),
    [
        (unet, "zb-h1", "always"),
        (transformer, "interleaved-1f1b", "never"),
        *deep((unet, "gpipe", "never"), (unet, "1f1b", "except_last")),
        *deep((transformer, "1f1b", "never")),
        *deep((transformer, "gpipe", "always"), (transformer, "zb-h1", "except_last")),
    ],
)
def test_the_peak_of_every_device_is_as_predicted(make: Any, schedule: str, recompute: str) -> None:
    torch.manual_seed(0)
    optimizer = partial(Adam, lr=1e-3)
    ran = trained(make(), schedule=schedule, recompute=recompute, optimizer=optimizer)
    assert error(*ran) < 0.01


@pytest.mark.parametrize("make", [unet, *deep(transformer)])
def test_the_peak_with_micro_batches_of_one_sample_is_as_predicted(make: Any) -> None:
    """A part of a tensor along its second dimension is then dense, and a copy keeps its strides."""
    torch.manual_seed(0)
    optimizer = partial(Adam, lr=1e-3)
    ran = trained(make(), schedule="1f1b", microbatches=8, optimizer=optimizer)
    assert error(*ran) < 0.01


@pytest.mark.parametrize(("make", "recompute"), [(transformer, "never"), *deep((unet, "always"))])
def test_the_peak_with_two_versions_is_as_predicted(make: Any, recompute: str) -> None:
    torch.manual_seed(0)
    ran = trained(
        make(), steps=3, schedule="2bw", recompute=recompute, optimizer=partial(Adam, lr=1e-3)
    )
    assert error(*ran) < 0.03


@pytest.mark.parametrize("given", ["all parameters", "what is trained"])
def test_an_update_copies_nothing_that_is_not_trained(given: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))

    def adam(parameters: list[nn.Parameter]) -> Adam:
        trains = given == "all parameters"
        return Adam([p for p in parameters if trains or p.requires_grad], lr=1e-3)

    x = torch.randn(8, 256)
    ran = trained((model, x, x, mse_loss), partition=["2"], schedule="1f1b", optimizer=adam)
    weights = 2 * 4 * 256 * 257
    assert all(weights < device.peak < 1.2 * weights for device in ran[1])
    assert error(*ran) < 0.01


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_device_holds_what_is_predicted_while_each_instruction_runs(schedule: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": schedule, "partition": ["blocks.1", "head"]}
    predicted, found = trained(transformer(), 3, optimizer=partial(Adam, lr=1e-3), **options)
    for device, (memory, real) in enumerate(zip(predicted.memory, found, strict=True)):
        listed = predicted.program.lists[device]
        assert len(memory.levels) == len(real.levels) > 20
        for x, level, bytes_ in zip(listed, memory.levels, real.levels, strict=True):
            assert abs(level - bytes_) <= 64, (device, print_instruction(x))  # a few scalars


@pytest.mark.parametrize("schedule", ["zb-v", *deep("dualpipe-v", "hanayo")])
def test_what_comes_from_a_stage_of_the_same_device_needs_no_copy(schedule: str) -> None:
    """The gradient of a skip is a part of a larger value; from another device it comes as it is."""
    work = UNet(2, 8, depth=2), torch.randn(16, 3, 16, 16), torch.randn(16, 1, 16, 16), mse_loss
    assert error(*trained(work, microbatches=8, schedule=schedule, optimizer=Adam)) < 0.001


def test_recomputing_lowers_the_peak_as_predicted() -> None:
    torch.manual_seed(0)
    found = {
        mode: trained(unet(), schedule="gpipe", recompute=mode) for mode in ("never", "always")
    }
    predicted = [max(m.peak for m in ran[0].memory) for ran in found.values()]
    real = [max(device.peak for device in ran[1]) for ran in found.values()]
    assert predicted == sorted(predicted, reverse=True) and predicted[0] > 1.5 * predicted[-1]
    assert real == sorted(real, reverse=True)


@pytest.mark.parametrize(
    ("make", "schedule", "recompute", "share"),
    [
        (transformer, "gpipe", "never", 0.9),
        *deep(
            (unet, "looped-bfs", "never", 0.9),
            (unet, "gpipe", "never", 0.9),
            (unet, "gpipe", "always", 0.99),
        ),
    ],
)
def test_storing_elsewhere_lowers_the_peak_as_predicted(
    make: Any, schedule: str, recompute: str, share: float
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": schedule, "optimizer": partial(Adam, lr=1e-3)}
    if recompute != "never":
        options |= {"recompute": recompute, "partition": ["ups.0"]}
    kept, stored = (trained(make(), extensions=own, **options) for own in ([], ["offload"]))
    assert error(*stored) < 0.01
    assert sum(m.peak for m in stored[0].memory) < share * sum(m.peak for m in kept[0].memory)
    assert sum(each.peak for each in stored[1]) < share * sum(each.peak for each in kept[1])


@pytest.mark.parametrize("again", [{2: "always"}, {0: "always", 1: "always"}], ids=str)
def test_a_device_holds_what_is_predicted_while_some_is_stored_and_some_recomputed(
    again: dict[int, str],
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "extensions": [fxpipe.Offload({0: "always", 1: "except_last"})],
        "recompute": again,
    }
    predicted, found = trained(
        transformer(),
        3,
        schedule="gpipe",
        optimizer=partial(Adam, lr=1e-3),
        partition=["blocks.1", "head"],
        **options,
    )
    for device, (memory, real) in enumerate(zip(predicted.memory, found, strict=True)):
        for x, level, bytes_ in zip(
            predicted.program.lists[device], memory.levels, real.levels, strict=True
        ):
            assert abs(level - bytes_) <= 64, (device, print_instruction(x))


def test_the_parts_add_up_to_the_peak_and_are_shown() -> None:
    torch.manual_seed(0)
    predicted, _ = trained(unet(), schedule="1f1b", optimizer=partial(Adam, lr=1e-3))
    for memory in predicted.memory:
        assert sum(memory.parts.values()) == memory.peak
        assert memory.parts["parameters"] > 0
        assert memory.parts["optimizer"] >= 2 * memory.parts["parameters"]
    shown = str(predicted)
    for word in ("parameters", "optimizer", "gradients", "saved", "values", "workspace"):
        assert word in shown


class Noting(SGD):
    """Keeps a list of its own, of the settings that it stepped with."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_to_predict_its_memory_changes_nothing_that_an_optimizer_keeps() -> None:
    optimizer = Noting(nn.Linear(8, 8).parameters())
    assert optimizer_memory(optimizer)[0] == 4 * 8 * 9
    assert not optimizer.rates and not optimizer.state


def test_the_memory_of_optimizers_that_are_alike_is_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, steps = SGD.step, list[SGD]()

    def counted(optimizer: SGD, *given: Any) -> Any:
        steps.append(optimizer)
        return step(optimizer, *given)

    monkeypatch.setattr(SGD, "step", counted)
    monkeypatch.setattr(optimizer_module, "_known", {})

    def found(width: int, momentum: float) -> int:
        own = nn.Linear(8, width).parameters()
        return optimizer_memory(SGD(own, lr=0.1, momentum=momentum))[0]

    assert found(8, 0.0) == found(8, 0.0) == 0
    assert len(steps) == 2
    assert found(8, 0.9) == found(8, 0.9) == 4 * 8 * 9
    assert len(steps) == 4
    assert found(16, 0.9) == 4 * 16 * 9


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_an_optimizer_is_predicted_to_keep_what_it_keeps_after_two_steps(name: str) -> None:
    torch.manual_seed(0)
    optimizer = (OPTIMIZERS | MORE)[name](list(nn.Linear(8, 8).parameters()))
    predicted, _ = optimizer_memory(optimizer)
    for _ in range(2):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    kept = pytree.tree_leaves(dict(optimizer.state))
    assert predicted == sum(leaf.nbytes for leaf in kept if isinstance(leaf, torch.Tensor))
