"""Two ranks on hosts of their own: they train like one process, and name each other where the link
between them goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def trained(devices: Any) -> None:
    """Print some losses, and the sum of each parameter that is kept here, to the last bit."""
    import fxpipe

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with fxpipe.compile(
        model,
        devices,
        microbatches=2,
        loss=nn.functional.mse_loss,
        partition=["2"],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ) as pipe:
        for _ in range(3):
            x = torch.randn(4, 4)
            print(float(pipe.step(x, target=x[:, :2])).hex())
        for name, value in pipe.state_dict(full=True).items():
            print(name, [float(each).hex() for each in value.flatten()], flush=True)


def train(rank: int) -> None:
    """Some steps to the end, and then others until a rank is lost; run in a network namespace."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fxpipe
    from fxpipe.runtime.ranks import links

    links.SILENCE = 3.0
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    trained(mesh)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(4, 4)
    pipe = fxpipe.compile(model, mesh, microbatches=2, loss=nn.functional.mse_loss, partition=["2"])
    pipe.step(x, target=x[:, :2])
    print("ready", flush=True)
    try:
        while True:
            pipe.step(x, target=x[:, :2])
    except fxpipe.RankError as error:
        print(error, flush=True)
    pipe.close()
    os._exit(0)  # torch's own connections wait for the link


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two network namespaces that one link joins."""
    own = [f"fxpipe-{os.getpid()}-{rank}" for rank in range(2)]
    ends = [f"fx{os.getpid() % 10**6}{end}" for end in "ab"]
    with ExitStack() as undo:
        try:
            for name in own:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(own, ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", "joined")
                ip("-n", name, "address", "add", f"{address}/24", "dev", "joined")
                ip("-n", name, "link", "set", "joined", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield own


@pytest.fixture
def own_hosts(spaces: list[str]) -> Iterator[str]:
    """A name for the first host, which leads to an address inside of it there."""
    folders = [Path("/etc/netns", name) for name in spaces]
    try:
        for folder, address in zip(folders, ("127.0.1.1", ADDRESSES[0]), strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} first-of-two\n")
    except OSError as error:
        pytest.skip(f"namespaces cannot have names of their own here: {error}")
    yield "first-of-two"
    for folder in folders:
        shutil.rmtree(folder)


@contextmanager
def ranks_in(spaces: list[str], first: str) -> Iterator[list[Any]]:
    """A process in each namespace that trains, where the first has a name."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": first,
        "MASTER_PORT": "29517",
        "GLOO_SOCKET_IFNAME": "joined",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-c"),
                f"from tests.ranks.test_lost_link import train; train({rank})",
            ],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(spaces)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.deep
def test_two_hosts_train_like_one_process_and_name_each_other_when_their_link_goes_down(
    spaces: list[str], own_hosts: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with ranks_in(spaces, own_hosts) as ranks:
        losses = ["".join(iter(process.stdout.readline, "ready\n")) for process in ranks]
        ip("-n", spaces[0], "link", "set", "joined", "down")
        told = [process.communicate(timeout=120)[0] for process in ranks]
    for rank, text in enumerate(told):
        assert f"rank {1 - rank} (" in text, text
        assert "start all ranks again, from the last checkpoint" in text
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one for each device
    try:
        trained(2)
    finally:
        torch.set_num_threads(threads)
    alone = capfd.readouterr().out
    assert alone.count("0x") > 3
    assert losses == [alone, alone]
