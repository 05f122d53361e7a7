"""A contender's processes: they do nothing until they are told, one order at a time."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import resource
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.meeting import meeting_place
from benchmarks.peers.case import CASES, RESIDENT, Case
from benchmarks.peers.contender import Contender
from benchmarks.peers.contenders import CONTENDERS, REFERENCES, SAVING, Entry

PATIENCE = 120.0
"""Seconds after which a contender counts as hanging."""


class GroupError(Exception):
    """A contender raised, died or hangs; what is known of it."""


@dataclass(frozen=True)
class Step:
    """One update, or the mean of those of a turn.

    Attributes:
        seconds: of the process that took longest; if each made a step of its own, its part of that.
        cpu: processor seconds of all processes and threads, likewise.
        losses: of each batch of the turn.
    """

    seconds: float
    cpu: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes that were resident, summed over the processes; pages that they share count twice.

    Attributes:
        imported: when everything was imported, and nothing made.
        peak: at most, ever, or since the last ``reset``.
        now: at the moment.
    """

    imported: int
    peak: int
    now: int


@dataclass(frozen=True)
class _Failure:
    text: str


class Group:
    """The processes of one contender on one case.

    They are started at once, so that imports of several groups overlap; ``close`` ends them.
    """

    def __init__(self, contender: str, case: str) -> None:
        entry = _entry(contender)
        processes = _case(case).devices if entry.apart else 1
        self.contender = contender
        meeting = meeting_place()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._workers = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(contender, case, rank, meeting, theirs), daemon=True
            )
            worker.start()
            theirs.close()  # so that its end is noticed when the process dies
            self._ends.append(ours)
            self._workers.append(worker)

    def imported(self) -> None:
        """Wait until all is imported.

        Raises:
            GroupError: see there; so do all that follow.
        """
        self._order("import")

    def set_up(self) -> None:
        """Make the model and what trains it."""
        self._order("set up")

    def step(self) -> Step:
        """One turn."""
        answers = self._order("step")
        steps = len(answers) if _entry(self.contender).whole else 1
        return Step(
            max(seconds for seconds, _, _ in answers) / steps,
            sum(cpu for _, cpu, _ in answers) / steps,
            next(losses for _, _, losses in answers if losses),
        )

    def memory(self) -> Memory:
        """What was resident until now."""
        answers = self._order("memory")
        return Memory(*map(sum, zip(*answers, strict=True)))

    def reset(self) -> None:
        """Let the peak begin anew; on Linux alone."""
        self._order("reset")

    def close(self) -> None:
        """End the processes, if need be by force. They may have ended already."""
        for end in self._ends:
            with suppress(OSError):
                end.send("close")
        for worker in self._workers:
            worker.join(5)
        self._kill()

    def _order(self, order: str) -> list[Any]:
        try:
            for end in self._ends:
                end.send(order)
            answers: dict[Connection, Any] = {}
            deadline = time.monotonic() + PATIENCE
            while waiting := [end for end in self._ends if end not in answers]:
                ready = wait(waiting, deadline - time.monotonic())
                if not ready:
                    raise GroupError(f"hangs: no answer to {order!r} in {PATIENCE:.0f} s")
                for end in (end for end in waiting if end in ready):
                    answer = end.recv()
                    if isinstance(answer, _Failure):
                        raise GroupError(answer.text)
                    answers[end] = answer
        except (EOFError, OSError) as error:
            for worker in self._workers:
                worker.join(1)
            codes = ", ".join(str(worker.exitcode) for worker in self._workers)
            raise GroupError(f"a process died; exit codes {codes}") from error
        except GroupError:
            self._kill()
            raise
        return [answers[end] for end in self._ends]

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _entry(contender: str) -> Entry:
    return (CONTENDERS | REFERENCES | SAVING)[contender]


def _case(name: str) -> Case:
    if name == "residuals":
        from benchmarks.peers.residuals import CASE  # which imports fxpipe

        return CASE
    return (CASES | RESIDENT)[name]


def _work(contender: str, case: str, rank: int, meeting: str, orders: Connection) -> None:
    """One process: it answers each order, and ends with a failure where something is raised."""
    warnings.simplefilter("ignore")
    entry = _entry(contender)
    imported = 0
    made: Contender | None = None
    try:
        while True:
            answer: tuple[Any, ...] = ()
            match orders.recv():
                case "import":
                    make = entry.load()
                    _case(case)
                    if case not in CASES:
                        _import_all()
                    imported = _resident()[0]
                case "set up":
                    made = make(_case(case), rank, meeting)
                case "step":
                    assert made is not None
                    answer = _turn(made, entry.turn)
                case "memory":
                    answer = imported, *_resident()
                case "reset":
                    Path("/proc/self/clear_refs").write_text("5")
                case "close":
                    if made is not None:
                        made.close()
                    return
            orders.send(answer)
    except EOFError:
        return  # nobody listens any more
    except Exception as error:
        orders.send(_Failure(f"{type(error).__name__}: {error}"))


def _turn(made: Contender, steps: int) -> tuple[float, float, tuple[float, ...]]:
    made.meet()
    start, cpu = time.perf_counter(), time.process_time()
    losses = [made.step() for _ in range(steps)]
    made.settle()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return seconds / steps, cpu / steps, tuple(float(loss) for loss in losses if loss is not None)


def _import_all() -> None:
    """Import what an export does, and what fxpipe does at its first compilation, so that no
    contender's modules count as what it holds."""
    import torch

    with suppress(ImportError):
        # the thread of a progress bar here would have an arena of its own
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    linear = torch.nn.Linear(2, 2)
    torch.export.export(linear, (torch.zeros(1, 2),)).run_decompositions()
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch.distributed.pipelining")
    if "fxpipe" in sys.modules:
        for module in pkgutil.walk_packages(sys.modules["fxpipe"].__path__, "fxpipe."):
            if module.name.split(".")[1] not in ("__main__", "extensions"):
                importlib.import_module(module.name)


def _resident() -> tuple[int, int]:
    """The most bytes that this process had resident, and those that it has."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage there counts what was resident before this program began
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024, int(lines["VmRSS"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return peak, peak
