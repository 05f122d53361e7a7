"""A failing instruction, loss or optimizer: raised with its place, and as if it had not run."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import ExecutionError, InputError, interpreter
from fxpipe.interpreter import Machine
from fxpipe.program import Instruction, Pause
from fxpipe.text.instruction import print_instruction
from tests.tiny import CUTS, Snapshot, Tiny, batch, within

pytestmark = pytest.mark.timeout(120, method="thread")

Handlers = Mapping[type[Instruction], Callable[[Machine, Any], None]]
HANDLERS: Handlers = interpreter.HANDLERS


class Injected(Exception):
    """What the injected faults raise."""


def failing_at(device: int, position: int, *, after: bool) -> Handlers:
    """A table in which one instruction raises, before or after it did its work."""

    def wrapped(handler: Callable[[Machine, Any], None]) -> Callable[[Machine, Any], None]:
        def run(machine: Machine, instruction: Any) -> None:
            here = (machine.device, machine.position) == (device, position)
            if here and not after:
                raise Injected
            handler(machine, instruction)
            if here:
                raise Injected

        return run

    return {kind: wrapped(handler) for kind, handler in HANDLERS.items()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def pipe_of(devices: int, schedule: str = "1f1b", **options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(
        Tiny(),
        ["cpu"] * devices,
        schedule=schedule,
        microbatches=2,
        loss=functional.cross_entropy,
        partition=CUTS[devices],
        **options,
    )


def everywhere(pipe: fxpipe.Pipeline) -> Iterator[tuple[int, int, Instruction]]:
    for device, instructions in enumerate(pipe.program.lists):
        for position, instruction in enumerate(instructions):
            yield device, position, instruction


@pytest.mark.parametrize("optimizer", [None, adam], ids=["grad", "adam"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_fault_at_any_instruction_has_not_happened(
    devices: int,
    schedule: str,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = batch()
    with pipe_of(devices, schedule, optimizer=optimizer) as pipe:
        for parameter in pipe.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        pipe.step(x, target=y)  # the optimizers have state
        before = Snapshot.of(pipe)
        loss = pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        assert before != expected
        for device, position, instruction in everywhere(pipe):
            for after in (False, True):
                where = f"{device}, {position}: {print_instruction(instruction)}, {after=}"
                before.restore(pipe)
                monkeypatch.setattr(
                    interpreter, "HANDLERS", failing_at(device, position, after=after)
                )
                with within(1), pytest.raises(ExecutionError) as raised:
                    pipe.step(x, target=y)
                monkeypatch.setattr(interpreter, "HANDLERS", HANDLERS)
                assert isinstance(raised.value.__cause__, Injected), where
                assert raised.value.device == device, where
                assert raised.value.instruction == print_instruction(instruction), where
                assert not list(before.differences(Snapshot.of(pipe))), where
                with within(1):
                    assert torch.equal(pipe.step(x, target=y), loss), where
                assert not list(expected.differences(Snapshot.of(pipe))), where


def test_a_fault_at_any_instruction_of_a_call_or_its_backward_has_not_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, _ = batch()
    x.requires_grad_()
    with pipe_of(3) as pipe:
        pipe(x).sum().backward()
        before = Snapshot.of(pipe)
        pipe(x)
        filled = Snapshot.of(pipe)  # a forward alone writes the statistics of BatchNorm
        before.restore(pipe)
        x.grad = None
        pipe(x).sum().backward()
        expected, gradient = Snapshot.of(pipe), x.grad
        assert before != filled and filled != expected
        for device, position, instruction in everywhere(pipe):
            where = f"{device}, {position}: {print_instruction(instruction)}"
            pause = pipe.program.lists[device].index(Pause())
            before.restore(pipe)
            monkeypatch.setattr(interpreter, "HANDLERS", failing_at(device, position, after=True))
            with within(1), pytest.raises(ExecutionError) as raised:
                pipe(x).sum().backward()
            monkeypatch.setattr(interpreter, "HANDLERS", HANDLERS)
            assert isinstance(raised.value.__cause__, Injected), where
            left = filled if position > pause else before
            assert not list(left.differences(Snapshot.of(pipe))), where
            before.restore(pipe)
            x.grad = None
            pipe(x).sum().backward()
            assert not list(expected.differences(Snapshot.of(pipe))), where
            assert isinstance(x.grad, Tensor) and isinstance(gradient, Tensor)
            assert torch.equal(x.grad, gradient), where


def test_a_fault_at_any_instruction_of_inference_has_not_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, _ = batch()
    with pipe_of(2) as pipe, torch.no_grad():
        pipe(x)  # in training mode: BatchNorm writes its statistics
        before = Snapshot.of(pipe)
        output = pipe(x)
        expected = Snapshot.of(pipe)
        for device, position, instruction in everywhere(pipe):
            where = f"{device}, {position}: {print_instruction(instruction)}"
            before.restore(pipe)
            monkeypatch.setattr(interpreter, "HANDLERS", failing_at(device, position, after=True))
            with within(1), pytest.raises(ExecutionError):
                pipe(x)
            monkeypatch.setattr(interpreter, "HANDLERS", HANDLERS)
            assert not list(before.differences(Snapshot.of(pipe))), where
            assert torch.equal(pipe(x), output), where
            assert not list(expected.differences(Snapshot.of(pipe))), where


# an operation that looks at data, and does what they say

FAILS, FAILS_BACK, SLEEPS, FAILS_THEN = 1.0, 2.0, 3.0, 4.0
"""What an operation does where it finds this: the last waits until another one sleeps."""

SLOW = 2.0
"""Seconds."""

SLEEPING = threading.Event()


@torch.library.custom_op("fxpipe_tests::obey", mutates_args=())
def obey(x: Tensor, orders: Tensor) -> Tensor:
    if (orders == SLEEPS).any():
        SLEEPING.set()
        time.sleep(SLOW)
    if (orders == FAILS_THEN).any():
        assert SLEEPING.wait(5)
    if (orders == FAILS).any() or (orders == FAILS_THEN).any():
        raise ValueError("told to fail")
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
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, partition=["1"], loss=summed) as pipe:
        loss = pipe.step(words)
        before = Snapshot.of(pipe)
        words[5, 2] = 5
        with within(1), pytest.raises(ExecutionError, match="out of range") as raised:
            pipe.step(words)
        assert (raised.value.stage, raised.value.microbatch) == (0, 2)
        assert not list(before.differences(Snapshot.of(pipe)))
        assert torch.equal(pipe.step(words.clamp(max=0)), loss)


def summed(output: Tensor, *targets: Tensor) -> Tensor:
    return output.sum()


def test_a_loss_that_fails_names_its_line() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:  # the line of the loss
        return functional.cross_entropy(output, target)

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
        assert Failing.updated.acquire(timeout=5)
        self.param_groups[0]["lr"] = 7.0
        raise RuntimeError("out of luck")


def test_an_optimizer_that_fails_after_another_has_updated_undoes_both() -> None:
    x, y = batch()
    with pipe_of(2, optimizer=lambda parameters: Failing(parameters, lr=0.1)) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        loss = pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        before.restore(pipe)
        bad = pipe.optimizers[1]
        assert isinstance(bad, Failing)
        bad.fails, Failing.updated = True, threading.Semaphore(0)
        with within(1), pytest.raises(ExecutionError, match="out of luck") as raised:
            pipe.step(x, target=y)
        assert (raised.value.stage, raised.value.microbatch) == (1, None)
        assert raised.value.instruction == "update s1 v0 -> v1"
        assert not list(before.differences(Snapshot.of(pipe)))
        bad.fails = False
        assert torch.equal(pipe.step(x, target=y), loss)
        assert not list(expected.differences(Snapshot.of(pipe)))


def test_the_first_update_that_fails_leaves_an_optimizer_without_state() -> None:
    x, y = batch()
    with pipe_of(2, optimizer=lambda parameters: Failing(parameters, lr=0.1)) as pipe:
        pipe.prepare(x, target=y)
        bad = pipe.optimizers[0]
        assert isinstance(bad, Failing)
        before = Snapshot.of(pipe)
        bad.fails = True
        with pytest.raises(ExecutionError):
            pipe.step(x, target=y)
        assert not list(before.differences(Snapshot.of(pipe)))


class Exact(torch.optim.Optimizer):
    """Keeps its state in more digits than the parameters have, as mixed precision does."""

    fails = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("exact", parameter.detach().double())
            state["exact"] -= 1e-9 * parameter.grad
            parameter.data.copy_(state["exact"])
        if self.fails:
            raise RuntimeError


def test_the_state_of_an_optimizer_is_put_back_in_its_own_type() -> None:
    x, y = batch()
    with pipe_of(2, optimizer=Exact) as pipe:
        pipe.step(x, target=y)
        before = Snapshot.of(pipe)
        bad = pipe.optimizers[1]
        assert isinstance(bad, Exact)
        bad.fails = True
        with pytest.raises(ExecutionError):
            pipe.step(x, target=y)
        assert not list(before.differences(Snapshot.of(pipe)))


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
        for _ in range(2):  # the second one finds the device still busy with the first
            SLEEPING.clear()
            start = time.monotonic()
            with within(1 + SLOW), pytest.raises(ExecutionError, match="told to fail") as raised:
                pipe.step(bad, target=y)
            assert raised.value.device == 1 - slow
            assert not list(before.differences(Snapshot.of(pipe)))
        assert torch.equal(pipe.step(x, target=y), loss)
        assert time.monotonic() - start > SLOW
        assert not list(expected.differences(Snapshot.of(pipe)))


def test_a_result_that_cannot_be_made_undoes_the_step() -> None:
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
        with pytest.raises(InputError, match="output 1 differs between micro-batches"):
            pipe.step(x, target=y, return_output=True)
        assert not list(before.differences(Snapshot.of(pipe)))


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
            assert count_tensors() == alive
        finally:
            gc.enable()


def count_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())
