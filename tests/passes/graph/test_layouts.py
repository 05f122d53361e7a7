"""Models whose values lie in other orders of their dimensions than a trace knows."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.kernels.graph import layout
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_a_copy_has_the_strides_of_the_trace_unless_elements_shared_memory_there(
    sizes: list[int], data: st.DataObject
) -> None:
    strides = tuple(data.draw(st.integers(0, 9)) for _ in sizes)
    value = torch.arange(math.prod(sizes)).reshape(sizes)
    places = [sum(map(operator.mul, at, strides)) for at in product(*map(range, sizes))]
    found = layout(value, strides)
    if len({*places}) < len(places):
        assert found == value.stride()
    assert found in (strides, value.stride())
    copy_ = torch.empty_strided(sizes, found, dtype=value.dtype).copy_(value)
    assert torch.equal(copy_, value)  # no element was written over


class Turned(nn.Module):
    """Normalises the features of a sequence, as PointNet and PatchTST do."""

    def __init__(self, norm: nn.Module, contiguous: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = norm
        self.last = nn.Linear(6, 3)
        self.contiguous = contiguous

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).relu()
        if self.contiguous:
            y = y.contiguous()
        y = y + y.mean(1, keepdim=True)
        scores: Tensor = self.last(y)
        return scores


class Between(Turned):
    """A norm right between two layers, which read and write the features last."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))
        return made


class Video(nn.Module):
    """Normalises frames whose images have shrunk to a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.first(x.flatten(0, 1)).view(-1, 1, 1, 8).permute(0, 3, 1, 2)
        frames = frames + frames.tanh()
        y = self.norm(frames.view(*x.shape[:2], 8, 1, 1).permute(0, 2, 1, 3, 4))
        scores: Tensor = self.last(y.flatten(2).transpose(1, 2))
        return scores


class Attending(nn.Module):
    """Looks at all pixels, as the U-Nets of diffusion models do, and normalises the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)
        self.query, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        image: Tensor = self.first(x)
        pixels = self.query(image.flatten(2).transpose(1, 2)).transpose(1, 2)
        y = self.norm(pixels.reshape(image.shape) + image)
        scores: Tensor = self.last(y).flatten(2).transpose(1, 2)
        return scores


class Written(nn.Module):
    """Writes to a view, and what multiplies by it gives it a gradient that lies turned."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.write, self.last = write, nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.write(self.first(x[:1]))
        scores = _heads(self.other(x)) @ heads.transpose(-1, -2)
        y: Tensor = self.last(scores.relu().sum(1))
        return y


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 4, 8).transpose(1, 2)


def _scaled_heads(x: Tensor) -> Tensor:
    heads = _heads(x)
    heads /= 3.0
    return heads


def _scaled_rows(x: Tensor) -> Tensor:
    x[:, 3:5] *= 2.0
    return _heads(x)


def _scaled_beside(x: Tensor) -> Tensor:
    turned = x.transpose(1, 2)
    turned *= 2.0
    return _heads(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (lambda: Turned(nn.BatchNorm1d(6), False), (33, 4)),
    "BatchNorm, then a copy": (lambda: Turned(nn.BatchNorm1d(6), True), (33, 4)),
    "averaging": (lambda: Turned(nn.BatchNorm1d(6, momentum=None), True), (33, 4)),
    "no statistics": (lambda: Turned(nn.BatchNorm1d(6, track_running_stats=False), False), (33, 4)),
    "single pixels": (Video, (4, 8)),
    "one image a micro-batch": (Attending, (3, 4, 4)),
    "a view is written": (lambda: Written(_scaled_heads), (20, 32)),
    "rows are written": (lambda: Written(_scaled_rows), (20, 32)),
    "what a written view is of is read": (lambda: Written(_scaled_beside), (20, 32)),
    "between two layers": (lambda: Between(nn.BatchNorm1d(6), False), (33, 4)),
}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("BatchNorm", 3),
        ("one image a micro-batch", 1),
        ("a view is written", 3),
        ("what a written view is of is read", 1),
        ("between two layers", 3),
        *deep(
            *((name, 3) for name in MODELS), *((name, 1) for name in MODELS if "written" in name)
        ),
    ],
)
def test_models_whose_values_lie_in_other_orders_equal_the_loop(name: str, stages: int) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, stages, microbatches=2, loss=mse_loss) as pipe:
        for rows in (*deep(2), 4, 7) if name != "one image a micro-batch" else (2, 7):
            x = torch.randn(rows, *shape)
            y = torch.randn(rows, 16 if name == "one image a micro-batch" else shape[0], 3)
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=mse_loss, target=y)
        loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-5)
        loop.assert_same(model.state_dict(), alone.state_dict(), 1e-5)
        if "written" in name and not DEEP:
            return  # in eval mode they write the same
        model.eval()
        alone.eval()
        with torch.no_grad():
            expected = torch.cat([alone(part) for part in x.tensor_split(2)])
            torch.testing.assert_close(pipe(x), expected)


class Bottleneck(nn.Module):
    """A residual block of ResNet, with images, or volumes, of a single pixel."""

    def __init__(self, dims: int, in_place: bool, projected: bool) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        norm = nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d
        self.convs = nn.ModuleList([conv(16, 8, 1), conv(8, 8, 3, padding=1), conv(8, 16, 1)])
        self.norms = nn.ModuleList([norm(8), norm(8), norm(16)])
        self.act = nn.ReLU(in_place)
        self.project = conv(16, 16, 1) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
            y = self.act(norm(conv(y)))
        made: Tensor = self.act(self.norms[2](self.convs[2](y)) + self.project(x))
        return made


@pytest.mark.parametrize(
    ("dims", "in_place", "projected", "half", "stages"),
    [
        (2, False, True, False, 1),
        (3, True, True, False, 3),
        (2, False, False, False, 3),
        *deep(
            (2, False, True, False, 3),
            (2, True, False, True, 1),
            (2, True, False, True, 3),
            (3, True, True, False, 1),
            (3, False, False, True, 1),
            (3, False, False, True, 3),
            (2, False, False, False, 1),
            (2, True, True, True, 1),
            (2, True, True, True, 3),
        ),
    ],
)
def test_single_pixels_in_channels_last_equal_the_loop_to_the_bit(
    dims: int, in_place: bool, projected: bool, half: bool, stages: int
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d, nn.Conv3d][dims - 2](3, 16, 4), nn.ReLU(in_place)
    blocks = [Bottleneck(dims, in_place, projected) for _ in range(3)]
    order = torch.channels_last if dims == 2 else torch.channels_last_3d
    model = nn.Sequential(*layers, *blocks, nn.Flatten(), nn.Linear(16, 3))
    model.to(memory_format=order)  # type: ignore[call-overload]
    alone = copy.deepcopy(model)
    x = torch.randn(8, 3, *[4] * dims).contiguous(memory_format=order)
    y = torch.randn(8, 3)
    cast = torch.autocast("cpu", torch.bfloat16, half)
    with fxpipe.compile(model, stages, microbatches=2, loss=mse_loss) as pipe, cast:
        pipe.step(x, target=y)
        loop.train(alone, 2, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
