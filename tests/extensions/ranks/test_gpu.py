"""Ranks with a CUDA device each, over NCCL: they need two devices or four, and are skipped
without. ``tests/extensions/ranks/test_simulated_devices.py`` calls the same functions on
simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from tests.gpu.test_cuda import BOUND, Model, at_home
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 64), torch.randint(8, (32,))


def trained(mesh: DeviceMesh, schedule: str) -> tuple[list[float], dict[str, Tensor | None]]:
    """The losses of three steps, and the gradients of a rank's own stages."""
    torch.cuda.set_device(mesh.get_local_rank())
    torch.manual_seed(0)
    model, losses = Model(), []
    x, y = batch()
    with fxpipe.compile(
        model,
        init_device_mesh("cuda", (mesh.size(),), mesh_dim_names=("pp",)),
        schedule=schedule,
        microbatches=4,
        loss=nn.functional.cross_entropy,
    ) as pipe:
        for _ in range(3):
            losses.append(float(pipe.step(x, target=y)))
        own, found = pipe.state_dict(), at_home(model)
    return losses, {name: gradient for name, gradient in found.items() if name in own}


def looped() -> tuple[list[float], dict[str, Tensor | None]]:
    """The losses of three steps of the loop on one device, and its gradients."""
    torch.manual_seed(0)
    alone = Model().cuda()
    x, y = batch()
    options: dict[str, Any] = {"loss": nn.functional.cross_entropy, "target": y.cuda()}
    losses = [float(loop.train(alone, 4, x.cuda(), **options).loss) for _ in range(3)]
    return losses, at_home(alone)


def compare(
    ranks: Sequence[tuple[list[float], dict[str, Tensor | None]]],
    wanted: tuple[list[float], dict[str, Tensor | None]],
) -> None:
    """Every rank has the loop's losses, and all together its gradients."""
    whole: dict[str, Tensor | None] = {}
    for losses, gradients in ranks:
        assert losses == pytest.approx(wanted[0], abs=BOUND)
        whole |= gradients
    loop.assert_same({name: whole[name] for name in wanted[1]}, wanted[1], BOUND)


@pytest.mark.parametrize(
    ("size", "schedule"),
    [
        *((2, schedule) for schedule in ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b")),
        *((4, schedule) for schedule in ("1f1b", "gpipe", "zb-h1")),
    ],
)
def test_ranks_train_as_the_loop(size: int, schedule: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"there are no {size} CUDA devices")
    compare(on_ranks(size, trained, schedule), looped())
