"""What runs the devices' lists: worker threads, the channels between devices, and a backend for
each kind of device.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fxpipe.errors import InputError
from fxpipe.ir.plan import Stage
from fxpipe.ir.program import Buffer, Instruction, Program
from fxpipe.runtime.interpreter import Job, Machine, Stopped
from fxpipe.runtime.weights.live import Weights

Jobs = SimpleQueue[Callable[[], None] | None]


class Worker:
    """A thread that runs jobs one after another. A job must not raise.

    The thread ends once the worker is closed, or nobody holds the worker any more.

    Attributes:
        thread: the thread.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the thread.

        Args:
            name: for debuggers.
            threads: intra-op threads of its operations.
        """
        self._jobs: Jobs = SimpleQueue()
        self._given, self._done = 0, [0]
        self._process = os.getpid()
        ready = threading.Event()
        self.thread = thread = threading.Thread(
            target=_work, args=(self._jobs, self._done, threads, ready), name=name, daemon=True
        )
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False  # _end_all does it, and waits
        _running[thread] = self._jobs
        try:
            thread.start()
            ready.wait()
        finally:
            # the thread's count became the default of threads to come: put the caller's back
            torch.set_num_threads(torch.get_num_threads())

    @property
    def forked(self) -> bool:
        """Whether this is asked in another process, forked from that of its thread."""
        return os.getpid() != self._process

    @property
    def idle(self) -> bool:
        """Whether it is through with its jobs, or will never be."""
        return self._done[0] == self._given or not self.thread.is_alive()

    def check(self) -> None:
        """See that it can run jobs.

        Raises:
            InputError: it cannot, and why.
        """
        if not self._end.alive:
            raise InputError("the pipe is closed; compile the model again")
        if self.thread.is_alive():
            return
        if self.forked:
            raise InputError(
                "this process was forked from the one that compiled the pipe, and the pipe's "
                "threads run in that one alone; use the pipe there, or start this process by "
                'spawning (multiprocessing.get_context("spawn")) and compile in it'
            )
        raise InputError(
            f"the pipe's thread {self.thread.name!r} has ended, by an exception that came from "
            "outside, or because Python ends; close() the pipe and compile the model again"
        )

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those before it. Raises as ``check``."""
        self.check()
        self._given += 1
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        self._end()


def is_worker() -> bool:
    """Whether this is asked in the thread of a worker."""
    return threading.current_thread() in _running


def _work(jobs: Jobs, done: list[int], threads: int, ready: threading.Event) -> None:
    torch.get_num_threads()  # a thread takes the default at its first use: let that be now
    torch.set_num_threads(threads)
    _keep_memory()
    ready.set()
    with torch.no_grad():
        while True:
            job = jobs.get()
            if job is None:
                return
            job()
            done[0] += 1
            del job  # or the last run's tensors would live until the next


def _keep_memory() -> None:
    """Let glibc keep the memory of freed activations for the next ones.

    It returns free memory to the system above a threshold, and every step would fault the same
    pages in anew (a tenth of a small U-Net's step). The threshold rises when a large block that
    was mapped on its own is freed, to at most 32 MiB a block; see mallopt(3), M_MMAP_THRESHOLD.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


_running: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Wait for every worker: a thread that is inside an operation when Python ends may crash."""
    running = list(_running.items())
    for _, jobs in running:
        jobs.put(None)
    for thread, _ in running:
        thread.join()


class Channels:
    """The way between the devices of one run: a queue into each, tensors by reference.

    Attributes:
        stopping: whether each device is to leave its list at its next instruction.
    """

    def __init__(self, program: Program, threads: int) -> None:
        """Nothing is on its way.

        Args:
            program: what runs.
            threads: how many drive the devices; at a barrier each waits for the others.
        """
        self.stopping = False
        self._inboxes: list[SimpleQueue[tuple[Buffer, Any] | None]] = [
            SimpleQueue() for _ in program.lists
        ]
        self._arrived: list[dict[Buffer, Any]] = [{} for _ in program.lists]
        self._barrier = threading.Barrier(threads)

    def put(self, device: int, buffer: Buffer, value: Any) -> None:
        """Hand a value to a device; never waits."""
        self._inboxes[device].put((buffer, value))

    def get(self, device: int, buffer: Buffer) -> Any:
        """Wait on a device for a value. Raises Stopped when the run is stopped."""
        arrived, inbox = self._arrived[device], self._inboxes[device]
        while buffer not in arrived:
            message = inbox.get()
            if message is None:
                raise Stopped
            arrived[message[0]] = message[1]
            del message
        return arrived.pop(buffer)

    def meet(self) -> None:
        """Wait until every thread is here. Raises Stopped when the run is stopped."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def stop(self) -> None:
        """Wake every device that waits; each leaves its list at its next instruction."""
        self.stopping = True
        self._barrier.abort()
        for inbox in self._inboxes:
            inbox.put(None)


class Given(NamedTuple):
    """An instruction that a device was given.

    Attributes:
        position: its index in the device's list.
        instruction: the instruction.
        step: the step that it was given in.
    """

    position: int
    instruction: Instruction
    step: int


class Unfinished(NamedTuple):
    """What one stream may still be at.

    Attributes:
        device: of the program.
        place: what the device is called, such as ``cuda:1``.
        stream: the stream's name in programs.
        done: the last instruction that was seen to be done, or None.
        since: those that it was given later, in order.
    """

    device: int
    place: str
    stream: str
    done: Given | None
    since: tuple[Given, ...]


class DeviceMemory(NamedTuple):
    """The memory of a device.

    Attributes:
        place: what it is called; devices of one name share it.
        used: the most bytes that this process has had there, or None where nobody counts.
        total: its bytes, or None where they are not known.
    """

    place: str
    used: int | None
    total: int | None


class Backend:
    """Devices of one kind, kept from run to run.

    As it stands here they are on the CPU, where an instruction is done when it returns. What other
    devices do in another way, their backend says.
    """

    def channels(self, program: Program, threads: int) -> Channels:
        """The way between the devices in one run, which so many threads drive."""
        return Channels(program, threads)

    def machine(
        self,
        program: Program,
        device: int,
        stages: Sequence[Stage],
        jobs: Mapping[int, Job],
        channels: Any,
        weights: Weights,
        first: int,
    ) -> Machine:
        """One device in one run, see Machine, whose first step has this number."""
        return Machine(program, device, stages, jobs, channels, weights, step=first)

    def begin(self) -> None:
        """The caller starts a run: the devices may read what the caller has made."""

    def end(self) -> None:
        """A run is launched: the caller may read what the devices make."""

    def computing(self, device: int) -> AbstractContextManager[None]:
        """Within it, what a device's thread computes comes after the device's computations."""
        return nullcontext()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        """The times that a machine has taken, of one clock for all devices. It may wait."""
        return list(times)

    def memory(self, device: int) -> DeviceMemory:
        """The memory of a device; those on the CPU share the machine's."""
        known = "SC_PHYS_PAGES" in os.sysconf_names
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
        return DeviceMemory("the CPU", None, total)

    def generators(self) -> Mapping[str, torch.Generator]:
        """Device, where it has one of its own → torch's generator for it."""
        return {}

    def unfinished(self, error: BaseException) -> Sequence[Unfinished]:
        """For an error that devices report late, what they may be at; else nothing."""
        return ()
