"""Images that lie in channels-last order, in stages that inductor compiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.inductor import libraries
from tests.extensions.inductor.stage_libraries import MICROBATCHES, gradients, graphs
from tests.helpers.profiles import deep

pytestmark = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


class Images(nn.Module):
    """Convolutions with what may stand between them, a skip to the end, and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.middle = nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2))
        )
        self.across = nn.Linear(2, 2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.across(self.middle(high))
        y: Tensor = self.last(torch.cat([high, self.up(low)], 1))
        return y


def images_pipe(extensions: Sequence[str], schedule: str) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(
        Images().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        ["cpu", "cpu"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        partition=["up"],
        loss=mse_loss,
        extensions=extensions,
    )


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, 4, 4), torch.randn(6, 2, 4, 4)
    return x.contiguous(memory_format=torch.channels_last), y


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1")])
def test_compiled_convolutions_read_and_make_images_in_channels_last_order(
    folder: Path, schedule: str
) -> None:
    x, y = images()
    with images_pipe(["inductor"], schedule) as pipe, images_pipe([], schedule) as other:
        pipe.prepare(x, target=y)
        assert None not in graphs(pipe)
        orders = {
            node.meta["val"].is_contiguous(memory_format=torch.channels_last)
            for stage in pipe.plan.stages
            if stage.forward is not None
            for node in stage.forward.graph.nodes
            if node.target is torch.ops.aten.convolution.default
        }
        assert orders == {True}
        high = next(edge for edge in pipe.plan.edges if edge.kind == "act")
        assert pipe.plan.specs[high.value].strides == (64, 1, 16, 4)
        expected = gradients(pipe, x, y, schedule == "zb-h1")
        loss, plain = pipe.step(x, target=y), other.step(x, target=y)
        assert torch.allclose(loss, plain, rtol=1e-5)
        for (name, here), there in zip(pipe.named_parameters(), other.parameters(), strict=True):
            assert here.grad is not None and there.grad is not None
            assert torch.equal(here.grad, expected[name])
            assert torch.allclose(here.grad, there.grad, atol=1e-6)
            assert here.grad.stride() == here.stride()
        with torch.no_grad():
            assert torch.allclose(pipe(x), other(x), atol=1e-6)
