"""A network link between two ranks that goes down: both raise, and name the other one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def train(rank: int) -> None:
    """Steps until a rank is lost; run in a network namespace."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fxpipe
    from fxpipe.runtime.ranks import links

    links.SILENCE = 3.0
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(4, 4)
    pipe = fxpipe.compile(
        model,
        init_device_mesh("cpu", (2,)),
        microbatches=2,
        loss=nn.functional.mse_loss,
        partition=["2"],
    )
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


def test_a_link_that_goes_down_is_an_error_on_both_sides(spaces: list[str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": ADDRESSES[0],
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
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ip("-n", spaces[0], "link", "set", "joined", "down")
        told = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, text in enumerate(told):
        assert f"rank {1 - rank} (" in text, text
        assert "start all ranks again, from the last checkpoint" in text
