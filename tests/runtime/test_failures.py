"""What really fails: operations on some data, a loss, an optimizer; and while others are busy."""

from __future__ import annotations

import gc
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe import ExecutionError, InputError
from fxpipe.runtime.weights.live import clones
from tests.helpers.one_optimizer import made_by
from tests.helpers.tiny import Snapshot, adam, batch, pipe_of, within

# an operation that looks at data, and does what they say

FAILS, FAILS_BACK, SLEEPS, FAILS_THEN, FAILS_MUTE = 1.0, 2.0, 3.0, 4.0, 5.0
"""What an operation does where it finds this: the last waits until another one sleeps."""


class Mute(RuntimeError):
    """An error whose own text cannot be made."""

    def __str__(self) -> str:
        raise AttributeError("detail")


SLEEPING = threading.Event()
WAKE = threading.Semaphore(0)


@torch.library.custom_op("fxpipe_tests::obey", mutates_args=())
def obey(x: Tensor, orders: Tensor) -> Tensor:
    if (orders == SLEEPS).any():
        SLEEPING.set()
        assert WAKE.acquire(timeout=60)
    if (orders == FAILS_THEN).any():
        assert SLEEPING.wait(60)
    if (orders == FAILS).any() or (orders == FAILS_THEN).any():
        raise ValueError("told to fail")
    if (orders == FAILS_MUTE).any():
        raise Mute
    return x.clone()


@torch.library.custom_op("fxpipe_tests::obey_back", mutates_args=())
def obey_back(gradient: Tensor, orders: Tensor) -> Tensor:
    if (orders == FAILS_BACK).any():
        raise ValueError("told to fail on the way back")
    return gradient.clone()


obey.register_fake(lambda x, orders: torch.empty_like(x))
obey_back.register_fake(lambda gradient, orders: torch.empty_like(gradient))
obey.register_autograd(
    lambda ctx, gradient: (obey_back(gradient, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class Obeying(nn.Module):
    """A layer a stage; column 0 has the orders for stage 0, column 1 those for stage 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = obey(self.first(x), x[:, 0])  # the line on stage 0
        y = self.second(h)
        z: Tensor = obey(y, x[:, 1])  # the line on stage 1
        return z


def obeying(**options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(Obeying(), ["cpu"] * 2, microbatches=3, partition=["second"], **options)


def line_of(word: str, function: str = "forward") -> str:
    """``file:line`` of this file's line that ends with a comment."""
    with open(__file__) as file:
        number = next(n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# {word}"))
    return f"{__file__}:{number}, in {function}"


def test_an_error_whose_text_raises_is_named_all_the_same() -> None:
    x, y = batch()
    with obeying(loss=functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        x[5, 1] = FAILS_MUTE
        with within(1), pytest.raises(ExecutionError) as raised:
            pipe.step(x, target=y)
    assert raised.value.stage == 1
    assert "(Mute, whose text cannot be made (AttributeError))" in str(raised.value)
    assert isinstance(raised.value.__cause__, Mute)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("order", [FAILS, FAILS_BACK])
def test_an_operation_that_fails_names_all_of_its_place(stage: int, order: float) -> None:
    x, y = batch()
    with obeying(loss=functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        x[5, stage] = order  # in micro-batch 2
        with within(1), pytest.raises(ExecutionError) as raised:
            pipe.step(x, target=y)
        assert not list(before.differences(Snapshot.of(pipe)))
    error = raised.value
    assert (error.device, error.stage, error.microbatch) == (stage, stage, 2)
    kind = "forward" if order == FAILS else "backward"
    assert error.instruction.split()[:2] == [kind, f"s{stage}[2]"]
    assert error.source.startswith(line_of(f"the line on stage {stage}"))
    assert isinstance(error.__cause__, ValueError)
    trace = "".join(traceback.format_exception(error.__cause__))
    assert "raise ValueError" in trace  # the original one, down to the operation
    text = str(error)
    parts = f"device {stage}", f"stage {stage}", "micro-batch 2", error.source, "told to fail"
    assert all(part in text for part in parts), text


def test_an_index_out_of_range_in_one_micro_batch_names_it() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    words = torch.zeros(6, 3, dtype=torch.long)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, partition=["1"], loss=averaged) as pipe:
        loss = pipe.step(words)
        before = Snapshot.of(pipe)
        words[5, 2] = 5
        with within(1), pytest.raises(ExecutionError, match="out of range") as raised:
            pipe.step(words)
        assert (raised.value.stage, raised.value.microbatch) == (0, 2)
        assert not list(before.differences(Snapshot.of(pipe)))
        assert torch.equal(pipe.step(words.clamp(max=0)), loss)


def averaged(output: Tensor, *targets: Tensor) -> Tensor:
    return output.mean()


def test_a_loss_that_fails_names_its_line() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)  # the line of the loss

    x, y = batch()
    with obeying(loss=loss) as pipe:
        pipe.step(x, target=y)
        y[0] = 7
        with within(1), pytest.raises(ExecutionError, match="out of bounds") as raised:
            pipe.step(x, target=y)
    assert (raised.value.stage, raised.value.microbatch) == (1, 0)
    assert raised.value.source.startswith(line_of("the line of the loss", "loss"))


class Failing(torch.optim.AdamW):
    """An optimizer that fails after its update when it is told to, and waits for the others."""

    fails = False
    updated = threading.Semaphore(0)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if not self.fails:
            Failing.updated.release()
            return
        assert Failing.updated.acquire(timeout=60)
        self.param_groups[0]["lr"] = 7.0
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("first", [False, True])
def test_an_optimizer_that_fails_after_another_has_updated_ends_the_pipe(
    first: bool, tmp_path: Path
) -> None:
    """Its state may be made in that step, as where memory runs out then."""
    x, y = batch()
    with pipe_of(2, optimizer=lambda parameters: Failing(parameters, lr=0.1)) as pipe:
        pipe.prepare(x, target=y)
        if not first:
            pipe.step(x, target=y)
        pipe.checkpoint(tmp_path / "run")
        before = Snapshot.of(pipe)
        loss = pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        pipe.restore(tmp_path / "run")
        assert not list(before.differences(Snapshot.of(pipe)))
        bad = made_by(pipe)[1]
        assert isinstance(bad, Failing)
        bad.fails, Failing.updated = True, threading.Semaphore(0)
        with within(1), pytest.raises(ExecutionError, match="out of luck") as raised:
            pipe.step(x, target=y)
        assert (raised.value.stage, raised.value.microbatch) == (1, None)
        assert raised.value.instruction == "update s1 v0 -> v1"
        told = "stage 0 updated with this batch and stage 1 only in part"
        assert f"{told}, so the pipe has ended" in str(raised.value)
        assert "EndedError" not in repr(pipe)
        for _ in range(2):
            with pytest.raises(fxpipe.EndedError, match=f"earlier call: {told}; go on from"):
                pipe.step(x, target=y)
        bad.fails = False
        pipe.restore(tmp_path / "run")
        assert torch.equal(pipe.step(x, target=y), loss)
        assert not list(expected.differences(Snapshot.of(pipe)))


def test_values_are_copied_at_once_however_many_tensors_there_are() -> None:
    calls: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(function.overloadpacket))
            return function(*args, **(kwargs or {}))

    parameters = [nn.Parameter(torch.randn(3, 2).t()) for _ in range(12)]
    with Counting():  # type: ignore[no-untyped-call]
        copies = clones(parameters)
    memory = ["aten.detach", "aten.empty_like"]  # these launch nothing on a device
    assert [call for call in calls if call not in memory] == ["aten._foreach_copy_"]
    for own, value in zip(copies, parameters, strict=True):
        assert torch.equal(own, value) and own.stride() == value.stride()
        assert not own.requires_grad


@pytest.mark.parametrize("slow", [0, 1])
def test_a_failure_does_not_wait_for_a_slow_operation_and_the_next_step_does(slow: int) -> None:
    x, y = batch()
    with obeying(loss=functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        loss = pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        before.restore(pipe)
        bad = x.clone()
        bad[:2, 1], bad[2:4, 0] = (FAILS_THEN, SLEEPS) if slow == 0 else (SLEEPS, FAILS_THEN)
        for busy in (False, True):  # the second finds the device in the middle of the first
            SLEEPING.clear()
            if busy:
                threading.Timer(0.1, WAKE.release).start()
            with within(1), pytest.raises(ExecutionError, match="told to fail") as raised:
                pipe.step(bad, target=y)
            assert raised.value.device == 1 - slow
            assert not list(before.differences(Snapshot.of(pipe)))
        threading.Timer(0.1, WAKE.release).start()
        assert torch.equal(pipe.step(x, target=y), loss)
        assert not list(expected.differences(Snapshot.of(pipe)))


def test_a_step_counts_even_if_its_output_cannot_be_joined() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layers(x)
            return y, y.sum(0)[:2]  # the two entries look like no batch

    x, y = batch()
    with fxpipe.compile(
        Statistics(),
        ["cpu"] * 2,
        microbatches=2,
        loss=lambda output, target: functional.cross_entropy(output[0], target),
        optimizer=adam,
    ) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        before.restore(pipe)
        with pytest.raises(InputError, match="output 1 differs between micro-batches") as raised:
            pipe.step(x, target=y, return_output=True)
        assert "all stages have updated, and the step counts" in raised.value.__notes__
        assert pipe.batches == 3
        assert not list(expected.differences(Snapshot.of(pipe)))
        pipe.step(x, target=y)


def test_a_failed_step_draws_no_random_number() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = batch()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        loss = pipe.step(x, target=y)
        assert not torch.equal(before.generator, torch.get_rng_state())
        before.restore(pipe)
        with pytest.raises(ExecutionError):
            pipe.step(x, target=y + 7)
        assert not list(before.differences(Snapshot.of(pipe)))
        assert torch.equal(pipe.step(x, target=y), loss)


def test_a_failed_step_keeps_no_tensor_alive() -> None:
    x, y = batch()
    with obeying(loss=functional.cross_entropy) as pipe:
        pipe.step(x, target=y)
        x[5, 1] = FAILS
        gc.collect()
        alive = count_tensors()
        gc.disable()
        try:
            with pytest.raises(ExecutionError) as raised:
                pipe.step(x, target=y)
            del raised
            assert count_tensors() == alive - 1  # the loss of the step before, for the metrics
        finally:
            gc.enable()


def count_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())
