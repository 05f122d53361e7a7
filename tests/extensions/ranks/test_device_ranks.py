"""Ranks with CUDA devices, which are simulated, and so is NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import fxpipe
from fxpipe import EndedError, ExecutionError, InputError, RankError, VerificationError
from fxpipe.extensions.clipping.opcodes import Clip
from fxpipe.extensions.ranks.mesh import check_cuda_ranks
from fxpipe.extensions.ranks.pairs import PairGroups
from fxpipe.extensions.ranks.streams import DeviceChannels, StreamRanks
from fxpipe.ir import instruction as ins
from fxpipe.ir.task import B, F, Task, U
from fxpipe.text.program import print_instruction
from tests.helpers.failing import Beside, die, first_of_each_kind, unchanged
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Snapshot, batch, within
from tests.simcuda.process import simulated
from tests.simcuda.ranks import on_devices_of_ranks

dist: Any = torch.distributed

KINDS = (ins.Receive, Clip, ins.Update, *deep(ins.Send, ins.Forward, ins.Backward))


def streaming(mesh: DeviceMesh, **options: Any) -> tuple[Beside, StreamRanks]:
    """A pipe on such ranks beside the plain loop, and what runs its device."""
    beside = Beside(mesh, **options)
    return beside, devices_of(beside.pipe)


def devices_of(pipe: fxpipe.Pipeline) -> StreamRanks:
    backend = pipe._engine.backend
    assert isinstance(backend, StreamRanks)
    return backend


def sent_values(mesh: DeviceMesh) -> tuple[int, int]:
    """How many tensors a step has sent over process groups, and how many it should."""
    beside, backend = streaming(mesh, clip_norm=0.1)
    count, pairs = 0, backend.pairs
    send = pairs.send

    def counted(target: int, value: Any) -> Any:
        nonlocal count
        count += 1
        return send(target, value)

    vars(pairs)["send"] = counted
    beside.step()
    own = beside.pipe.program.lists[mesh.get_local_rank()]
    sends = [x for x in own if isinstance(x, ins.Send) and x.buffer.kind != "norm"]
    beside.pipe.close()
    return count, len(sends)


@simulated
def test_every_tensor_between_stages_goes_over_a_process_group() -> None:
    found = on_devices_of_ranks(3, sent_values)
    assert all(count == sends > 0 for count, sends in found)


def lacking(on: Any, text: str, stream: str, name: str) -> Any:
    """Streams on which one instruction finds no memory."""
    if name == text:
        if text.startswith("update"):
            time.sleep(0.5)  # the other rank updates meanwhile, mostly
        raise torch.OutOfMemoryError("no memory")
    return on(stream, name)


def failing(mesh: DeviceMesh) -> list[str]:
    """An instruction of each kind fails on each rank in turn; then all ranks go on, unless one has
    updated."""
    here, told = mesh.get_local_rank(), []
    beside, backend = streaming(mesh, clip_norm=0.1)
    beside.step()
    cases = [case for case in first_of_each_kind(beside.pipe) if isinstance(case[2], KINDS)]
    for rank, _, instruction in cases:
        before = Snapshot.of(beside.pipe)
        if rank == here:
            lanes = backend.lanes[0]
            vars(lanes)["on"] = partial(lacking, lanes.on, print_instruction(instruction))
        x, y = beside.batch()
        where = f"rank {rank}: {instruction}"
        with within(10), pytest.raises(ExecutionError) as raised:
            beside.pipe.step(x, target=y)
        assert raised.value.device == rank, where
        assert isinstance(raised.value, RankError) == (rank != here), where
        vars(backend.lanes[0]).pop("on", None)
        try:
            unchanged(before, beside.pipe, where)
        except EndedError as ended:
            assert isinstance(instruction, ins.Update), where
            assert "updated with this batch" in str(ended), where
            beside.pipe.close()
            beside, backend = streaming(mesh, clip_norm=0.1)
        beside.step()
        told.append(type(instruction).__name__)
    beside.pipe.close()
    return told


@simulated
def test_after_a_failure_all_ranks_raise_have_their_weights_and_go_on() -> None:
    for found in on_devices_of_ranks(2, failing):
        assert {*found} == {kind.__name__ for kind in KINDS}


def failing_over_own_backend(mesh: DeviceMesh) -> list[str]:
    """The same over a backend that was registered, as a user registers one."""
    from tests.simcuda.nccl import NAME

    whole: Any = dist.new_group(range(mesh.size()), backend=f"cpu:gloo,cuda:{NAME}")
    return failing(DeviceMesh.from_group(whole, "cuda", mesh_dim_names=("pp",)))


@simulated
def test_after_a_failure_ranks_go_on_over_the_users_own_backend() -> None:
    for found in on_devices_of_ranks(2, failing_over_own_backend):
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


@simulated
def test_a_call_that_fails_before_anything_is_sent_leaves_the_pipe_as_it_was() -> None:
    on_devices_of_ranks(2, disagreeing)


def bereft(mesh: DeviceMesh, told: Path) -> None:
    """A rank dies in the middle of its forwards, while the other waits for it."""
    beside, backend = streaming(mesh)
    beside.step()
    x, y = beside.batch()
    if mesh.get_local_rank() == 1:
        vars(backend.lanes[0])["room"] = lambda spec: die()
    with within(10), pytest.raises(RankError) as raised:
        beside.pipe.step(x, target=y)
    told.write_text(str(raised.value))


@simulated
def test_the_death_of_a_rank_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        on_devices_of_ranks(2, bereft, tmp_path / "told")
    assert "rank 1" in (tmp_path / "told").read_text()


def left(mesh: DeviceMesh) -> None:
    """A call that nobody goes back from, and others after it."""
    beside, _ = streaming(mesh, optimizer=None)
    x, _ = batch()
    outputs = []
    for differentiated in (False, True, False, True):
        out = beside.pipe(x)
        outputs.append(out.detach().clone())
        if differentiated:
            out.square().sum().backward()
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    own = beside.pipe.state_dict()
    grads = {n: p.grad for n, p in beside.pipe.named_parameters() if n in own}
    for part in [*x.chunk(2)] * 2:
        beside.model(part).square().sum().backward()
    for name, parameter in beside.model.named_parameters():
        if name in own:
            given, expected = grads[name], parameter.grad
            assert given is not None and expected is not None
            assert torch.allclose(given.cpu(), expected, rtol=1e-4, atol=1e-5), name
    beside.pipe.close()


@simulated
def test_a_call_that_nobody_goes_back_from_leaves_nothing_posted() -> None:
    on_devices_of_ranks(2, left)


class Blocking(PairGroups):
    """Sends for which the host waits, as NCCL's streams do."""

    def send(self, target: int, value: torch.Tensor) -> Any:
        work: Any = super().send(target, value)
        while not self._aborting.locked() and not work.is_completed():
            time.sleep(0.001)
        return work


def ahead(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Written by hand: the first device does all its forwards before any backward."""
    if device == 0:
        yield from (*map(F, range(microbatches)), *map(B, range(microbatches)))
    else:
        yield from (task for i in range(microbatches) for task in (F(i), B(i)))
    yield U()


def blocking(mesh: DeviceMesh, schedule: Any, window: int | None) -> bool:
    """Whether two steps over such channels come to their end, with fewer receives posted ahead than
    are needed if ``window`` says so."""
    beside = Beside(mesh, schedule=schedule, microbatches=4)
    backend = devices_of(beside.pipe)
    backend.pairs = pairs = Blocking(backend.group, backend.pairs.device)
    x, y = batch(8)
    beside.pipe.prepare(x, target=y)
    compiled = beside.pipe._calls.compiled()
    compiled.whole().verify(channel=compiled.program.window)
    if window is not None:
        assert window < compiled.program.window
        with pytest.raises(VerificationError, match="deadlock: it waits until device"):
            compiled.whole().verify(channel=window)
        vars(compiled.program)["window"] = window
    done: list[bool] = []

    def steps() -> None:
        with suppress(ExecutionError):
            for _ in range(2):
                beside.pipe.step(x, target=y)
            beside.pipe.flush()
            done.append(True)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    thread.join(200 if window is None else 4)
    came = bool(done)
    pairs.abort()  # ends the waits
    thread.join()
    return came


@simulated
@pytest.mark.parametrize(
    ("size", "schedule"),
    [(2, ahead), *deep((3, "2bw"), (2, "2bw"), (3, "zb-h1"), (3, "1f1b"), (3, "gpipe"))],
)
def test_a_proven_program_ends_over_channels_that_block(size: int, schedule: Any) -> None:
    assert on_devices_of_ranks(size, blocking, schedule, None) == [True] * size


@pytest.mark.deep
@simulated
def test_a_program_that_is_refused_gets_stuck_over_channels_that_block() -> None:
    assert on_devices_of_ranks(2, blocking, ahead, 0) == [False, False]


def test_devices_that_cannot_exchange_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(
        InputError, match="ranks with CUDA devices need NCCL, and this torch has no"
    ):
        check_cuda_ranks()
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    check_cuda_ranks()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(InputError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* set it to 32"):
        check_cuda_ranks()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    check_cuda_ranks()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(
        InputError, match="CUDA_LAUNCH_BLOCKING=1 a rank would wait at each receive"
    ):
        check_cuda_ranks()
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(InputError, match=r"MAX_CONNECTIONS=1 a receive .* set it to 32"):
        check_cuda_ranks()


def captured(mesh: DeviceMesh) -> None:
    with pytest.raises(InputError, match="CudaGraphs is not possible over several ranks; a capt"):
        fxpipe.compile(torch.nn.Linear(2, 2), mesh, extensions=["cuda_graphs"])


def test_captured_graphs_are_refused_on_ranks() -> None:
    on_ranks(2, captured)


def other_size(mesh: DeviceMesh) -> list[str]:
    """A value that is sent in another shape than that which it was traced with."""
    beside, backend = streaming(mesh)
    beside.step()
    channels = backend.channels

    def lying(*args: Any) -> Any:
        made = channels(*args)
        vars(made)["put"] = lambda device, buffer, value: DeviceChannels.put(
            made, device, buffer, value[:1]
        )
        return made

    vars(backend)["channels"] = lying
    x, y = beside.batch()
    with within(10), pytest.raises(ExecutionError) as raised:
        beside.pipe.step(x, target=y)
    return [str(raised.value), *getattr(raised.value, "__notes__", [])]


@simulated
def test_a_value_of_another_size_than_was_traced_is_refused_by_its_name() -> None:
    for told in on_devices_of_ranks(2, other_size):
        assert "if the size of a value changes, make and use it on the same stage" in "".join(told)
