"""Ctrl-C on one rank or on all: a step counts on all ranks or on none, and training goes on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from fxpipe import RankError
from fxpipe.compiler.compiler import Compiler
from tests.helpers.failing import (
    KINDS,
    Beside,
    Skipping,
    at,
    first_of_each_kind,
    options_of,
    unchanged,
)
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Snapshot, within

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX does")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(mesh: DeviceMesh, everywhere: bool) -> tuple[set[str], set[str]]:
    """A signal comes in the first instruction of each kind on each rank, or on all at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here, seen, kinds = mesh.get_local_rank(), set[str](), set[str]()
    names = ("1f1b", "zb-h1") if everywhere and not DEEP else options_of(mesh.size())
    for name in names:
        options = options_of(mesh.size())[name]
        beside = Beside(mesh, **options)
        beside.step()
        known = set() if DEEP else {*kinds}  # those that other options have
        for rank, position, instruction in first_of_each_kind(beside.pipe):
            if type(instruction).__name__ in known:
                continue
            before, count = Snapshot.of(beside.pipe), beside.pipe.batches
            x, y = beside.batch()
            mine = everywhere or rank == here
            where = f"{name}, rank {rank}, {position}: {instruction}"
            with within(3 * (mesh.size() - 1)), at(position if mine else -1, interrupt):
                try:
                    beside.pipe.step(x, target=y)
                    seen.add("done")
                except KeyboardInterrupt:
                    seen.add("interrupted")
                    assert mine, where
                except RankError as error:
                    seen.add("told")
                    assert "KeyboardInterrupt" in str(error), where
            counts = beside.pipe.batches
            assert counts in (count, count + 1), where
            if counts == count:
                unchanged(before, beside.pipe, where)
                beside.step()
            else:  # the others were ready: it counts everywhere, which the loop now checks
                beside.count_step()
            kinds.add(type(instruction).__name__)
        beside.pipe.close()
    return seen, kinds


@pytest.mark.parametrize(
    ("everywhere", "size"),
    [(False, 2), *deep((True, 2), (False, 3), (True, 3))],
)
def test_an_interrupted_step_counts_on_all_ranks_or_on_none(everywhere: bool, size: int) -> None:
    for seen, kinds in on_ranks(size, interrupted, everywhere):
        assert "interrupted" in seen
        assert everywhere or "told" in seen
        assert kinds >= (KINDS if DEEP or not everywhere else {"Receive", "Clip", "Update"})


PARTS: list[tuple[Any, str]] = [
    (Skipping, "forward"),  # while the model is traced
    (Compiler, "lowered"),  # while its program is made
]


def interrupted_compilation(mesh: DeviceMesh, everywhere: bool) -> list[str]:
    """A signal comes in parts of the first step's compilation, on one rank or on all at once; the
    same pipe then compiles and trains."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here, told = mesh.get_local_rank(), []
    for rank in (0, 2) if not everywhere else (0,):
        for owner, name in PARTS:
            beside = Beside(mesh)
            x, y = beside.batch()
            before = getattr(owner, name)
            mine = everywhere or rank == here
            sent: list[bool] = []

            def interrupting(*args: Any, **kwargs: Any) -> Any:
                if mine and not sent:  # noqa: B023
                    sent.append(True)  # noqa: B023
                    interrupt()
                return before(*args, **kwargs)  # noqa: B023

            with within(20), pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, interrupting)
                try:
                    beside.pipe.step(x, target=y)
                    told.append(f"{name}: done")
                except KeyboardInterrupt:
                    told.append(f"{name}: interrupted")
                    assert sent
                except RankError as error:
                    told.append(f"{name}: told")
                    assert "KeyboardInterrupt" in str(error)
            if beside.pipe.batches:
                beside.count_step()
            beside.step()
            beside.pipe.close()
    return told


@pytest.mark.parametrize("everywhere", [False, *deep(True)])
def test_ctrl_c_while_compiling_ends_it_on_all_ranks_and_the_pipe_compiles_later(
    everywhere: bool,
) -> None:
    ranks = on_ranks(3, interrupted_compilation, everywhere)
    for step in zip(*ranks, strict=True):
        assert len({each.endswith(": done") for each in step}) == 1, step
    if everywhere:
        assert all(told == ["forward: interrupted", "lowered: interrupted"] for told in ranks)
    else:
        first, second, third = ({"interrupted" in each for each in told} for told in ranks)
        assert first == third == {True, False} and second == {False}
