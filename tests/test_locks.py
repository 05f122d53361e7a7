"""One thread at a time is in a pipe, and none while a model is traced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fxpipe.errors import InputError
from fxpipe.locks import PipeLock, locked
from fxpipe.runtime.backend import Worker


class Pipe:
    """What has a lock, and notes what runs in it."""

    def __init__(self, *workers: Worker) -> None:
        self._lock = PipeLock(workers)
        self.seen: list[str] = []

    @locked
    def hold(self, name: str, until: threading.Event) -> str:
        self.seen.append(f"{name} begins")
        until.wait(30)
        self.seen.append(f"{name} ends")
        return name

    @locked
    def twice(self) -> str:
        done = threading.Event()
        done.set()
        return str(self.hold("inner", done))

    @locked
    def trace(self, inside: Callable[[], Any]) -> None:
        with self._lock.exclusive():
            inside()

    @locked
    def fail(self) -> None:
        raise InputError("no such thing; give another")


def started(*jobs: Callable[[], Any]) -> list[threading.Thread]:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_second_thread_waits_for_the_first_and_one_may_enter_again() -> None:
    pipe, free = Pipe(), threading.Event()
    threads = started(lambda: pipe.hold("one", free))
    wait_for(lambda: bool(pipe.seen))
    threads += started(lambda: pipe.hold("two", free))
    time.sleep(0.05)
    assert pipe.seen == ["one begins"]
    free.set()
    for thread in threads:
        thread.join(30)
    assert pipe.seen == ["one begins", "one ends", "two begins", "two ends"]
    assert pipe.twice() == "inner"


def test_two_pipes_run_side_by_side() -> None:
    first, second, free = Pipe(), Pipe(), threading.Event()
    threads = started(lambda: first.hold("one", free), lambda: second.hold("two", free))
    wait_for(lambda: bool(first.seen and second.seen))
    free.set()
    for thread in threads:
        thread.join(30)


def test_a_trace_waits_for_other_pipes_and_they_for_it() -> None:
    running, tracing, free, traced = Pipe(), Pipe(), threading.Event(), threading.Event()
    order: list[str] = []
    threads = started(lambda: running.hold("step", free))
    wait_for(lambda: bool(running.seen))

    def inside() -> None:
        order.extend([*running.seen, "trace"])
        traced.wait(30)

    threads += started(lambda: tracing.trace(inside))
    time.sleep(0.05)
    assert not order  # the step runs yet
    free.set()
    wait_for(lambda: bool(order))
    threads += started(lambda: running.hold("later", free))
    time.sleep(0.05)
    assert order == ["step begins", "step ends", "trace"]
    assert running.seen == ["step begins", "step ends"]  # the trace goes on
    traced.set()
    for thread in threads:
        thread.join(30)
    assert running.seen[2:] == ["later begins", "later ends"]


def test_a_trace_waits_for_the_workers_of_other_pipes() -> None:
    worker, free, traced = Worker("other", 1), threading.Event(), threading.Event()
    other, tracing = Pipe(worker), Pipe()
    worker.submit(lambda: wait_for(free.is_set))
    (thread,) = started(lambda: tracing.trace(traced.set))
    time.sleep(0.05)
    assert not traced.is_set()
    free.set()
    thread.join(30)
    assert traced.is_set()
    worker.close()
    del other


def test_an_error_of_ours_comes_without_the_traceback_of_what_raised_it() -> None:
    pipe = Pipe()
    with pytest.raises(InputError, match="no such thing") as raised:
        pipe.fail()
    frames = [frame.name for frame in raised.traceback]
    assert "fail" not in frames and "call_locked" in frames
    assert pipe.twice() == "inner"  # the lock is free again
