"""Images in stages that inductor compiles lie in channels-last order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.inductor import libraries
from fxpipe.extensions.inductor.channels_last import lay_channels_last
from fxpipe.extensions.offload import storing
from fxpipe.kernels import graph
from fxpipe.runtime import interpreter
from tests.extensions.inductor.stage_libraries import MICROBATCHES, gradients, graphs
from tests.helpers.profiles import deep

pytestmark = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


KEPT_ELSEWHERE = f"""
schedule kept_elsewhere stages=2 microbatches={MICROBATCHES} delay=0
place 0 | 1
0: F0 O0 F1 F2 P0 B0 B1 B2 U
1: F0 F1 F2 R0 B0 R1 B1 R2 B2 U
"""


class Held:
    """Memory that should be stored elsewhere, and is not.

    Attributes:
        bytes: those of each that was made.
    """

    bytes: ClassVar[list[int]] = []

    def __init__(self, memories: list[Tensor]) -> None:
        self.memories = memories
        self.bytes.append(sum(each.untyped_storage().nbytes() for each in memories))

    def wait(self) -> None:
        """It is where it was."""

    def fetch(self) -> list[Tensor]:
        return self.memories


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


def images_pipe(
    compiler: Any, schedule: Any = "1f1b", extensions: Sequence[Any] = (), **options: Any
) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(
        Images(),
        ["cpu", "cpu"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        partition=["up"],
        loss=mse_loss,
        extensions=[*([compiler] if compiler else ()), *extensions],
        **options,
    )


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 3, 4, 4), torch.randn(6, 2, 4, 4)


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1")])
def test_compiled_convolutions_read_and_make_images_in_channels_last_order(
    folder: Path, schedule: str
) -> None:
    x, y = images()
    with images_pipe("inductor", schedule) as pipe, images_pipe(None, schedule) as other:
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
            assert pipe(x).is_contiguous() and torch.allclose(pipe(x), other(x), atol=1e-6)


@pytest.mark.deep
def test_a_step_copies_the_weights_of_convolutions_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def laid_out(weights: Any, strides: Any) -> Any:
        made = graph.laid_out(weights, strides)
        copied.append([new is not old for new, old in zip(made, weights, strict=True)])
        return made

    monkeypatch.setattr(interpreter, "laid_out", laid_out)
    monkeypatch.setattr(storing, "memory_of", lambda machine, memories: Held(memories))
    x, y = images()
    schedule = fxpipe.Schedule.parse(KEPT_ELSEWHERE)
    with images_pipe("inductor", schedule, extensions=[fxpipe.Dispatch("device")]) as pipe:
        pipe.prepare(x, target=y)
        for factor in (1.0, 2.0):
            pipe.get_parameter("last.weight").data.mul_(factor)  # as old optimizers write
            pipe.zero_grad()
            copied.clear()
            Held.bytes.clear()
            expected = gradients(pipe, x, y, False)
            pipe.step(x, target=y)
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None and torch.equal(parameter.grad, expected[name])
            assert sorted(map(sum, copied)) == [2, 3]  # as many convolutions as the stages have
            stored = list(Held.bytes)
            sizes = pipe.simulate().sizes
            assert sizes is not None
            assert stored == [sizes.saved[0] + sizes.values["silu"]]  # and no weight
            for stage in pipe.plan.stages:
                given = [pipe.get_parameter(each.target) for each in stage.parameters]
                copies = [each for each in given if each.dim() == 4]
                expected_bytes = sum(each.nbytes for each in (*given, *copies))
                assert sizes.parameters[stage.index] == expected_bytes


@pytest.mark.deep
def test_batches_in_flight_read_the_weights_of_their_own_version(folder: Path) -> None:
    options: Any = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5)}
    x, y = images()
    one = images_pipe("inductor", "2bw", **options)
    with one, images_pipe(None, "2bw", **options) as other:
        steps = [(one.step(x, target=y), other.step(x, target=y)) for _ in range(5)]
        for compiled, plain in steps:
            assert torch.allclose(compiled, plain, rtol=1e-5)
        for each in (one, other):
            each.flush()
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.smoke
def test_images_stay_as_they_lie_where_as_many_copies_would_be_needed() -> None:
    def laid(*between: nn.Module) -> bool:
        convolutions = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        model = nn.Sequential(convolutions[0], *between, convolutions[1], *between, convolutions[2])
        with fxpipe.compile(model, ["cpu"], microbatches=1) as pipe, torch.no_grad():
            pipe(torch.randn(2, 2, 4, 4))
            return lay_channels_last(pipe.plan) is not pipe.plan

    assert laid(nn.ReLU()) and laid(nn.AvgPool2d(1), nn.Dropout(0.0))
    assert not laid(nn.LayerNorm([2, 4, 4]))


def test_batchnorm_on_images_in_channels_last_order_rounds_as_pytorch_does() -> None:
    from fxpipe.extensions.inductor import decompositions as own  # slow to import

    torch.manual_seed(0)
    x = torch.randn(4, 8, 32, 32).add_(3).contiguous(memory_format=torch.channels_last)
    given = torch.randn_like(x), torch.randn(8), torch.randn(8), torch.zeros(8), torch.ones(8)

    def run(norm: Any, back: Any, kind: torch.dtype) -> list[Tensor]:
        image, grad, weight, bias, mean, var = (each.to(kind) for each in (x, *given))
        made = norm(image, weight, bias, mean, var, True, 0.1, 1e-5)
        saved = made[1], made[2]
        wanted = [True] * 3
        return [*made, *back(grad, image, weight, mean, var, *saved, True, 1e-5, wanted)]

    theirs = (
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten.native_batch_norm_backward.default,
    )
    exact = run(*theirs, torch.float64)
    for found, there in zip(run(own._norm, own._norm_backward, x.dtype), exact, strict=True):
        assert (found - there).abs().max() <= 2e-6 * there.abs().max()


@pytest.mark.deep
def test_max_pooling_in_channels_last_order_is_pytorchs_own(folder: Path) -> None:
    torch.manual_seed(0)
    with images_pipe("inductor") as pipe:
        pipe.prepare(torch.randn(6, 3, 4, 4), target=torch.randn(6, 2, 4, 4))
        libraries_of_it = [path.read_bytes() for path in folder.glob("*.so")]
        for name in (b"_max_pool2d_with_indices", b"_max_pool2d_with_indices_backward"):
            assert any(name in each for each in libraries_of_it)
