"""Ctrl-C: raised within a second, with where the devices were; a step is whole or not at all."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional

import fxpipe
from fxpipe.ir.instruction import Barrier, every_opcode
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import Machine, run_own
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.signals import HeldSignals
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import DEEP
from tests.helpers.tiny import (
    CUTS,
    Metronome,
    Snapshot,
    Tiny,
    adam,
    batch,
    pipe_of,
    raise_signal,
    soon,
    within,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")

KEPT = "interrupted after the step, whose results are kept"


WAYS: dict[str, Callable[[], None]] = {
    "raise_signal": raise_signal,
    "interrupt_main": _thread.interrupt_main,
    "kill": lambda: os.kill(os.getpid(), signal.SIGINT),
}


@pytest.fixture(scope="module", params=["device", "thread"])
def pipe(request: pytest.FixtureRequest) -> Iterator[fxpipe.Pipeline]:
    with pipe_of(2, optimizer=adam, extensions=[fxpipe.Dispatch(request.param)]) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        yield pipe


@contextmanager
def calling_at(device: int, position: int, call: Callable[[Machine], None]) -> Iterator[None]:
    """One instruction calls something before it does its work."""

    def wrapped(handler: Callable[[Machine, Any], None]) -> Callable[[Machine, Any], None]:
        def run(machine: Machine, instruction: Any) -> None:
            if (machine.device, machine.position) == (device, position):
                call(machine)
            handler(machine, instruction)

        return run

    table = {kind: wrapped(run_own) for kind in every_opcode().values()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "HANDLERS", table)
        yield


def until_noticed(send: Callable[[], None]) -> Callable[[Machine], None]:
    """Send a signal, and stay inside of the instruction until the run is told to stop."""

    def interrupt(machine: Machine) -> None:
        send()
        assert soon(lambda: machine.channels.stopping)

    return interrupt


def before_updates(pipe: fxpipe.Pipeline) -> Iterator[tuple[int, int]]:
    """Device and position of all instructions that come before the updates."""
    for device, instructions in enumerate(pipe.program.lists):
        for position in range(instructions.index(Barrier()) + 1):
            yield device, position


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_inside_of_any_instruction_before_the_updates_undoes_the_step(
    pipe: fxpipe.Pipeline, way: str
) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    loss = pipe.step(x, target=y)
    after = Snapshot.of(pipe)
    for device, position in [*before_updates(pipe)][:: 1 if way == "kill" else 5]:
        before.restore(pipe)
        with (
            within(1),
            calling_at(device, position, until_noticed(WAYS[way])),
            pytest.raises(KeyboardInterrupt) as raised,
        ):
            pipe.step(x, target=y)
        (note,) = raised.value.__notes__
        assert note.startswith("interrupted: device 0 was") and "; device 1 was" in note
        assert note.endswith("; the weights are as before the step")
        assert not list(before.differences(Snapshot.of(pipe)))
        assert torch.equal(pipe.step(x, target=y), loss)
        assert not list(after.differences(Snapshot.of(pipe)))


@pytest.mark.parametrize("stage", [0, 1])
def test_an_interrupt_of_an_update_lets_all_updates_finish(
    pipe: fxpipe.Pipeline, stage: int
) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    pipe.step(x, target=y)
    after = Snapshot.of(pipe)
    before.restore(pipe)
    optimizer = made_by(pipe)[stage]
    assert optimizer is not None
    hook = optimizer.register_step_pre_hook(lambda *_: _thread.interrupt_main())
    with within(1), pytest.raises(KeyboardInterrupt) as raised:
        pipe.step(x, target=y)
    hook.remove()
    assert raised.value.__notes__ == [KEPT]
    assert not list(after.differences(Snapshot.of(pipe)))


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_while_instructions_go_on_leaves_the_step_whole_or_undone(
    pipe: fxpipe.Pipeline, way: str
) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    pipe.step(x, target=y)
    after = Snapshot.of(pipe)
    pipe.step(x, target=y)
    last = Snapshot.of(pipe)
    for device, instructions in enumerate(pipe.program.lists):
        for position in range(0, len(instructions), 5):
            before.restore(pipe)
            with (
                within(1),
                calling_at(device, position, lambda machine: WAYS[way]()),
                pytest.raises(KeyboardInterrupt) as raised,
            ):
                pipe.step(x, target=y)
            whole = raised.value.__notes__ == [KEPT]
            assert not list((after if whole else before).differences(Snapshot.of(pipe)))
            pipe.step(x, target=y)
            assert not list((last if whole else after).differences(Snapshot.of(pipe)))


def test_an_interrupt_while_the_results_become_the_models_keeps_them(
    pipe: fxpipe.Pipeline,
) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    pipe.step(x, target=y)
    after = Snapshot.of(pipe)
    before.restore(pipe)
    commit = LiveWeights.commit

    def interrupted(*args: Any) -> None:
        raise_signal()
        commit(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as raised:
        patch.setattr(LiveWeights, "commit", interrupted)
        pipe.step(x, target=y)
    assert raised.value.__notes__ == [KEPT]
    assert not list(after.differences(Snapshot.of(pipe)))


def test_the_note_says_where_each_device_was(pipe: fxpipe.Pipeline) -> None:
    x, y = batch()
    position = next(
        i for i, each in enumerate(pipe.program.lists[1]) if type(each).__name__ == "Backward"
    )
    with (
        calling_at(1, position, until_noticed(_thread.interrupt_main)),
        pytest.raises(KeyboardInterrupt) as raised,
    ):
        pipe.step(x, target=y)
    (note,) = raised.value.__notes__
    assert f"device 1 was at instruction {position}, backward s1[0] v0" in " ".join(note.split())


def test_an_interrupt_does_not_wait_for_a_slow_instruction_and_the_next_step_does(
    pipe: fxpipe.Pipeline,
) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    loss = pipe.step(x, target=y)
    after = Snapshot.of(pipe)
    before.restore(pipe)
    goes_on = threading.Event()
    ended: list[bool] = []

    def interrupt(machine: Machine) -> None:
        _thread.interrupt_main()
        ended.append(goes_on.wait(60))

    with within(1), calling_at(0, 1, interrupt), pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    assert not ended
    assert not list(before.differences(Snapshot.of(pipe)))
    threading.Timer(0.1, goes_on.set).start()
    assert torch.equal(pipe.step(x, target=y), loss)
    assert ended == [True]
    assert not list(after.differences(Snapshot.of(pipe)))


def test_further_interrupts_do_not_break_the_first(pipe: fxpipe.Pipeline) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    asked: list[int] = []

    def handler(number: int, frame: Any) -> None:
        asked.append(number)
        if HeldSignals._innermost is not None:  # those that come after the step end no test
            raise KeyboardInterrupt

    def interrupt(machine: Machine) -> None:
        until_noticed(_thread.interrupt_main)(machine)
        for _ in range(40):
            _thread.interrupt_main()
            time.sleep(0.005)
        all_sent.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        for position in (1, pipe.program.lists[0].index(Barrier())):
            all_sent = threading.Event()
            before.restore(pipe)
            asked.clear()
            with (
                within(2),
                calling_at(0, position, interrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                pipe.step(x, target=y)
            assert all_sent.wait(60)
            assert len(asked) > 1
            assert not list(before.differences(Snapshot.of(pipe)))
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_interrupt_of_a_backward_leaves_gradients_alone() -> None:
    x, _ = batch()
    torch.manual_seed(0)
    with fxpipe.compile(Tiny(), ["cpu"] * 2, microbatches=2, partition=CUTS[2]) as pipe:
        pipe(x).sum().backward()
        before = Snapshot.of(pipe)
        position = len(pipe.program.lists[0]) - 1
        output = pipe(x).sum()
        with (
            within(1),
            calling_at(0, position, until_noticed(_thread.interrupt_main)),
            pytest.raises(KeyboardInterrupt),
        ):
            output.backward()
        assert Snapshot.of(pipe).gradients.keys() == before.gradients.keys()
        for name, gradient in Snapshot.of(pipe).gradients.items():
            found = before.gradients[name]
            assert gradient is not None and found is not None and torch.equal(gradient, found)


@contextmanager
def calling_at_node(number: int, call: Callable[[], None]) -> Iterator[list[int]]:
    """Something is called before the node of that number is made; yields how many were made."""
    made = [0]
    create_node = torch.fx.Graph.create_node

    def creating(*args: Any, **kwargs: Any) -> torch.fx.Node:
        made[0] += 1
        if made[0] == number:
            call()
        return create_node(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.Graph, "create_node", creating)
        yield made


@pytest.mark.traces
def test_an_interrupt_while_compiling_leaves_no_trace() -> None:
    def compiled() -> fxpipe.Pipeline:
        torch.manual_seed(0)
        return fxpipe.compile(
            Tiny(), ["cpu"] * 2, microbatches=2, loss=functional.cross_entropy, partition=CUTS[2]
        )

    x, y = batch()
    threads = 4
    torch.set_num_threads(threads)
    with compiled() as alone, calling_at_node(0, raise_signal) as nodes:
        loss = alone.step(x, target=y)
        after = Snapshot.of(alone)
    for number in range(1, nodes[0], nodes[0] // (6 if DEEP else 3)):
        sent: list[float] = []

        def send(sent: list[float] = sent) -> None:
            sent.append(time.monotonic())
            raise_signal()

        with compiled() as pipe:
            before = Snapshot.of(pipe)
            with Metronome() as metronome, calling_at_node(number, send):
                with pytest.raises(KeyboardInterrupt):
                    pipe.step(x, target=y)
                took = time.monotonic() - sent[0]
            assert took < 1 + metronome.late
            assert not list(before.differences(Snapshot.of(pipe)))
            assert torch.get_num_threads() == threads
            assert torch.equal(pipe.step(x, target=y), loss)
            assert not list(after.differences(Snapshot.of(pipe)))


@pytest.mark.parametrize("place", ["known", "weighed"])
def test_an_interrupt_in_a_callback_of_a_weak_reference_is_not_lost(
    pipe: fxpipe.Pipeline, place: str
) -> None:
    """Python drops what such a callback raises, and a trace leaves thousands of them."""
    owner = pipe._compiler
    original = getattr(owner, place)

    class Dies:
        pass

    def dying(*args: Any, **kwargs: Any) -> Any:
        dies = Dies()
        reference = weakref.ref(dies, lambda _: raise_signal())
        del dies
        assert reference() is None
        return original(*args, **kwargs)

    x, y = batch()
    pipe.step(x, target=y)
    before = Snapshot.of(pipe)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as raised:
        patch.setattr(owner, place, dying)
        pipe.step(x, target=y)
    undone = not list(before.differences(Snapshot.of(pipe)))
    assert undone == (not hasattr(raised.value, "__notes__"))


def test_a_handler_that_raises_nothing_does_not_end_the_step(pipe: fxpipe.Pipeline) -> None:
    x, y = batch()
    before = Snapshot.of(pipe)
    loss = pipe.step(x, target=y)
    before.restore(pipe)
    asked: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        with calling_at(0, 3, lambda machine: raise_signal()):
            assert torch.equal(pipe.step(x, target=y), loss)
        assert asked == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_what_other_handlers_raise_ends_the_step_as_ctrl_c_does(pipe: fxpipe.Pipeline) -> None:
    def leave(number: int, frame: Any) -> None:
        sys.exit(7)

    terminate = until_noticed(lambda: signal.raise_signal(signal.SIGTERM))
    x, y = batch()
    before = Snapshot.of(pipe)
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        with (
            within(1),
            calling_at(1, 3, terminate),
            pytest.raises(SystemExit) as raised,
        ):
            pipe.step(x, target=y)
        assert raised.value.code == 7
        assert not list(before.differences(Snapshot.of(pipe)))
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_step_in_another_thread_works_and_leaves_signals_alone(pipe: fxpipe.Pipeline) -> None:
    x, y = batch()
    losses: list[Any] = []
    thread = threading.Thread(target=lambda: losses.append(pipe.step(x, target=y)))
    thread.start()
    thread.join(30)
    assert len(losses) == 1
