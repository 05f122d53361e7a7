"""Ranks whose devices have streams: gloo groups stand for NCCL's, and all else is the same code."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe import ExecutionError, RankError
from fxpipe.ir import instruction as ins
from fxpipe.text.program import print_instruction
from tests.helpers.failing import Beside, die, first_of_each_kind, unchanged
from tests.helpers.group_ranks import Backend, use
from tests.helpers.ranks import DeviceMesh, Failed, on_ranks, result_of, start
from tests.helpers.tiny import Snapshot, within

pytestmark = pytest.mark.timeout(600, method="thread")

KINDS = (ins.Receive, ins.Send, ins.Forward, ins.Backward, ins.Clip, ins.Update)


def streaming(mesh: DeviceMesh, **options: Any) -> tuple[Beside, Backend]:
    """A pipe on such ranks beside the plain loop."""
    beside = Beside(mesh, **options)
    use(beside.pipe)
    backend: Any = beside.pipe._engine._backend
    return beside, backend


def sent_values(mesh: DeviceMesh) -> tuple[int, int]:
    """How many tensors a step has sent over process groups, and how many it should."""
    beside, backend = streaming(mesh, clip_norm=0.1)
    count, pairs = 0, backend._pairs
    send = pairs.send

    def counted(target: int, value: Any) -> Any:
        nonlocal count
        count += 1
        return send(target, value)

    pairs.send = counted  # type: ignore[method-assign]
    beside.step()
    own = beside.pipe.program.lists[mesh.get_local_rank()]
    sends = [x for x in own if isinstance(x, ins.Send | ins.Stash) and x.buffer.kind != "norm"]
    beside.pipe.close()
    return count, len(sends)


def test_every_tensor_between_stages_goes_over_a_process_group() -> None:
    found = on_ranks(3, sent_values)
    assert all(count == sends > 0 for count, sends in found)


def failing(mesh: DeviceMesh) -> list[str]:
    """An instruction of each kind fails on each rank in turn; then no rank goes on."""
    here, told = mesh.get_local_rank(), []
    probe, _ = streaming(mesh, clip_norm=0.1)
    probe.step()
    cases = [case for case in first_of_each_kind(probe.pipe) if isinstance(case[2], KINDS)]
    probe.pipe.close()
    for rank, _, instruction in cases:
        beside, backend = streaming(mesh, clip_norm=0.1)
        beside.step()
        before = Snapshot.of(beside.pipe)
        if rank == here:
            backend.lanes.lacks = print_instruction(instruction)
        x, y = beside.batch()
        where = f"rank {rank}: {instruction}"
        with within(10), pytest.raises(ExecutionError) as raised:
            beside.pipe.step(x, target=y)
        assert raised.value.device == rank, where
        assert isinstance(raised.value, RankError) == (rank != here), where
        unchanged(before, beside.pipe, where)
        with within(10), pytest.raises(RankError, match="start all ranks again, from the last"):
            beside.pipe.step(x, target=y)
        beside.pipe.close()
        told.append(type(instruction).__name__)
    return told


def test_after_a_failure_all_ranks_raise_have_their_weights_and_refuse_to_go_on() -> None:
    for found in on_ranks(2, failing):
        assert {*found} == {kind.__name__ for kind in KINDS}


def disagreeing(mesh: DeviceMesh) -> None:
    """What fails before anything was sent leaves nothing behind."""
    beside, _ = streaming(mesh)
    beside.step()
    x, y = beside.batch()
    some = 4 if mesh.get_local_rank() else 6
    with within(10), pytest.raises(RankError):
        beside.pipe.step(x[:some], target=y[:some])
    beside.step()
    beside.pipe.close()


def test_a_call_that_fails_before_anything_is_sent_leaves_the_pipe_as_it_was() -> None:
    on_ranks(2, disagreeing)


def bereft(mesh: DeviceMesh) -> str:
    """A rank dies in the middle of its forwards, while the other waits for it."""
    beside, backend = streaming(mesh)
    beside.step()
    x, y = beside.batch()
    if mesh.get_local_rank() == 1:
        arrive = backend.lanes.room
        backend.lanes.room = lambda spec: die() or arrive(spec)  # type: ignore[method-assign]
    with within(10), pytest.raises(RankError) as raised:
        beside.pipe.step(x, target=y)
    return str(raised.value)


def test_the_death_of_a_rank_is_told_by_its_name(tmp_path: Any) -> None:
    ranks = [start(rank, 2, str(tmp_path), bereft) for rank in range(2)]
    for process in ranks:
        process.join(120)
    assert "rank 1" in result_of(str(tmp_path), 0)
    with pytest.raises(Failed):
        result_of(str(tmp_path), 1)
