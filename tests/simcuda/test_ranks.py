"""Processes with a simulated device each, and transfers between them as by NCCL."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.ir.recipe import RECIPES
from tests.helpers.profiles import DEEP
from tests.simcuda.process import at_once, simulated
from tests.simcuda.training import CUTS, Dropout, sgd

pytestmark = simulated

dist: Any = torch.distributed

LAZY, RANDOM = 1, 2


def on_devices_of_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(mesh, *args)`` on ranks that have a simulated device each."""
    with tempfile.TemporaryDirectory() as folder:
        calls = [(rank, size, folder, function, args) for rank in range(size)]
        return at_once(_call, calls, devices=size)


def _call(
    rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    from tests.simcuda import cuda, nccl

    nccl.install()
    torch.cuda.set_device(rank)
    cuda.configure(cuda.Mode.LAZY)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = function(init_device_mesh("cuda", (size,), mesh_dim_names=("pp",)), *args)
    torch.cuda.synchronize(rank)  # the others wait for what this process still sends
    dist.barrier()
    return found


def group(mesh: DeviceMesh) -> Any:
    """A process group of all ranks for tensors on devices, made as users make one."""
    from tests.simcuda.nccl import NAME

    return dist.new_group(range(mesh.size()), backend=f"cuda:{NAME}")


def exchanged(mesh: DeviceMesh) -> Any:
    """A value goes to the other rank and comes back, while neither host waits."""
    from tests.simcuda import cuda

    pair, here = group(mesh), mesh.get_local_rank()
    x = torch.arange(5.0, device=f"cuda:{here}") + 10 * here
    y = torch.empty_like(x)
    torch.cuda.synchronize(here)
    cuda.take()
    for _ in range(3):
        if here:
            dist.irecv(y, 0, group=pair).wait()
            dist.isend(y * 2, 0, group=pair).wait()
        else:
            dist.isend(x, 1, group=pair).wait()
            dist.irecv(x, 1, group=pair).wait()
    noticed = cuda.take()
    assert not noticed.waits and not noticed.races
    return x.tolist() if here == 0 else []


def test_transfers_are_queued_on_streams_and_the_hosts_go_on() -> None:
    found, _ = on_devices_of_ranks(2, exchanged)
    assert found == [8 * i for i in range(5)]


def unawaited(mesh: DeviceMesh) -> Any:
    """What is received is read before any stream waits for it."""
    from tests.simcuda import cuda

    pair, here = group(mesh), mesh.get_local_rank()
    x = torch.ones(4, device=f"cuda:{here}")
    work = dist.irecv(x, 0, group=pair) if here else dist.isend(x, 1, group=pair)
    made = x + 1
    work.wait()
    torch.cuda.synchronize(here)
    del made
    return list(cuda.take().races)


def test_reading_what_is_still_received_is_a_race() -> None:
    sender, receiver = on_devices_of_ranks(2, unawaited)
    assert not sender
    assert "aten::add" in receiver[0] and "nccl:recv" in receiver[0]


def crossed(mesh: DeviceMesh, grouped: bool) -> bool:
    """Both ranks send first: they wait for each other, unless it is one group of operations."""
    pair, here = group(mesh), mesh.get_local_rank()
    x = torch.full((3,), float(here), device=f"cuda:{here}")
    y = torch.empty_like(x)
    sending = dist.P2POp(dist.isend, x, 1 - here, group=pair)
    receiving = dist.P2POp(dist.irecv, y, 1 - here, group=pair)
    if grouped:
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        return y.tolist() == [1.0 - here] * 3
    for op in (sending, receiving):
        op.op(op.tensor, 1 - here, group=pair).wait()
    end = torch.cuda.current_stream().record_event()
    stuck = True
    for _ in range(20):
        time.sleep(0.01)
        stuck = stuck and not end.query()
    pair._get_backend(torch.device("cuda")).abort()
    torch.cuda.synchronize(here)  # comes to an end now
    return stuck


@pytest.mark.parametrize("grouped", [True, False])
def test_each_transfer_of_a_communicator_ends_before_the_next_but_in_a_group(grouped: bool) -> None:
    assert on_devices_of_ranks(2, crossed, grouped) == [True, True]


def trained(mesh: DeviceMesh, schedules: Sequence[str], modes: Sequence[int]) -> list[str]:
    """What differs between training on CPU devices and on ranks, and races."""
    from tests.simcuda import cuda

    wrong: list[str] = []
    for schedule in schedules:
        wanted = _train(["cpu"] * mesh.size(), mesh.size(), schedule)
        for mode in modes:
            cuda.configure(cuda.Mode(mode), 1)
            cuda.take()
            made = _train(mesh, mesh.size(), schedule)
            wrong += [f"{schedule}: {race}" for race in cuda.take().races]
            wrong += [
                f"{schedule} in mode {mode}: another {name}"
                for name, value in made.items()
                if not torch.equal(value, wanted[name])
            ]
    return wrong


def _train(devices: Any, size: int, schedule: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Dropout()
    options: dict[str, Any] = {"microbatches": 4, "loss": cross_entropy, "optimizer": sgd}
    cuts = CUTS["dropout"][RECIPES[schedule](size, 4).stages]
    with fxpipe.compile(model, devices, schedule=schedule, partition=cuts, **options) as pipe:
        losses = []
        for step in range(4):
            x, y = model.batch(torch.Generator().manual_seed(step))
            losses.append(pipe.step(x, target=y))
        pipe.flush()
        made = {f"loss {i}": loss for i, loss in enumerate(losses)}
        made |= {f"weight {name}": value for name, value in pipe.state_dict().items()}
        return {name: value.detach().cpu().clone() for name, value in made.items()}


FLUSHING = ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "looped-bfs", "zb-v"]
QUICK = ["1f1b", "interleaved-1f1b", "zb-v", "2bw"]


@pytest.mark.parametrize(
    ("size", "schedules"),
    [
        (2, [*FLUSHING, "v-half", "v-min", "dualpipe-v", "2bw"] if DEEP else QUICK),
        (4, ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "2bw"] if DEEP else ["1f1b", "2bw"]),
    ],
)
def test_ranks_on_devices_train_as_cpu_devices_do(size: int, schedules: Sequence[str]) -> None:
    modes = [LAZY, RANDOM] if DEEP else [LAZY]
    assert on_devices_of_ranks(size, trained, schedules, modes) == [[]] * size
