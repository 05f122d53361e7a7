"""Failures while batches are in flight: which batches count, and what the weights are after."""

from __future__ import annotations

import _thread
import copy
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.ir import instruction as ins
from fxpipe.runtime import interpreter
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.interpreter import Machine
from tests.extensions.overlapping.most_versions import MostVersions
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.helpers.profiles import DEEP, deep
from tests.oracles.delayed_loop import MSE, DelayedLoop, RuledLoop

pytestmark = pytest.mark.smoke

HANDLERS = interpreter.HANDLERS


dispatches = pytest.mark.parametrize("dispatch", ["device", "thread"])


class Planted(Exception):
    """A failure that a test has planted."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    yield
    interpreter.HANDLERS = HANDLERS


def plant(kind: type[ins.Instruction], device: int, batch: int, after: Event | None = None) -> None:
    """Let one kind of instruction fail on a device, for a batch, and not before an event."""

    def failing(machine: Machine, instruction: Any) -> None:
        if machine.device == device and machine.step + instruction.batch == batch:
            if after is not None:
                after.wait(60)
            raise Planted("planted")
        instruction.run(machine)

    interpreter.HANDLERS = {**HANDLERS, kind: failing}


def pull(do: Callable[[], Any]) -> fxpipe.ExecutionError:
    with pytest.raises(fxpipe.ExecutionError) as caught:
        do()
    return caught.value


def told(pipe: fxpipe.Pipeline) -> dict[int, int]:
    """Stage → with how many batches it has updated, as an ended pipe tells."""
    with pytest.raises(fxpipe.EndedError, match=r"restore\(\) or load\(\)") as raised:
        pipe.flush()
    (text,) = re.findall(r"stages have updated with: (.*?)[;]", str(raised.value))
    pairs = re.findall(r"stages? ([\d, and-]+) with (\d+)", text)
    return {
        stage: int(count)
        for stages, count in pairs
        for part in re.split(r", | and ", stages)
        for stage in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    }


def steps_of(pipe: fxpipe.Pipeline) -> dict[int, int]:
    """Stage → how many steps its AdamW has made."""
    optimizers = pipe._engine.progress.optimizers
    assert optimizers is not None
    return {
        stage: int(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"])
        for stage, optimizer in enumerate(optimizers)
        if optimizer is not None
    }


@pytest.mark.parametrize(
    ("schedule", "device", "dispatch"),
    [
        *deep(("2bw", 0, "device"), ("2bw", 2, "device"), ("2bw", 1, "thread")),
        ("2bw", 1, "device"),
        ("pipedream", 1, "device"),
        ("pipedream", 0, "thread"),
    ],
)
@pytest.mark.parametrize("kind", [ins.Forward, ins.Backward, ins.Update])
def test_a_failure_ends_the_pipe_which_tells_how_far_each_stage_is_and_takes_a_checkpoint(
    kind: type[ins.Instruction], schedule: str, device: int, dispatch: Dispatches, tmp_path: Path
) -> None:
    microbatches = 1 if schedule == "pipedream" else 3
    unet = schedule == "2bw" and device == 1 and (DEEP or kind is ins.Backward)
    model, data = make("unet" if unet else "mlp", 9, 3)

    def late(name: str, i: int) -> int:
        following = 2 - int(name.split(".")[0]) // 2  # stages
        return -((i - following) // microbatches)

    alone = copy.deepcopy(model)
    expected: DelayedLoop | RuledLoop
    if schedule == "2bw":
        expected = DelayedLoop.beside(model, ADAMW, 3)
    else:
        expected = RuledLoop(alone, ADAMW(alone.parameters()), MSE, microbatches, late)
    options: dict[str, Any] = {"schedule": schedule, "extensions": [fxpipe.Dispatch(dispatch)]}
    with compiled(model, 3, microbatches, ADAMW, **options) as pipe:
        for x, y in data[:3]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.checkpoint(tmp_path / "run")
        plant(kind, device, batch=6)

        def train() -> None:
            for x, y in data[3:]:
                pipe.step(x, target=y)
            pipe.flush()

        error = pull(train)
        assert isinstance(error.__cause__, Planted)
        assert "so the pipe has ended; go on from the last checkpoint" in str(error)
        assert told(pipe) == steps_of(pipe)
        assert 4 <= min(told(pipe).values()) <= max(told(pipe).values()) <= 9
        calls: list[Callable[[], Any]] = [pipe.state_dict, lambda: pipe(data[0][0])]
        for call in (lambda: pipe.step(*data[0]), *calls):
            with pytest.raises(fxpipe.EndedError):
                call()
        interpreter.HANDLERS = HANDLERS
        pipe.restore(tmp_path / "run")
        for x, y in data[3:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)


@dispatches
@pytest.mark.parametrize(("microbatches", "delay"), [*deep((3, 1), (2, 2)), (1, 3)])
def test_no_stage_has_more_versions_than_its_batches_read_even_if_the_first_stage_is_slow(
    microbatches: int, delay: int, dispatch: Dispatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """d · m ≥ p − 1 and no more: the last stage could update twice before the first does once."""
    most = MostVersions(monkeypatch)
    model, data = make("mlp", 9, 4)
    expected = DelayedLoop.beside(model, ADAMW, microbatches, delay=delay)

    def slow(machine: Machine, instruction: Any) -> None:
        if machine.device == 0:
            time.sleep(0.02)
        instruction.run(machine)

    options: dict[str, Any] = {"schedule": "1f1b-async"}
    with compiled(
        model, 4, microbatches, ADAMW, extensions=[fxpipe.Dispatch(dispatch)], **options
    ) as pipe:
        interpreter.HANDLERS = {**HANDLERS, ins.Update: slow}
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        assert most.of(pipe) == [delay + 1] * 4
        assert pipe.schedule.versions().live == (delay + 1,) * 4
    expected.assert_same(model)


def test_an_error_inside_of_a_with_block_lets_what_is_in_flight_finish() -> None:
    model, data = make("mlp", 3, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3)
    pipe = compiled(model, 3, 3, ADAMW)
    with pytest.raises(Planted), pipe:
        for x, y in data:
            pipe.step(x, target=y)
        raise Planted
    assert pipe.closed
    expected.run(data)
    expected.assert_same(model)


def test_a_parameter_changed_by_hand_in_flight_is_refused() -> None:
    model, data = make("mlp", 6, 4)
    changed = Event()

    def waiting(machine: Machine, instruction: Any) -> None:
        if machine.step + instruction.batch == 2:
            changed.wait(60)  # else the change may fall into an update, which hides it
        instruction.run(machine)

    interpreter.HANDLERS = {**HANDLERS, ins.Update: waiting}
    with compiled(model, 3, 3, ADAMW) as pipe:
        for x, y in data[:3]:
            pipe.step(x, target=y)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        changed.set()

        def train() -> None:
            for x, y in data[3:]:
                pipe.step(x, target=y)
            pipe.flush()

        assert "changed by hand while batches were in flight; call pipe.flush()" in str(pull(train))


def test_a_batch_that_is_refused_leaves_those_in_flight_alone() -> None:
    model, data = make("mlp", 6, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3)
    with compiled(model, 3, 3, ADAMW) as pipe:
        for t, (x, y) in enumerate(data):
            if t == 3:
                with pytest.raises(fxpipe.InputError, match="give tensors of one batch size"):
                    pipe.step(x, target=y[:3])
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)


def test_after_a_flush_a_parameter_may_be_changed_by_hand() -> None:
    model, data = make("mlp", 6, 4)
    with compiled(model, 3, 3, ADAMW) as pipe:
        for t, (x, y) in enumerate(data):
            if t == 3:
                pipe.flush()
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
            pipe.step(x, target=y)
        pipe.flush()


def test_a_loss_that_fails_tells_how_far_each_stage_is() -> None:
    model, data = make("mlp", 3, 4)
    returned = Event()
    with compiled(model, 2, 3, ADAMW) as pipe:
        plant(ins.Forward, 1, batch=0, after=returned)
        loss = pipe.step(data[0][0], target=data[0][1])
        returned.set()
        error = pull(lambda: float(loss))
        assert told(pipe) == {0: 0, 1: 0}
    assert "of 1 begun batches, the stages have updated with: stages 0-1 with 0" in str(error)
    assert error.device == 1


@dispatches
@pytest.mark.parametrize("kind", [ins.Forward, ins.Update])
def test_ctrl_c_leaves_the_batch_in_flight_and_training_can_go_on(
    kind: type[ins.Instruction], dispatch: Dispatches
) -> None:
    model, data = make("mlp", 8, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3)

    pressed: list[int] = []

    def interrupting(machine: Machine, instruction: Any) -> None:
        instruction.run(machine)
        if machine.device == 1 and machine.step + instruction.batch == 4 and not pressed:
            pressed.append(4)  # once: the next micro-batch's could strike after the test
            _thread.interrupt_main()

    with compiled(model, 3, 3, ADAMW, extensions=[fxpipe.Dispatch(dispatch)]) as pipe:
        for x, y in data[:4]:
            pipe.step(x, target=y)
        interpreter.HANDLERS = {**HANDLERS, kind: interrupting}
        with pytest.raises(KeyboardInterrupt):
            for x, y in data[4:]:
                pipe.step(x, target=y)
            pipe.flush()
        interpreter.HANDLERS = HANDLERS
        assert pipe.batches > 4
        for x, y in data[pipe.batches :]:  # Ctrl-C may also strike between two steps
            pipe.step(x, target=y)
        pipe.flush()
        assert pipe.batches == len(data)
    expected.run(data)
    expected.assert_same(model)
