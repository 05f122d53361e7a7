"""Worker threads, the channels between devices, and the backend that runs CPU devices."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from fxpipe.errors import DeviceError, InputError, RankError
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.runtime.group import Group
from fxpipe.runtime.host import BatchHost, Job
from fxpipe.runtime.interpreter import Machine, Stopped

T = TypeVar("T")

Jobs = SimpleQueue[Callable[[], None] | None]


class Worker:
    """A thread that runs jobs one after another. A job must not raise.

    The thread ends once the worker is closed or garbage-collected.

    Attributes:
        thread: the thread.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the thread. ``threads`` is the number of intra-op threads of its operations."""
        self._jobs: Jobs = SimpleQueue()
        self._submitted, self._done = 0, [0]
        ready = threading.Event()
        self.thread = thread = threading.Thread(
            target=_work, args=(self._jobs, self._done, threads, ready), name=name, daemon=True
        )
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False  # _end_all ends all threads, and waits for them
        _running[thread] = self._jobs
        try:
            thread.start()
            ready.wait()
        finally:
            # the thread's count became the default for new threads: restore the caller's
            torch.set_num_threads(torch.get_num_threads())

    @property
    def idle(self) -> bool:
        """Whether the thread has finished all jobs, or has ended."""
        return self._done[0] == self._submitted or not self.thread.is_alive()

    def check(self) -> None:
        """Check that the thread can run jobs. Raises InputError, which says why it cannot."""
        if not self._end.alive:
            raise InputError("the pipe is closed; compile the model again")
        if self.thread.is_alive():
            return
        raise InputError(
            f"the pipe's thread {self.thread.name!r} has ended, by an exception that came from "
            "outside, because Python ends, or because this process was forked; close() the pipe "
            "and compile the model again"
        )

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after the jobs submitted before. Raises like ``check``."""
        self.check()
        self._submitted += 1
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once it has run all submitted jobs."""
        self._end()


def is_worker() -> bool:
    """Whether the current thread is a worker's."""
    return threading.current_thread() in _running


def _work(jobs: Jobs, done: list[int], threads: int, ready: threading.Event) -> None:
    torch.get_num_threads()  # sets torch's default in this thread now; later it would replace ours
    torch.set_num_threads(threads)
    ready.set()
    with torch.no_grad():
        while True:
            job = jobs.get()
            if job is None:
                return
            job()
            del job  # else it would keep the last run's tensors alive until the next job
            done[0] += 1


_running: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Wait for every worker: a thread that runs an operation while Python exits may crash."""
    running = list(_running.items())
    for _, jobs in running:
        jobs.put(None)
    for thread, _ in running:
        thread.join()


class Channels:
    """Channels between the devices of one run: a queue into each; tensors go by reference.

    Attributes:
        stopping: whether each device has to leave its list at its next instruction.
        replicas: what an extension exchanges between the replicas; None if there is one.
    """

    replicas: Any = None

    def __init__(self, program: Program, threads: int) -> None:
        """Make empty channels; ``threads`` is how many threads run the lists and meet at a
        barrier."""
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
        """Wait for a value that was sent to a device. Raises Stopped when the run is stopped."""
        arrived, inbox = self._arrived[device], self._inboxes[device]
        while buffer not in arrived:
            message = self._next(inbox)
            arrived[message[0]] = message[1]
            del message
        return arrived.pop(buffer)

    def _next(self, queue: SimpleQueue[T | None]) -> T:
        """Wait for the next item of a queue. Raises Stopped when the run is stopped."""
        item = queue.get()
        if item is None:
            raise Stopped
        return item

    def prepare(self, machine: Machine) -> None:
        """Prepare a device that is about to run its list, or to go on after a pause."""

    def arrive(self, machine: Machine, buffer: Buffer) -> Any:
        """Receive the value that a device's instruction asks for. Raises like ``get``."""
        return self.get(machine.device, buffer)

    def meet(self) -> None:
        """Wait until every thread has called this. Raises Stopped when the run is stopped."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def start(self) -> None:
        """Note that devices begin to run."""

    def pause(self) -> None:
        """Note that no device runs before the next ``start``."""

    def publish(self, buffer: Buffer, value: Any) -> None:
        """Send a value that callers want to the callers in other processes, if there are any."""

    def flush(self) -> None:
        """Send the values that ``publish`` has kept back."""

    def fed(self, batch: int) -> None:
        """Note that a batch can be run from now on."""

    def when_failed(self, failed: Callable[[RankError], None]) -> None:
        """Have a function called, in another thread, once another process has stopped the run."""

    def left(self, explain: Callable[[], BaseException]) -> None:
        """Tell other processes that a device here has failed and leaves the run. ``explain`` makes
        the error to tell; it is not called if there is no other process."""

    def stop(self) -> None:
        """Wake every device that waits; each leaves its list at its next instruction."""
        self.stopping = True
        self._barrier.abort()
        for inbox in self._inboxes:
            inbox.put(None)


class Backend:
    """Devices of one kind, kept from run to run.

    This class runs CPU devices, where an instruction is done when it returns. Backends of other
    devices override what they do differently.
    """

    def __init__(self, group: Group | None = None) -> None:
        """``group`` has the ranks that run a program together; by default this process alone."""
        self.group = Group() if group is None else group

    def devices(self, program: Program) -> Sequence[int]:
        """The indices of the devices whose lists this process runs."""
        return range(program.devices)

    def channels(self, program: Program, threads: int, jobs: Mapping[int, Job]) -> Channels:
        """Make the channels for one run; see Channels. ``jobs`` has the run's batches."""
        return Channels(program, threads)

    def machine(self, device: int, first: int) -> Callable[..., Machine]:
        """Return what makes the Machine of a device for one run; ``first`` is the number of the
        run's first step."""
        return partial(Machine, device=device, step=first)

    def begin(self, host: BatchHost) -> None:
        """Begin a run: order the devices after what the caller has launched so far, also on the
        devices where its batch is."""

    def end(self) -> None:
        """End the launching of a run: order the caller after what the devices compute."""

    def caller(self) -> Callable[[], AbstractContextManager[None]]:
        """Remember what the calling thread orders its launches by, such as current streams. In a
        block of the result, runs are ordered by that as well: autograd calls in its own thread."""
        return nullcontext

    def close(self) -> None:
        """Close the connections to other processes, if there are any."""

    def computing(self, device: int) -> AbstractContextManager[None]:
        """Order operations inside the block after the device's computations."""
        return nullcontext()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        """A machine's ``times`` by a clock that all devices share. May wait for the device."""
        return list(times)

    def generators(self) -> Mapping[str, torch.Generator]:
        """Name of each device with its own random number generator → that generator."""
        return {}

    def late(self, error: BaseException, when: str) -> DeviceError | None:
        """The error to raise for one that is a device's late report of an earlier instruction's
        failure; None for any other. ``when`` says in one clause when it was raised."""
        return None
