"""Ranks on hosts of their own, over a network that delays and loses: they train like one process,
and name each other where a host loses its link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.switch import Switch, address, hosts

ROOT = Path(__file__).parents[3]


def model_of(stages: int) -> tuple[nn.Module, list[str]]:
    """A layer and a ReLU for each stage, and where the stages begin."""
    torch.manual_seed(0)
    layers = [layer for _ in range(stages) for layer in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(*layers), [str(2 * stage) for stage in range(1, stages)]


def trained(stages: int, devices: Any) -> None:
    """Print some losses, and all parameters, to the last bit."""
    import fxpipe

    model, cuts = model_of(stages)
    with fxpipe.compile(
        model,
        devices,
        microbatches=2,
        loss=nn.functional.mse_loss,
        partition=cuts,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ) as pipe:
        for _ in range(5):
            x = torch.randn(4, 4)
            print(float(pipe.step(x, target=x.abs())).hex())
        for name, value in pipe.state_dict(full=True).items():
            print(name, [float(each).hex() for each in value.flatten()], flush=True)


def train(rank: int, ranks: int) -> None:
    """Some steps to the end, and then others until a rank is lost; run in a network namespace."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fxpipe
    from fxpipe.extensions.ranks import tree

    tree.SILENCE = 10.0  # busy processes are not lost
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    trained(ranks, mesh)
    model, cuts = model_of(ranks)
    x = torch.randn(4, 4)
    pipe = fxpipe.compile(model, mesh, microbatches=2, loss=nn.functional.mse_loss, partition=cuts)
    pipe.step(x, target=x)
    print("ready", flush=True)
    try:
        while True:
            pipe.step(x, target=x)
    except fxpipe.RankError as error:
        print(error, flush=True)
    pipe.close()
    sys.stdin.read()  # the store is in the first rank, which must outlive the others
    os._exit(0)  # torch's own connections wait for the link


@pytest.fixture(params=[2, 3])
def network(request: pytest.FixtureRequest) -> Iterator[tuple[list[str], Switch]]:
    """Hosts that know the first one by a name, which leads to an address inside of it there, and a
    slow switch between them that loses frames."""
    with ExitStack() as undo:
        try:
            names, switch = undo.enter_context(hosts(request.param, delay=0.002, loss=0.02))
            for rank, name in enumerate(names):
                folder = Path("/etc/netns", name)
                folder.mkdir(parents=True)
                undo.callback(shutil.rmtree, folder)
                first = address(0) if rank else "127.0.1.1"
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{first} first-host\n")
        except OSError as error:
            pytest.skip(f"hosts cannot be made here: {error}")
        yield names, switch


@contextmanager
def ranks_on(names: list[str]) -> Iterator[list[Any]]:
    """A process on each host that trains."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "first-host",
        "MASTER_PORT": "29517",
        "GLOO_SOCKET_IFNAME": "joined",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-c"),
                f"from {train.__module__} import train; train({rank}, {len(names)})",
            ],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def before_ready(lines: Iterable[str]) -> str:
    """What a rank prints before it is ready, or ends."""
    return "".join(takewhile(lambda line: line != "ready\n", lines))


@pytest.mark.deep
def test_hosts_on_a_bad_network_train_like_one_process_and_name_the_one_that_loses_its_link(
    network: tuple[list[str], Switch], capfd: pytest.CaptureFixture[str]
) -> None:
    names, switch = network
    last = len(names) - 1
    with ranks_on(names) as ranks:
        losses = [before_ready(process.stdout) for process in ranks]
        switch.unplugged.add(last)
        told = [process.communicate(timeout=120)[0] for process in reversed(ranks)][::-1]
    assert switch.lost
    for text in told[:-1]:
        assert f"rank {last} (" in text, text
    for text in told:
        assert "start all ranks again, from the last checkpoint" in text
    threads = torch.get_num_threads()
    torch.set_num_threads(len(names))  # one for each device
    try:
        trained(len(names), len(names))
    finally:
        torch.set_num_threads(threads)
    alone = capfd.readouterr().out
    assert alone.count("0x") > 5
    assert losses == [alone] * len(names)
