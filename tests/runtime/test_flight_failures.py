"""Failures while batches are in flight: which batches count, and what the weights are after."""

from __future__ import annotations

import _thread
import copy
import re
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.ir import instruction as ins
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import Machine
from tests.helpers.overlapping import ADAMW, MostVersions, compiled, make
from tests.oracles import loop
from tests.oracles.delayed_loop import MSE, DelayedLoop, RuledLoop

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
        HANDLERS[kind](machine, instruction)

    interpreter.HANDLERS = {**HANDLERS, kind: failing}


def pull(do: Callable[[], Any]) -> fxpipe.ExecutionError:
    with pytest.raises(fxpipe.ExecutionError) as caught:
        do()
    return caught.value


@pytest.mark.parametrize(
    ("device", "dispatch"), [(0, "device"), (1, "device"), (2, "device"), (1, "thread")]
)
@pytest.mark.parametrize("kind", [ins.Forward, ins.Backward, ins.Update])
def test_after_a_failure_all_stages_have_the_weights_of_one_batch_and_go_on_from_there(
    kind: type[ins.Instruction], device: int, dispatch: str
) -> None:
    model, data = make("unet" if device == 1 else "mlp", 10, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3)
    alone, theirs = expected.model, expected.optimizer
    snapshots = [copy.deepcopy((alone.state_dict(), theirs.state_dict()))]
    for x, y in data:
        expected.step(x, y)
        snapshots.append(copy.deepcopy((alone.state_dict(), theirs.state_dict())))
    with compiled(model, 3, 3, ADAMW, dispatch=dispatch) as pipe:
        plant(kind, device, batch=5)

        def train() -> None:
            for x, y in data:
                pipe.step(x, target=y)
            pipe.flush()

        error = pull(train)
        assert isinstance(error.__cause__, Planted)
        told = re.search(r"those after (\d+) batches, and the (\d+) that came later", str(error))
        assert told is not None, str(error)
        done = int(told[1])
        assert 4 <= done <= 5
        assert 1 <= int(told[2]) <= 3
        loop.assert_same(model.state_dict(), snapshots[done][0])
        interpreter.HANDLERS = HANDLERS
        # the next batch reads the only version that is left, and so on
        alone.load_state_dict(snapshots[done][0])
        theirs.load_state_dict(snapshots[done][1])
        expected.restart()
        for x, y in data[done:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)


@pytest.mark.parametrize(
    ("schedule", "device", "dispatch"),
    [
        ("pipedream", 0, "device"),
        ("pipedream", 1, "device"),
        ("pipedream", 2, "device"),
        ("pipedream", 1, "thread"),
        ("cdp-v2", 0, "device"),
        ("cdp-v2", 1, "thread"),
    ],
)
@pytest.mark.parametrize("kind", [ins.Forward, ins.Backward, ins.Update])
def test_stages_that_read_differently_late_go_back_to_one_batch_as_well(
    kind: type[ins.Instruction], schedule: str, device: int, dispatch: str
) -> None:
    microbatches = 3 if schedule == "cdp-v2" else 1
    model, data = make("mlp", 12, 3)
    alone = copy.deepcopy(model)

    def late(name: str, i: int) -> int:
        following = 2 - int(name.split(".")[0]) // 2  # stages
        return -((i - following) // microbatches)

    expected = RuledLoop(alone, ADAMW(alone.parameters()), MSE, microbatches, late)
    options: dict[str, Any] = {"schedule": schedule, "tracer": "symbolic", "dispatch": dispatch}
    with compiled(model, 3, microbatches, ADAMW, **options) as pipe:
        plant(kind, device, batch=6)

        def train() -> None:
            for x, y in data:
                pipe.step(x, target=y)
            pipe.flush()

        error = pull(train)
        done = pipe.batches
        assert f"the weights are those after {done} batches, and the " in str(error)
        assert 4 <= done <= 6
        interpreter.HANDLERS = HANDLERS
        expected.run(data[:done])
        expected.assert_same(model)
        # each batch that is given again trains every stage once, from the only version that is left
        expected.restart()
        for x, y in data[done:]:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        assert pipe.batches == len(data)
        assert pipe.weight_versions == ([2, 2, 1] if schedule == "cdp-v2" else [3, 2, 1])
    expected.assert_same(model)


@dispatches
@pytest.mark.parametrize(("microbatches", "delay"), [(3, 1), (2, 2), (1, 3)])
def test_going_back_takes_no_more_versions_than_reading_where_the_first_stage_is_slow(
    microbatches: int, delay: int, dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """d · m ≥ p − 1 and no more: the last stage could update twice before the first does once."""
    most = MostVersions(monkeypatch)
    model, data = make("mlp", 9, 4)
    states = DelayedLoop.beside(model, ADAMW, microbatches, delay=delay).states(data)

    def slow(machine: Machine, instruction: Any) -> None:
        if machine.device == 0:
            time.sleep(0.02)
            if machine.step + instruction.batch == 6:
                raise Planted("planted")
        HANDLERS[ins.Update](machine, instruction)

    options: dict[str, Any] = {"schedule": "1f1b-async", "tracer": "symbolic"}
    with compiled(model, 4, microbatches, ADAMW, dispatch=dispatch, **options) as pipe:
        interpreter.HANDLERS = {**HANDLERS, ins.Update: slow}

        def train() -> None:
            for x, y in data:
                pipe.step(x, target=y)
            pipe.flush()

        assert "those after 6 batches" in str(pull(train))
        assert most.of(pipe) == [delay + 1] * 4
        assert pipe.schedule.versions().live == (delay + 1,) * 4
    loop.assert_same(model.state_dict(), states[6])


@pytest.mark.parametrize(("schedule", "microbatches"), [("2bw", 3), ("pipedream", 1)])
def test_an_optimizer_that_fails_in_the_middle_of_its_step_leaves_no_half_of_it(
    schedule: str, microbatches: int
) -> None:
    class Breaking(torch.optim.SGD):
        """Fails after it has updated its first parameter."""

        steps = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            if self.steps == 4:
                self.param_groups[0]["params"][0].add_(1)
                self.param_groups[0]["lr"] = 7.0
                raise Planted("planted")
            super().step()

    model, data = make("mlp", 6, 4)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    alone = copy.deepcopy(model)
    theirs = torch.optim.SGD(alone.parameters(), **settings)
    last = () if schedule == "2bw" else ("3", "4", "5")  # these read the newest version
    expected = DelayedLoop(alone, theirs, MSE, microbatches, lambda name: name[0] not in last)
    options: dict[str, Any] = {"schedule": schedule, "tracer": "symbolic"}
    with compiled(model, 2, microbatches, lambda p: Breaking(p, **settings), **options) as pipe:

        def train() -> None:
            for x, y in data:
                pipe.step(x, target=y)
            pipe.flush()

        told = re.search(r"those after (\d) batches", str(pull(train)))
        assert told is not None
        done = int(told[1])
        assert done == 3 or (schedule == "pipedream" and done == 2)
        expected.run(data[:done])
        expected.assert_same(model)
        for optimizer in pipe.optimizers:
            assert isinstance(optimizer, Breaking)
            assert (optimizer.steps, optimizer.param_groups[0]["lr"]) == (done, 0.1)


def test_an_error_inside_of_a_with_block_drops_what_is_in_flight() -> None:
    model, data = make("mlp", 3, 4)
    states = DelayedLoop.beside(model, ADAMW, 3).states(data)
    pipe = compiled(model, 3, 3, ADAMW)
    with pytest.raises(Planted), pipe:
        for x, y in data:
            pipe.step(x, target=y)
        raise Planted
    assert pipe.closed
    equal = [
        all(
            torch.equal(a, b)
            for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )
        for state in states
    ]
    assert any(equal[1:]), "the weights are those of no batch"


def test_a_parameter_changed_by_hand_in_flight_is_refused() -> None:
    model, data = make("mlp", 6, 4)
    with compiled(model, 3, 3, ADAMW) as pipe:
        for x, y in data[:3]:
            pipe.step(x, target=y)
        with torch.no_grad():
            next(model.parameters()).mul_(2)

        def train() -> None:
            for x, y in data[3:]:
                pipe.step(x, target=y)
            pipe.flush()

        assert "changed by hand while batches were in flight; call pipe.flush()" in str(pull(train))


def test_a_batch_that_is_refused_leaves_those_in_flight_alone() -> None:
    model, data = make("mlp", 6, 4)
    expected = DelayedLoop.beside(model, ADAMW, 3)
    with compiled(model, 3, 3, ADAMW, tracer="symbolic") as pipe:
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


def test_a_loss_that_fails_names_the_batches_that_count() -> None:
    model, data = make("mlp", 3, 4)
    returned = Event()
    with compiled(model, 2, 3, ADAMW) as pipe:
        plant(ins.Forward, 1, batch=0, after=returned)
        loss = pipe.step(data[0][0], target=data[0][1])
        returned.set()
        error = pull(lambda: float(loss))
    assert "those after 0 batches, and the 1 that came later are dropped" in str(error)
    assert error.device == 1


@dispatches
@pytest.mark.parametrize("kind", [ins.Forward, ins.Update])
def test_ctrl_c_in_flight_leaves_the_weights_of_one_batch(
    kind: type[ins.Instruction], dispatch: str
) -> None:
    model, data = make("mlp", 8, 4)
    states = DelayedLoop.beside(model, ADAMW, 3).states(data)

    def interrupting(machine: Machine, instruction: Any) -> None:
        HANDLERS[kind](machine, instruction)
        if machine.device == 1 and machine.step + instruction.batch == 4:
            _thread.interrupt_main()

    with compiled(model, 3, 3, ADAMW, dispatch=dispatch) as pipe:
        for x, y in data[:4]:
            pipe.step(x, target=y)
        interpreter.HANDLERS = {**HANDLERS, kind: interrupting}
        with pytest.raises(KeyboardInterrupt) as caught:
            for x, y in data[4:]:
                pipe.step(x, target=y)
            pipe.flush()
        interpreter.HANDLERS = HANDLERS
        notes = " ".join(getattr(caught.value, "__notes__", []))
        if "those after" in notes:
            told = re.search(r"those after (\d+) batches", notes)
            assert told is not None
            loop.assert_same(model.state_dict(), states[int(told[1])])
        else:  # it came at the end of a step, or between two
            pipe.flush()
            ours = model.state_dict()
            assert any(
                all(torch.equal(ours[name], value) for name, value in state.items())
                for state in states[4:]
            )
        pipe.step(data[0][0], target=data[0][1])
