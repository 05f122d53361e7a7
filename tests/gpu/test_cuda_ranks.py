"""Ranks with a CUDA device each, over NCCL: they need two devices, and are skipped without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from tests.gpu.real import needs_gpu
from tests.gpu.test_cuda import BOUND, Model, at_home
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
    needs_gpu("NCCL is not simulated"),
]


def trained(mesh: DeviceMesh, schedule: str) -> tuple[list[float], dict[str, Tensor | None]]:
    """The losses of three steps, and the gradients of a rank's own stages."""
    torch.cuda.set_device(mesh.get_local_rank())
    torch.manual_seed(0)
    model, losses = Model(), []
    x, y = torch.randn(32, 64), torch.randint(8, (32,))
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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_ranks_train_as_the_loop(schedule: str) -> None:
    torch.manual_seed(0)
    alone = Model().cuda()
    x, y = torch.randn(32, 64), torch.randint(8, (32,))
    options: dict[str, Any] = {"loss": nn.functional.cross_entropy, "target": y.cuda()}
    expected = [float(loop.train(alone, 4, x.cuda(), **options).loss) for _ in range(3)]
    found = on_ranks(2, trained, schedule)
    whole: dict[str, Tensor | None] = {}
    for losses, gradients in found:
        assert losses == pytest.approx(expected, abs=BOUND)
        whole |= gradients
    gradients = at_home(alone)
    loop.assert_same({name: whole[name] for name in gradients}, gradients, BOUND)
