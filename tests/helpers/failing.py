"""A tiny pipe on ranks beside the plain loop, and instructions that fail where they are told to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpipe
from fxpipe import RankError
from fxpipe.ir import instruction as ins
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.task import B, F, O, P, Task, U
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import run_own
from fxpipe.text.program import print_instruction
from tests.helpers.ranks import DeviceMesh, shared_folder
from tests.helpers.tiny import CUTS, Snapshot, Tiny, adam, batch
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop

HANDLERS = interpreter.HANDLERS

REPLICAS = {"PartialBackward", "ReduceScatter", "AllGather", "GatherWeights"}
REPLICAS |= {"GatherShards", "AwaitShards", "DropShards", "ReduceToOwners", "AwaitSums"}
REPLICAS |= {"PartialToOwners", "RestOfBackward", "RestOfWeightGrad"}
REPLICAS |= {"ShareNorms", "UpdateShards", "ColumnNorm"}
COPIES = {"Share", "Give", "Add"}
KINDS = {made.__name__ for made in ins.every_opcode().values()} - {"Pause"} - REPLICAS - COPIES
"""All kinds of instructions of a step. A pause is in a differentiable call alone, and some are in
programs over replicas or divided stages, or in those with copies of stages."""


class Injected(Exception):
    """What the injected faults raise."""


def with_own_task() -> Recipe:
    """All forwards, each with a task of its own, all backwards, another such task, and the
    update."""
    task = fxpipe.define_task(
        "Q", "nothing", run=lambda context: None, cost=0.1, follows="BW", reads=("gradients",)
    )

    each = fxpipe.define_task(
        "V", "nothing", run=lambda context: None, cost=0.1, follows="F", per_microbatch=True
    )

    def rows(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        for i in range(microbatches):
            yield from (F(i), each(i))
        yield from map(B, range(microbatches))
        yield from (task(), U())

    return Recipe("mine", rows)


def with_offload() -> Recipe:
    """All forwards and all backwards; what the first keeps is elsewhere meanwhile."""

    def rows(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        yield from (F(0), O(0), *map(F, range(1, microbatches)), P(0))
        yield from (*map(B, range(microbatches)), U())

    return Recipe("offloading", rows)


OPTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "1f1b": lambda: {"recompute": "always", "clip_norm": 0.1},
    "zb-h1": lambda: {"schedule": "zb-h1"},
    "own": lambda: {"schedule": with_own_task()},
    "offload": lambda: {"schedule": with_offload()},
}
"""Options that together have all kinds of instructions of a step, with three ranks."""

INTERLEAVED: Mapping[str, Any] = {
    "schedule": "interleaved-1f1b",
    "partition": ["middle", "middle.2", "last"],
}
"""Two stages on each of two ranks, so that a value skips some of them there, too."""


def options_of(size: int) -> dict[str, dict[str, Any]]:
    """Options that together have all kinds of instructions of a step."""
    made = {name: options() for name, options in OPTIONS.items()}
    return {**made, "interleaved-1f1b": dict(INTERLEAVED)} if size == 2 else made


class Skipping(Tiny):
    """What the first layer makes skips all others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(self.middle(h)) + h[:, :3]
        return y


def pipe_of(mesh: DeviceMesh, **options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "microbatches": 2,
        "loss": functional.cross_entropy,
        "optimizer": adam,
        "partition": CUTS[mesh.size(mesh.ndim - 1)],
    }
    return fxpipe.compile(Skipping(), mesh, **{**defaults, **options})


class Beside:
    """A pipe and the plain loop, which train on the same batches."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        self.pipe = pipe_of(mesh, **options)
        torch.manual_seed(0)
        self.model = Skipping()
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
        assert torch.equal(loss.cpu(), expected), f"{loss} is not {expected}"

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
            assert torch.equal(value.cpu(), state[name]), f"{name} is not that of the loop"
        return expected.loss


@contextmanager
def handlers(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, instructions run as ``change`` makes of their handlers."""
    changed = {kind: change(run_own) for kind in ins.every_opcode().values()}
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


def fails(rank: int, error: BaseException, instruction: Any, own: bool) -> None:
    """Check the error that an instruction's failure on ``rank`` is, here or on another rank."""
    assert getattr(error, "device", None) == rank, repr(error)
    assert getattr(error, "instruction", None) == print_instruction(instruction), repr(error)
    if own:
        assert type(error) is fxpipe.ExecutionError and isinstance(error.__cause__, Injected)
        return
    assert isinstance(error, RankError) and error.rank == rank, repr(error)
    assert f"rank {rank} " in str(error) and "told to fail" in str(error)
    assert any(
        "Traceback (most recent call last)" in note and "in fail\n" in note
        for note in error.__notes__
    ), error.__notes__


class InFlight:
    """A pipe whose batches overlap, and the plain loop that reads its weights as late.

    The loop trains on a batch only when the pipe's results are compared.
    """

    def __init__(self, mesh: DeviceMesh, schedule: str) -> None:
        last = mesh.size() - 1
        if schedule == "pipedream":  # a stage is as many batches late as there are stages after it
            microbatches, late = 1, {"first": last, "middle": last - 1, "last": 0}
        else:
            microbatches, late = 2, dict.fromkeys(("first", "middle", "last"), 1)
        self.pipe = pipe_of(mesh, schedule=schedule, microbatches=microbatches)
        torch.manual_seed(0)
        model = Skipping()
        self._loop = DelayedLoop(
            model,
            adam(model.parameters()),
            functional.cross_entropy,
            microbatches,
            lambda name: late[name.split(".")[0]],
        )
        self._trained = 0  # the loop's batches

    def step(self) -> Tensor:
        """The pipe's next batch; its loss may come later."""
        x, y = batch(seed=self.pipe.batches)
        loss: Tensor = self.pipe.step(x, target=y)
        return loss

    def compare(self) -> None:
        """Finish the batches in flight; what this rank owns must be equal to the bit."""
        self.pipe.flush()
        while self._trained < self.pipe.batches:
            self._loop.step(*batch(seed=self._trained))
            self._trained += 1
        state = self._loop.model.state_dict()
        for name, value in self.pipe.state_dict().items():
            assert torch.equal(value, state[name]), f"{name} is not that of the loop"

    def save(self) -> None:
        """Write the checkpoint that ``go_back`` loads."""
        self.pipe.save(shared_folder() / "checkpoint")

    def go_back(self) -> int:
        """The pipe has ended: it refuses to go on, and loads the checkpoint. Returns how many
        batches count."""
        for call in (self.pipe.flush, self.pipe.state_dict, self.step):
            with pytest.raises(fxpipe.EndedError, match=r"stages? .*go on from the last check"):
                call()
        self.pipe.load(shared_folder() / "checkpoint")
        return self.pipe.batches


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
