"""A worker's thread that has ended is told of, and nobody waits for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import fxpipe
from fxpipe.runtime.driver import Driver
from tests.helpers.tiny import Snapshot, adam, batch, pipe_of, soon
from tests.oracles import loop


def end(pipe: fxpipe.Pipeline, worker: int) -> None:
    """End a worker's thread by an exception from outside."""
    name = f"fxpipe-{worker}"
    owner = pipe._engine._workers[worker]
    thread = owner.thread
    assert thread.name == name
    assert thread.ident is not None
    kind, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    assert soon(lambda: owner.idle)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(kind, error)
    owner._jobs.put(lambda: None)  # it wakes up
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_has_ended_is_told_of_at_the_next_step(schedule: str, worker: int) -> None:
    x, y = batch()
    with pipe_of(2, schedule, optimizer=adam) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        end(pipe, worker)
        with pytest.raises(fxpipe.InputError, match=f"thread 'fxpipe-{worker}' has ended"):
            pipe.step(x, target=y)
        with pytest.raises(fxpipe.InputError, match=f"thread 'fxpipe-{worker}' has ended"):
            pipe(x)
        if schedule == "2bw":
            with pytest.raises(fxpipe.EndedError, match="stages have updated with: "):
                pipe.flush()
            return
        found = {name: value.clone() for name, value in pipe.state_dict().items()}
        done = pipe.batches
    assert done == 3
    with pipe_of(2, schedule, optimizer=adam) as alone:
        for _ in range(done):
            alone.step(x, target=y)
        loop.assert_same(found, alone.state_dict())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_worker_that_ends_during_a_step_does_not_let_it_wait(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    x, y = batch()
    plain = Driver.run

    def run(driver: Driver, *step: Any) -> None:
        if driver.machines[0].device == 1:
            raise SystemExit
        plain(driver, *step)

    with pipe_of(2, schedule, optimizer=adam) as pipe:
        pipe.prepare(x, target=y)
        assert pipe.optimizer
        before = Snapshot.of(pipe)
        monkeypatch.setattr(Driver, "run", run)
        with pytest.raises(fxpipe.InputError, match="thread 'fxpipe-1' has ended"):
            float(pipe.step(x, target=y))
        if schedule == "1f1b":
            assert not list(before.differences(Snapshot.of(pipe)))
