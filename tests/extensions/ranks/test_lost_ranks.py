"""Ranks that are killed, stopped or cut off: the others name them, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import fxpipe
from fxpipe import RankError
from fxpipe.extensions.ranks import tree
from fxpipe.ir import instruction as ins
from fxpipe.passes.partition import measure
from fxpipe.runtime.weights.live import LiveWeights
from tests.helpers.failing import (
    Beside,
    InFlight,
    Skipping,
    at,
    await_file,
    die,
    first_of_each_kind,
    options_of,
    pipe_of,
)
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, result_of, start
from tests.helpers.tiny import CUTS, adam, batch, soon, within

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")

Case = tuple[str, int]
"""Options, and the position of the instruction at which the rank is killed."""

OVERLAPS, VERSIONS, CALL = "2bw", "pipedream", "call"
"""Batches in flight, more of them with a version of the weights for each, and a differentiable call
with its backward."""


def survivors(size: int, lost: set[int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returned on all ranks but those that were killed; all must end."""
    with tempfile.TemporaryDirectory() as folder:
        # those that are killed last wait for their turn, on however slow a machine
        own = function, folder, *args
        ranks = [start(rank, size, folder, *own, timeout=190) for rank in range(size)]
        for process in ranks:
            process.join(200)
            assert process.exitcode is not None, "a rank hangs"
        return [result_of(folder, rank) for rank in range(size) if rank not in lost]


@contextmanager
def told_of(lost: int, seconds: float = 5) -> Iterator[pytest.ExceptionInfo[RankError]]:
    """The block raises that a rank of the pipe is lost, in time."""
    with within(seconds), pytest.raises(RankError) as raised:
        yield raised
    assert raised.value.rank == lost, repr(raised.value)


def meshes(alive: int, victims: int, position: int) -> list[tuple[int, DeviceMesh]]:
    """Each rank that will be killed, and its mesh, in which it is the first or the last one."""
    ranks = list(range(alive + victims))
    lost, others = (
        (ranks[alive:], ranks[:alive]) if position else (ranks[:victims], ranks[victims:])
    )
    names = ("pp",)
    return [(r, DeviceMesh("cpu", sorted([*others, r]), mesh_dim_names=names)) for r in lost]


def killed_at(mesh: DeviceMesh, folder: str, alive: int, position: int, cases: list[Case]) -> None:
    """The ranks train in turn with each of those that are killed at an instruction."""
    here = torch.distributed.get_rank()
    made = meshes(alive, len(cases), position)
    for (lost, own), (name, instruction) in zip(made, cases, strict=True):
        if here != lost and here in [rank for rank, _ in made]:
            continue
        trains, pipe = training(own, name)
        if here == lost:
            with at(instruction, die):
                trains()
            raise AssertionError("was not killed")
        with told_of(position):
            trains()
        x, y = batch()
        with told_of(position, 1):
            pipe.step(x, target=y)
        with told_of(position, 1):
            pipe(x)
        with within(2):
            pipe.close()


def training(mesh: DeviceMesh, name: str) -> tuple[Callable[[], None], fxpipe.Pipeline]:
    """What trains a pipe with named options, some of whose batches are done, and the pipe."""
    if name in (OVERLAPS, VERSIONS):
        flight = InFlight(mesh, name)
        for _ in range(3):
            flight.step()

        def overlapping() -> None:
            for _ in range(5):
                flight.step()

        return overlapping, flight.pipe
    if name == CALL:
        pipe = pipe_of(mesh, optimizer=None)

        def calling() -> None:
            pipe(batch()[0]).sum().backward()

        calling()
        return calling, pipe
    beside = Beside(mesh, **options_of(mesh.size())[name])
    beside.step()

    def stepping() -> None:
        x, y = beside.batch()
        beside.pipe.step(x, target=y)

    return stepping, beside.pipe


def cases_of(size: int, position: int) -> list[Case]:
    """The first instruction of each kind in the list of one device, of any step; and each kind
    again where batches overlap, but those that are the same with the last one; of those of a
    schedule with more versions the update, unless all are asked for."""
    found: dict[tuple[str, type[ins.Instruction]], Case] = {}
    every = {**options_of(size), CALL: {"optimizer": None}}
    if (size, position) != (2, 0):
        every[OVERLAPS] = {"schedule": OVERLAPS}
    if DEEP or size == 3:
        every[VERSIONS] = {"schedule": VERSIONS, "microbatches": 1}
    for name, options in every.items():
        torch.manual_seed(0)
        defaults = {"microbatches": 2, "loss": functional.cross_entropy, "optimizer": adam}
        given = {**defaults, "partition": CUTS[size], **options}
        with fxpipe.compile(Skipping(), size, **given) as pipe:
            x, y = batch()
            if name == CALL:
                pipe(x)
            else:
                pipe.prepare(x, target=y)
            for rank, index, instruction in first_of_each_kind(pipe):
                kind = type(instruction)
                if rank == position and (name != VERSIONS or DEEP or kind is ins.Update):
                    overlaps = name if name in (OVERLAPS, VERSIONS) else ""
                    found.setdefault((overlaps, kind), (name, index))
    return [*found.values()]


@pytest.mark.parametrize(("size", "position"), [(2, 1), *deep((2, 0), (3, 2))])
def test_a_rank_that_is_killed_at_any_kind_of_instruction_is_named(
    size: int, position: int
) -> None:
    cases = cases_of(size, position)
    if not DEEP:  # of two, half of them where the first is killed, the others at the last
        cases = cases[position::2] if size == 2 else cases[1::4]
    alive = size - 1
    every = alive + len(cases)
    lost = range(alive, every) if position else range(len(cases))
    survivors(every, set(lost), killed_at, alive, position, cases)


def killed_elsewhere(mesh: DeviceMesh, folder: str) -> None:
    """The second rank is killed while a model is compiled, at the commit, while its results are on
    their way, and between calls, once with batches in flight and after the first one has seen it.
    """
    here = torch.distributed.get_rank()

    def dies(*_: Any, **__: Any) -> None:
        die()

    def compiling(pipe: fxpipe.Pipeline) -> None:
        vars(measure)["measure"] = dies
        pipe._compiler._compile = dies  # type: ignore[method-assign,assignment]

    def committing(pipe: fxpipe.Pipeline) -> None:
        LiveWeights.commit = dies  # type: ignore[method-assign]

    def settling(pipe: fxpipe.Pipeline) -> None:
        pipe._group.settle = dies  # type: ignore[method-assign,assignment]

    def between(pipe: fxpipe.Pipeline) -> None:
        die()

    def in_flight(pipe: fxpipe.Pipeline) -> None:
        die()

    changes = [compiling, committing, settling, between, in_flight]
    x, y = batch()
    for change, (lost, own) in zip(changes, meshes(1, len(changes), 1), strict=True):
        if here not in (0, lost):
            continue
        pipe = pipe_of(own, schedule=OVERLAPS if change is in_flight else "1f1b")
        loss = torch.zeros(())
        if change is compiling and here:
            change(pipe)
        if change is not compiling:
            # with batches in flight, the loss never leaves the second rank
            stuck = change is in_flight and here
            with at(0 if stuck else -1, lambda: time.sleep(60)):
                loss = pipe.step(x, target=y)
                if here:
                    change(pipe)
        if change is committing:  # all were ready: the step counts here, and nothing comes after
            try:
                pipe.step(x, target=y)
            except fxpipe.RankError as error:  # the last message of the killed rank was lost
                assert error.rank == 1
        if change is in_flight:
            assert soon(lambda: pipe._group.gone is not None)  # type: ignore[attr-defined]  # noqa: B023
            with told_of(1, 1):
                float(loss)
        with told_of(1) as raised:
            pipe.step(x, target=y)
        if change is in_flight:
            with told_of(1, 1):
                float(loss)
        notes = str(getattr(raised.value, "__notes__", ()))
        assert ("the stages have updated with: " in notes) == (change is in_flight)
        with told_of(1, 1):
            pipe.prepare(x, target=y)
        with within(2):
            pipe.close()


def test_a_rank_that_is_killed_between_instructions_is_named() -> None:
    survivors(6, {1, 2, 3, 4, 5}, killed_elsewhere)


def stopped(mesh: DeviceMesh, folder: str, where: str) -> str:
    """The second rank is stopped in mid-step, or between calls, and goes on when the others have
    given it up."""
    tree.SILENCE = 2.0
    beside = Beside(mesh)
    beside.step()
    pipe, here = beside.pipe, mesh.get_local_rank()
    x, y = beside.batch()

    def stop() -> None:
        Path(folder, "process").write_text(str(os.getpid()))
        os.rename(Path(folder, "process"), Path(folder, "stops"))
        os.kill(os.getpid(), signal.SIGSTOP)

    if here == 1 and where == "between":
        stop()
    with pytest.raises(RankError) as raised, within(30):
        with at(2 if here == 1 and where == "within" else -1, stop):
            pipe.step(x, target=y)
        pipe.step(x, target=y)  # it may have been done
    with pytest.raises(RankError):
        pipe.step(x, target=y)
    if here == 0:
        await_file(Path(folder, "stops"))
        process = Path(folder, "stops").read_text()
        status = Path(f"/proc/{process}/stat")
        if status.exists():  # else it may be stopped only after it was told to go on
            assert soon(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        else:
            time.sleep(0.1)
        os.kill(int(process), signal.SIGCONT)
    with within(3):
        pipe.close()
    return str(raised.value)


@pytest.mark.parametrize("where", ["within", *deep("between")])
def test_a_rank_that_is_stopped_is_lost_and_raises_when_it_goes_on(where: str) -> None:
    first, second = survivors(2, set(), stopped, where)
    assert "rank 1 " in first and "no sign of life" in first
    assert "rank 0 " in second


def never_comes(mesh: DeviceMesh, folder: str) -> str:
    """The second rank does not call step, until the first has given up waiting; then both go on."""
    beside = Beside(mesh)
    beside.step()
    x, y = beside.batch()
    group: Any = beside.pipe._group
    group.timeout = 1.0
    done = Path(folder, "done")
    if mesh.get_local_rank() == 1:
        await_file(done)
    with within(5), pytest.raises(RankError) as raised:
        beside.pipe.step(x, target=y)
    done.touch()
    group.timeout = 60.0
    beside.step()
    beside.pipe.close()
    return str(raised.value)


def test_a_rank_that_never_calls_step_is_named_after_the_timeout() -> None:
    for told in survivors(2, set(), never_comes):
        assert "rank 1 " in told and "has not reached" in told and "timeout" in told


def closes_early(mesh: DeviceMesh, folder: str) -> str:
    """The second rank closes its pipe while the first steps."""
    beside = Beside(mesh)
    beside.step()
    x, y = beside.batch()
    if mesh.get_local_rank() == 1:
        beside.pipe.close()
        with within(1), pytest.raises(fxpipe.InputError, match="closed"):
            beside.pipe.step(x, target=y)
        return ""
    with within(5), pytest.raises(RankError, match="closed its pipe") as raised:
        beside.pipe.step(x, target=y)
    return str(raised.value)


def test_a_rank_that_closes_its_pipe_while_others_step_is_named() -> None:
    survivors(2, set(), closes_early)


def ends_without_closing(mesh: DeviceMesh, folder: str) -> str:
    """The process ends with a pipe that overlaps batches, some of them in flight."""
    beside = Beside(mesh, schedule="2bw")
    x, y = beside.batch()
    for _ in range(3):
        beside.pipe.step(x, target=y)
    globals()["kept"] = beside
    return ""


def test_a_process_ends_with_batches_in_flight() -> None:
    with within(60):
        survivors(2, set(), ends_without_closing)
