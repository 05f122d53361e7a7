"""Processes with a simulated device each, and transfers between them as by NCCL."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.ir.recipe import RECIPES
from tests.extensions.ranks import test_gpu as on_gpus
from tests.extensions.ranks.test_equal import CASES as EVERY
from tests.extensions.ranks.test_equal import Results, equal, run_cases
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.ranks import on_devices_of_ranks
from tests.simcuda.training import OVERLAPPING, sgd

pytestmark = simulated

dist: Any = torch.distributed

LAZY, RANDOM, STARVING = 1, 2, 3

ORDERS = (LAZY, RANDOM, STARVING)

SEED = int(os.environ.get("FXPIPE_SEED", random.SystemRandom().randrange(10**6)))
"""It changes from run to run: every message names it, and ``FXPIPE_SEED`` sets it."""

MICROBATCHES = 8

STEPS = 4

FLUSHED = [
    *(name for name in RECIPES if name not in (*OVERLAPPING, "inference", "chimera")),
    "2bw",
]
"""The schedules whose steps end with all of their batch done, and 2BW; copies of stages, as
Chimera has, are refused on such devices."""


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


def collected(mesh: DeviceMesh) -> Any:
    """What collectives make of each rank's numbers, and a race with one that nothing waits for."""
    from tests.simcuda import cuda

    every, here, size = group(mesh)._get_backend(torch.device("cuda")), mesh.get_rank(), mesh.size()
    own = torch.arange(2.0 * size, device=f"cuda:{here}") + 10**here
    total, spread, part = own.clone(), torch.empty_like(own), torch.empty_like(own[:2])
    first, gathered = own.clone(), own.new_empty(size, 2 * size)
    torch.cuda.synchronize(here)
    cuda.take()
    works = [
        every.broadcast([first], dist.BroadcastOptions()),
        every.allreduce([total]),
        every._allgather_base(gathered, own),
        every.alltoall_base(spread, own, [], []),
        every._reduce_scatter_base(part, own, dist.ReduceScatterOptions()),
    ]
    for work in works:
        work.wait()
    made = [x + 0 for x in (first, total, gathered, spread, part)]
    noticed = cuda.take()
    assert not noticed.waits and not noticed.races
    late = every.allreduce([total])
    total.add_(1)
    late.wait()
    torch.cuda.synchronize(here)
    assert len(cuda.take().races)
    return [x.cpu() for x in made]


def test_collectives_are_queued_on_streams_and_the_hosts_go_on() -> None:
    size = 3
    every = torch.stack([torch.arange(2.0 * size) + 10**rank for rank in range(size)])
    for rank, found in enumerate(on_devices_of_ranks(size, collected)):
        own = slice(2 * rank, 2 * rank + 2)
        spread = torch.cat(list(every[:, own]))
        wanted = [every[0], every.sum(0), every, spread, every.sum(0)[own]]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


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


class Deep(nn.Module):
    """Eight like layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def layers() -> Deep:
    torch.manual_seed(0)
    return Deep()


def data(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(step))
    return x, y


def looped(schedule: str) -> dict[str, Tensor]:
    """The losses and weights of the plain loop; for 2BW, of one that reads weights a step late."""
    model, made = layers(), dict[str, Tensor]()
    optimizer = sgd(model.parameters())
    delayed = DelayedLoop(model, optimizer, mse_loss, MICROBATCHES, lambda _: 1)
    for step in range(STEPS):
        x, y = data(step)
        if schedule == "2bw":
            made[f"loss {step}"] = delayed.step(x, y)
            continue
        optimizer.zero_grad()
        made[f"loss {step}"] = loop.train(model, MICROBATCHES, x, target=y, loss=mse_loss).loss
        optimizer.step()
    return {**made, **model.state_dict()}


def trained(mesh: DeviceMesh, schedules: Sequence[str], seed: int) -> list[str]:
    """Races, and what differs from the loop; what streams run comes in other orders in each step,
    and in other ones on each rank."""
    from tests.simcuda import cuda

    size, wrong = mesh.size(), list[str]()
    for schedule in schedules:
        stages = RECIPES[schedule](size, MICROBATCHES).stages
        halves = (16 * stage // stages for stage in range(1, stages))  # of layers
        cuts = [f"layers.{half // 2}.{half % 2}" for half in halves]
        options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": mse_loss, "optimizer": sgd}
        made: dict[str, Tensor] = {}
        with fxpipe.compile(layers(), mesh, schedule=schedule, partition=cuts, **options) as pipe:
            for step in range(STEPS):
                mode = ORDERS[(step + mesh.get_local_rank()) % len(ORDERS)]
                cuda.configure(cuda.Mode(mode), seed + step)
                x, y = data(step)
                made[f"loss {step}"] = pipe.step(x, target=y)
            pipe.flush()
            made |= pipe.state_dict()
            wanted = looped(schedule)
            wrong += [
                f"{schedule} with seed {seed}: another {name}"
                for name, value in made.items()
                if not torch.equal(value.cpu(), wanted[name])
            ]
        wrong += [f"{schedule} with seed {seed}: {race}" for race in cuda.take().races]
    return wrong


@pytest.mark.parametrize(
    ("size", "schedules"),
    [
        (2, FLUSHED if DEEP else ["zb-v", "2bw"]),
        *deep((4, FLUSHED)),
    ],
)
def test_ranks_on_devices_train_as_the_loop(size: int, schedules: Sequence[str]) -> None:
    assert on_devices_of_ranks(size, trained, schedules, SEED) == [[]] * size


SOME = {2: ["scaled", "deferred, 2bw"]}
MORE = {
    2: [
        *SOME[2],
        "leaf",
        "changing",
        "clipped",
        "differentiated",
        "recomputed",
        "tied, 2bw",
        "own task",
        "gradients",
    ],
    3: ["1f1b", "zb-h1", "2bw", "tied", "tied, 2bw"],
    4: ["1f1b", "gpipe", "zb-h1", "pipedream", "tied"],
}
CASES: Mapping[int, Sequence[str]] = MORE if DEEP else SOME
"""Ranks → what they run."""

assert EVERY.keys() >= {*chain(*MORE.values())}


def run_on_devices(mesh: DeviceMesh, names: Sequence[str], seed: int) -> dict[str, Results]:
    """What each case gives, in other orders of what streams run."""
    from tests.simcuda import cuda

    found: dict[str, Results] = {}
    for number, name in enumerate(names):
        mode = ORDERS[(number + mesh.get_local_rank()) % len(ORDERS)]
        cuda.configure(cuda.Mode(mode), seed + number)
        found |= run_cases(mesh, [name])
        if races := cuda.take().races:
            found[name] = {"error": f"in mode {mode} with seed {seed}: {races[0]}"}
    return found


@pytest.mark.parametrize("size", CASES)
def test_ranks_on_devices_give_the_bits_of_one_process(size: int) -> None:
    alone = on_devices(run_cases, size, CASES[size])
    ranks = on_devices_of_ranks(size, run_on_devices, CASES[size], SEED)
    print(f"FXPIPE_SEED={SEED}")  # shown if a value differs
    for name in CASES[size]:
        equal([found[name] for found in ranks], alone[name])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("size", "schedule"), [(2, "interleaved-1f1b"), (2, "1f1b"), (4, "zb-h1"), (4, "gpipe")]
)
def test_the_tests_of_nccl_pass_on_simulated_devices(size: int, schedule: str) -> None:
    wanted = on_devices(on_gpus.looped)
    on_gpus.compare(on_devices_of_ranks(size, on_gpus.trained, schedule), wanted)


def used(mesh: DeviceMesh) -> list[int]:
    """The devices on which a step of two replicas allocates memory."""
    options: dict[str, Any] = {"microbatches": 2, "loss": mse_loss, "optimizer": sgd}
    with fxpipe.compile(layers(), mesh, extensions=[fxpipe.Replicas()], **options) as pipe:
        x, y = data(0)
        pipe.step(x, target=y)
        devices = range(torch.cuda.device_count())
        return [device for device in devices if torch.cuda.memory_allocated(device)]


def test_each_replica_computes_on_the_devices_of_its_own_ranks() -> None:
    assert on_devices_of_ranks(4, used, replicas=2) == [[rank] for rank in range(4)]
