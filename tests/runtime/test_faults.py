"""Any instruction that fails: raised with its place, and as if it had not run; once an update has
begun, the pipe has ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe import EndedError, ExecutionError
from fxpipe.ir.instruction import Barrier, Instruction, Pause, Update, every_opcode
from fxpipe.runtime import interpreter
from fxpipe.runtime.choice import Dispatches
from fxpipe.runtime.interpreter import Machine, run_own
from fxpipe.text.program import print_instruction
from tests.helpers.profiles import deep
from tests.helpers.tiny import Snapshot, adam, batch, pipe_of, within

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

    return {kind: wrapped(run_own) for kind in every_opcode().values()}


def everywhere(pipe: fxpipe.Pipeline) -> Iterator[tuple[int, int, Instruction]]:
    for device, instructions in enumerate(pipe.program.lists):
        for position, instruction in enumerate(instructions):
            yield device, position, instruction


def told_updated(pipe: fxpipe.Pipeline) -> str:
    """The stages that an ended pipe says have updated."""
    with pytest.raises(EndedError) as raised:
        pipe.flush()
    text = re.search(r"earlier call: stages? (.*?) updated with this batch", str(raised.value))
    assert text is not None
    return text[1].replace("0-2", "0, 1, 2").replace("0-1", "0, 1").replace("1-2", "1, 2")


def refuses_all_but_a_checkpoint(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor, folder: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: pipe.step(x, target=y),
        lambda: pipe(x),
        lambda: pipe.prepare(x, target=y),
        pipe.flush,
        pipe.eval,
        pipe.state_dict,
        lambda: pipe.load_state_dict({}),
        lambda: pipe.checkpoint(folder / "after"),
        lambda: pipe.save(folder / "all"),
    ]
    for call in calls:
        with pytest.raises(EndedError, match=r"restore\(\) or load\(\)"):
            call()
    assert {path.name for path in folder.iterdir()} == {"before"}


@pytest.mark.parametrize(
    ("dispatch", "optimizer", "schedule"),
    [
        ("device", None, "gpipe"),
        ("thread", adam, "1f1b"),
        *deep(("device", None, "1f1b"), ("thread", adam, "gpipe")),
        *deep(("device", adam, "gpipe"), ("device", adam, "1f1b")),
    ],
)
def test_a_fault_at_any_instruction_has_not_happened(
    dispatch: Dispatches,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    x, y = batch()
    with pipe_of(3, schedule, optimizer=optimizer, extensions=[fxpipe.Dispatch(dispatch)]) as pipe:
        for parameter in pipe.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        pipe.step(x, target=y)  # the optimizers have state
        before = Snapshot.of(pipe)
        pipe.checkpoint(tmp_path / "before")
        loss = pipe.step(x, target=y)
        expected = Snapshot.of(pipe)
        assert before != expected
        for device, position, instruction in everywhere(pipe):
            list_ = pipe.program.lists[device]
            barrier = list_.index(Barrier()) if optimizer else len(list_)
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
                ended = "so the pipe has ended" in str(raised.value)
                assert not (ended and (optimizer is None or position < barrier)), where
                updated = after and isinstance(instruction, Update) and optimizer is not None
                if ended or updated:  # before its update, a device may come first, or not
                    stage = raised.value.stage
                    assert not updated or str(stage) in told_updated(pipe), where
                    refuses_all_but_a_checkpoint(pipe, x, y, tmp_path)
                    pipe.restore(tmp_path / "before")
                    before.restore(pipe)
                assert not list(before.differences(Snapshot.of(pipe))), where
                with within(1):
                    assert torch.equal(pipe.step(x, target=y), loss), where
                assert not list(expected.differences(Snapshot.of(pipe))), where


@pytest.mark.parametrize("dispatch", ["device", "thread"])
def test_a_fault_at_any_instruction_of_a_call_or_its_backward_has_not_happened(
    dispatch: Dispatches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, _ = batch()
    x.requires_grad_()
    with pipe_of(3, extensions=[fxpipe.Dispatch(dispatch)]) as pipe:
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
