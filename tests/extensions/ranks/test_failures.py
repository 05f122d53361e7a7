"""An instruction that fails on a rank fails on all of them, and has not happened on any; once an
update has begun, the pipe has ended on all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe import ExecutionError, InputError, RankError
from fxpipe.ir import instruction as ins
from tests.helpers.failing import (
    KINDS,
    Beside,
    at,
    fail,
    fails,
    first_of_each_kind,
    options_of,
    pipe_of,
    unchanged,
)
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder
from tests.helpers.tiny import Snapshot, Tiny, adam, batch, within
from tests.oracles import loop


def failing_everywhere(mesh: DeviceMesh) -> set[str]:
    """Let the first instruction of each kind fail on each rank in turn."""
    here = mesh.get_local_rank()
    kinds: set[str] = set()
    folder = shared_folder() / "checkpoint"
    for name, options in options_of(mesh.size()).items():
        beside = Beside(mesh, **options)
        beside.step()
        known = set() if DEEP else {*kinds}  # those that other options have
        for rank, position, instruction in first_of_each_kind(beside.pipe):
            if type(instruction).__name__ in known:
                continue
            beside.pipe.save(folder)
            before = Snapshot.of(beside.pipe)
            x, y = beside.batch()
            where = f"{name}, rank {rank}, {position}: {instruction}"
            caught: BaseException | None = None
            with within(2), at(position if rank == here else -1, fail):
                try:
                    beside.pipe.step(x, target=y)
                except ExecutionError as error:
                    caught = error
            assert caught is not None, where
            fails(rank, caught, instruction, rank == here)
            ended = "so the pipe has ended" in f"{caught}{caught.__notes__}"
            assert ended or not isinstance(instruction, ins.Update), where
            if ended:
                told = r"earlier call: stages? [\d, and-]+ updated with this batch"
                with pytest.raises(fxpipe.EndedError, match=told):
                    beside.pipe.step(x, target=y)
                with pytest.raises(fxpipe.EndedError):
                    beside.pipe.state_dict()
                beside.pipe.load(folder)
            unchanged(before, beside.pipe, where)
            beside.step()
            kinds.add(type(instruction).__name__)
        beside.pipe.close()
    return kinds


@pytest.mark.parametrize("size", [2, *deep(3)])
def test_an_instruction_of_any_kind_that_fails_on_a_rank_fails_on_all(size: int) -> None:
    for found in on_ranks(size, failing_everywhere):
        assert found == KINDS


def failing_calls(mesh: DeviceMesh) -> set[str]:
    """The same in a differentiable call and in its backward."""
    here = mesh.get_local_rank()
    kinds: set[str] = set()
    with pipe_of(mesh, optimizer=None) as pipe:
        x, _ = batch()
        pipe(x).sum().backward()
        for rank, position, instruction in first_of_each_kind(pipe):
            pause = pipe.program.lists[rank].index(ins.Pause())
            with within(2), at(position if rank == here else -1, fail):
                if position <= pause:
                    before = Snapshot.of(pipe)
                    with pytest.raises(ExecutionError) as raised:
                        pipe(x)
                else:
                    out = pipe(x).sum()
                    before = Snapshot.of(pipe)
                    with pytest.raises(ExecutionError) as raised:
                        out.backward()
            assert raised.value.device == rank
            assert isinstance(raised.value, RankError) == (rank != here)
            unchanged(before, pipe, str(instruction))
            pipe(x).sum().backward()
            kinds.add(type(instruction).__name__)
    return kinds


@pytest.mark.parametrize("size", [2, *deep(3)])
def test_an_instruction_of_a_call_or_its_backward_that_fails_on_a_rank_fails_on_all(
    size: int,
) -> None:
    kinds = {"Load", "Output", "Send", "Receive", "Free", "Forward", "Backward", "Pause"}
    for found in on_ranks(size, failing_calls):
        assert found == kinds


def out_of_memory(mesh: DeviceMesh) -> tuple[str, str]:
    """The second rank finds no memory. Returns the error's type and its text."""

    def lack() -> None:
        raise MemoryError("no more")

    beside, here = Beside(mesh), mesh.get_local_rank()
    beside.step()
    rank, position, _ = next(x for x in first_of_each_kind(beside.pipe) if x[0] == 1)
    x, y = beside.batch()
    with at(position if here == rank else -1, lack), pytest.raises(ExecutionError) as raised:
        beside.pipe.step(x, target=y)
    beside.step()
    beside.pipe.close()
    error = raised.value
    return type(error).__name__, str(error)


def test_a_rank_without_memory_is_told_to_all() -> None:
    (other, told), (own, text) = on_ranks(2, out_of_memory)
    assert (other, own) == ("RankError", "DeviceMemoryError")
    for each in (told, text):
        assert "has no memory left" in each and "Take more micro-b" in each


# what differs between ranks


def different(mesh: DeviceMesh) -> list[str]:
    """Ranks that do different things; each is told the difference, and the pipe goes on."""
    here = mesh.get_local_rank()
    beside = Beside(mesh)
    beside.step()
    pipe, told = beside.pipe, []
    x, y = beside.batch()

    def calls(call: Any, other: Any) -> None:
        before = Snapshot.of(pipe)
        with within(2), pytest.raises((RankError, InputError)) as raised:
            (other if here == 1 else call)()
        told.append(f"{type(raised.value).__name__}: {raised.value}")
        pipe.train()
        unchanged(before, pipe, told[-1])
        beside.step()

    def step(samples: int = 6, microbatch: Any = None) -> Any:
        return lambda: pipe.step(x[:samples], target=y[:samples])

    calls(step(), lambda: pipe(x))
    calls(step(), lambda: pipe.eval()(x))
    calls(step(), lambda: pipe.prepare(x, target=y))
    calls(step(), step(4))
    calls(lambda: pipe(x), lambda: pipe.eval()(x))
    calls(step(), lambda: pipe.step(x.double(), target=y))
    calls(step(), lambda: pipe.step(x, target=y, return_output=True))
    calls(step(), lambda: pipe.step(x, x, target=y))
    pipe.close()
    return told


def test_ranks_that_make_other_calls_are_told_the_difference_and_go_on() -> None:
    first, second, third = on_ranks(3, different)
    words = ["calls pipe(...)", "calls pipe(...)", "prepare", "samples", "mode", "float64"]
    words += ["outputs: True", ""]
    for word, *texts in zip(words, first, second, third, strict=True):
        for text in texts:
            assert word in text, texts
    assert second[7].startswith("InputError")
    assert first[7].startswith("RankError: rank 1 ")


def compiled_differently(mesh: DeviceMesh) -> list[str]:
    here, told = mesh.get_local_rank(), []
    others: list[dict[str, Any]] = [
        {"schedule": "gpipe"},
        {"microbatches": 3},
        {"clip_norm": 1.0},
        {"partition": []},
        {"optimizer": None},
        {"microbatches": 0},
        {"extensions": [fxpipe.Replicas(bucket_cap_mb=1)]},
    ]
    for options in others:
        with within(5), pytest.raises((RankError, InputError)) as raised:
            pipe_of(mesh, **(options if here == 1 else {}))
        told.append(f"{type(raised.value).__name__}: {raised.value}")
    with within(5), pytest.raises(RankError) as raised:
        model = torch.nn.Linear(2, 2) if here else torch.nn.Linear(3, 2)
        fxpipe.compile(model, mesh, microbatches=2)
    told.append(f"{type(raised.value).__name__}: {raised.value}")
    Beside(mesh).step()
    return told


def test_ranks_that_compile_with_other_options_are_told_the_first_that_differs() -> None:
    ranks = on_ranks(2, compiled_differently)
    words = ["recipe", "microbatches: 3", "clip_norm: 1.0", "partition", "optimizer: none"]
    for number, word in enumerate(words):
        for told in ranks:
            assert told[number].startswith("RankError: what fxpipe.compile was given differs")
            assert word in told[number]
    assert ranks[0][5].startswith("RankError: rank 1 ") and ranks[1][5].startswith("InputError")
    assert all("bucket_cap_mb=1, " in told[6] for told in ranks)
    assert all("weight: (2, 3)" in told[7] and "weight: (2, 2)" in told[7] for told in ranks)


# while a model is compiled


class Untraceable(torch.nn.Module):
    """A model that raises on one rank while it is traced."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ValueError("not now")
        y: torch.Tensor = self.inner(x)
        return y


def failing_compilation(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    options: dict[str, Any] = {
        "microbatches": 2,
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": adam,
        "partition": ["inner.middle"],
    }
    for rank in range(mesh.size()):
        torch.manual_seed(0)
        model = Untraceable(Tiny())
        alone = copy.deepcopy(model)
        optimizer = adam(alone.parameters())
        with fxpipe.compile(model, mesh, **options) as pipe:
            for size in sizes:
                x, y = batch(size)
                model.raises = mesh.get_local_rank() == rank
                with within(20), pytest.raises(fxpipe.FxpipeError) as raised:
                    pipe.step(x, target=y)
                assert isinstance(raised.value, RankError) == (not model.raises), raised.value
                assert "not now" in str(raised.value), raised.value
                model.raises = False
                optimizer.zero_grad()
                expected = loop.train(alone, 2, x, target=y, loss=options["loss"])
                optimizer.step()
                assert torch.equal(pipe.step(x, target=y), expected.loss)


def test_a_model_that_raises_on_one_rank_while_traced_raises_on_all_and_compiles_later() -> None:
    on_ranks(2, failing_compilation, (6, 4))
