"""A tiny pipe on ranks beside the plain loop, and instructions that fail where they are told to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import RankError
from fxpipe.ir import instruction as ins
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.task import B, F, Task, U
from fxpipe.runtime import interpreter
from fxpipe.text.program import print_instruction
from tests.helpers.ranks import DeviceMesh
from tests.helpers.tiny import CUTS, Snapshot, Tiny, adam, batch
from tests.oracles import loop

HANDLERS = interpreter.HANDLERS


class Injected(Exception):
    """What the injected faults raise."""


def with_own_task() -> Recipe:
    """All forwards, all backwards, a task of its own, and the update."""
    task = fxpipe.define_task(
        "Q", "nothing", run=lambda context: None, cost=0.1, follows="BW", reads=("gradients",)
    )

    def rows(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        yield from map(F, range(microbatches))
        yield from map(B, range(microbatches))
        yield from (task(), U())

    return Recipe("mine", rows)


OPTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "1f1b": lambda: {"recompute": "always", "clip_norm": 0.1},
    "zb-h1": lambda: {"schedule": "zb-h1"},
    "own": lambda: {"schedule": with_own_task()},
}
"""Options that have all kinds of instructions together."""


def pipe_of(mesh: DeviceMesh, **options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "microbatches": 2,
        "loss": functional.cross_entropy,
        "optimizer": adam,
        "partition": CUTS[mesh.size()],
    }
    return fxpipe.compile(Tiny(), mesh, **{**defaults, **options})


class Beside:
    """A pipe and the plain loop, which train on the same batches."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        self.pipe = pipe_of(mesh, **options)
        torch.manual_seed(0)
        self.model = Tiny()
        self.optimizer = adam(self.model.parameters())
        self._clip: float | None = options.get("clip_norm")
        self._steps = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """That of the next step."""
        return batch(seed=self._steps)

    def step(self) -> None:
        """One step of each; what this rank owns must be equal to the bit."""
        x, y = self.batch()
        loss = self.pipe.step(x, target=y)
        expected = self.count_step()
        assert torch.equal(loss, expected), f"{loss} is not {expected}"

    def count_step(self) -> Tensor:
        """The loop's step after the pipe's own. Returns the loop's loss."""
        x, y = self.batch()
        self._steps += 1
        self.optimizer.zero_grad()
        expected = loop.train(self.model, 2, x, target=y, loss=functional.cross_entropy)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        state = self.model.state_dict()
        for name, value in self.pipe.state_dict().items():
            assert torch.equal(value, state[name]), f"{name} is not that of the loop"
        return expected.loss


@contextmanager
def handlers(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, instructions run as ``change`` makes of their handlers."""
    changed = {kind: change(handler) for kind, handler in HANDLERS.items()}
    vars(interpreter)["HANDLERS"] = changed
    try:
        yield
    finally:
        vars(interpreter)["HANDLERS"] = HANDLERS


@contextmanager
def at(position: int, do: Callable[[], None]) -> Iterator[None]:
    """Inside, this rank does something when it has run the instruction at a position."""

    def change(handler: Any) -> Any:
        def run(machine: Any, instruction: Any) -> None:
            handler(machine, instruction)
            if machine.position == position:
                do()

        return run

    with handlers(change):
        yield


def fail() -> None:
    raise Injected("told to fail")


def first_of_each_kind(pipe: fxpipe.Pipeline) -> list[tuple[int, int, ins.Instruction]]:
    """Rank, position and instruction: the first of each kind on each rank."""
    found = []
    for rank, instructions in enumerate(pipe.program.lists):
        kinds = set[type]()
        for position, instruction in enumerate(instructions):
            if type(instruction) not in kinds:
                kinds.add(type(instruction))
                found.append((rank, position, instruction))
    return found


def fails(beside: Beside, rank: int, error: BaseException, instruction: Any, own: bool) -> None:
    """Check the error that an instruction's failure on ``rank`` is, here or on another rank."""
    assert getattr(error, "device", None) == rank, repr(error)
    assert getattr(error, "instruction", None) == print_instruction(instruction), repr(error)
    if own:
        assert type(error) is fxpipe.ExecutionError and isinstance(error.__cause__, Injected)
        return
    assert isinstance(error, RankError) and error.rank == rank, repr(error)
    assert f"rank {rank} " in str(error) and "told to fail" in str(error)
    assert any("raise Injected" in note for note in error.__notes__), error.__notes__


def unchanged(before: Snapshot, pipe: fxpipe.Pipeline, where: str) -> None:
    different = list(before.differences(Snapshot.of(pipe)))
    assert not different, f"{where}: {different}"


def await_file(path: Path) -> None:
    """Wait until a file is there; a rank that waits for another one beside the pipe."""
    for _ in range(12000):
        if path.exists():
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} never came")


def die() -> None:
    """As ``kill -9`` ends a process."""
    os.kill(os.getpid(), 9)
