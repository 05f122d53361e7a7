"""A device without memory: where it lacks, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import DeviceMemoryError
from tests.helpers.tiny import adam, batch, within
from tests.runtime.test_failures import FAILS, FAILS_BACK


@torch.library.custom_op("fxpipe_tests::take", mutates_args=())
def take(x: Tensor, orders: Tensor) -> Tensor:
    if (orders == FAILS).any():
        return torch.empty(1 << 55, dtype=torch.uint8)  # no machine has it
    if (orders == FAILS_BACK).any():
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x.clone()


take.register_fake(lambda x, orders: torch.empty_like(x))
take.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=lambda *_, **__: None)


class Taking(nn.Module):
    """The second layer takes memory as the last column tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = take(self.second(self.first(x)), x[:, 3])
        return h


@contextmanager
def trained(schedule: str) -> Iterator[tuple[fxpipe.Pipeline, Tensor, Tensor]]:
    """A pipe after a step, and the batch."""
    x, y = batch()
    torch.manual_seed(0)
    with fxpipe.compile(
        Taking(),
        ["cpu"] * 2,
        schedule=schedule,
        microbatches=3,
        partition=["second"],
        loss=functional.cross_entropy,
        optimizer=adam,
    ) as pipe:
        pipe.step(x, target=y)
        pipe.flush()
        yield pipe, x, y


def test_a_model_that_lacks_memory_while_it_is_compiled_is_told_by_its_line() -> None:
    x, y = batch()
    x[:, 3] = FAILS
    loss = functional.cross_entropy
    with (
        fxpipe.compile(Taking(), ["cpu"] * 2, microbatches=3, loss=loss) as pipe,
        pytest.raises(DeviceMemoryError) as raised,
    ):
        pipe.step(x, target=y)
    error = raised.value
    assert error.stage is None and not error.instruction
    assert "in take: return torch.empty(1 << 55, dtype=torch.uint8)" in error.source
    for part in ("the host has no memory left to compile", error.source, "more micro-batches"):
        assert part in str(error), part
    assert isinstance(error.__cause__, RuntimeError)


def test_an_evaluation_that_lacks_memory_is_told_nothing_of_backwards() -> None:
    with trained("1f1b") as (pipe, x, _), within(5):
        x[5, 3] = FAILS
        pipe.eval()
        with pytest.raises(DeviceMemoryError) as raised:
            pipe(x)
    assert (raised.value.device, raised.value.stage, raised.value.microbatch) == (1, 1, 2)
    assert "forward s1[2]" in str(raised.value) and "smaller batch" in str(raised.value)
    assert "recompute" not in str(raised.value) and "1f1b" not in str(raised.value)


def lacking(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor, order: float) -> DeviceMemoryError:
    """The error of a step whose last micro-batch gives an order."""
    x[5, 3] = order
    with within(5), pytest.raises(DeviceMemoryError) as raised:
        pipe.step(x, target=y)
        pipe.flush()
    return raised.value


@pytest.mark.parametrize("order", [FAILS, FAILS_BACK], ids=["CPU", "CUDA"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_without_memory_the_instruction_and_the_cure_are_named(schedule: str, order: float) -> None:
    with trained(schedule) as (pipe, x, y):
        error = lacking(pipe, x, y, order)
        assert (error.device, error.stage, error.microbatch) == (1, 1, 2)
        for part in (
            "instruction ",
            "forward s1[2]",
            "(stage 1, micro-batch 2) failed",
            "Take more micro-batches",
            "recompute",
            "1f1b",
            "partition",
            "the weights are as before" if schedule == "1f1b" else "so the pipe has ended",
        ):
            assert part in str(error), part
        if schedule == "1f1b":
            x[5, 3] = 0
            pipe.step(x, target=y)
