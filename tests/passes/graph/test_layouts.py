"""Tensors without data lie as those with data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.passes.graph.layouts import TrueLayouts
from tests.oracles import loop

aten = torch.ops.aten


def batch_norm(x: Tensor, y: Tensor) -> Any:
    ones = torch.ones(x.shape[1])
    return aten._native_batch_norm_legit_functional(x, ones, ones, ones, ones, True, 0.1, 1e-5)


def batch_norm_backward(x: Tensor, y: Tensor) -> Any:
    ones = torch.ones(x.shape[1])
    rest = ones, ones, ones, ones, ones, True, 1e-5, [True, True, True]
    return aten.native_batch_norm_backward(y, x, *rest)


OPERATIONS: list[Callable[[Tensor, Tensor], Any]] = [
    batch_norm,
    batch_norm_backward,
    lambda x, y: x + y,
    lambda x, y: x * 2.0,
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: functional.gelu(x),
    lambda x, y: aten.threshold_backward(x, y, 0.0),
    lambda x, y: x.softmax(1),
    lambda x, y: torch.cat([x, y], 1),
    lambda x, y: functional.layer_norm(x, x.shape[-1:]),
    lambda x, y: functional.group_norm(x, 1),
    lambda x, y: x.sum(1, keepdim=True),
    lambda x, y: x.flip(0),
    lambda x, y: aten.mse_loss_backward(torch.ones(()), x, y, 1),
    lambda x, y: aten.smooth_l1_loss_backward(torch.ones(()), x, y, 1, 1.0),
    lambda x, y: aten.huber_loss_backward(torch.ones(()), x, y, 1, 1.0),
    lambda x, y: functional.binary_cross_entropy(x, y, reduction="none"),
    lambda x, y: aten.binary_cross_entropy_backward(x, x, y),
    lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
    lambda x, y: aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    lambda x, y: aten.hardtanh_backward(x, y, -1.0, 1.0),
    lambda x, y: aten.hardsigmoid_backward(x, y),
    lambda x, y: aten.hardswish_backward(x, y),
    lambda x, y: aten.logit_backward(x, y, 0.1),
    lambda x, y: aten.log_sigmoid_forward(x),
    lambda x, y: aten._log_softmax_backward_data(x, y, 1, torch.float32),
    lambda x, y: aten._weight_norm_interface(x, y.amax([*range(1, y.dim())], True)),
    lambda x, y: functional.channel_shuffle(x, 1) if x.dim() > 2 else x,
    lambda x, y: torch.copysign(x, y),
    lambda x, y: torch.floor_divide(x, y),
    lambda x, y: torch.xlogy(x, y),
    lambda x, y: torch.special.xlog1py(x, y),
    lambda x, y: torch.pow(2, x),
]


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, which lie in some order of their dimensions."""
    shape = [draw(st.integers(2, 3)), *draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]

    def made() -> Tensor:
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(dim) for dim in range(len(shape))]
        return torch.zeros([shape[dim] for dim in order]).permute(back)

    return made(), made()


@given(shuffled(), st.sampled_from(OPERATIONS))
def test_results_without_data_have_the_strides_of_real_ones(
    pair: tuple[Tensor, Tensor], operation: Callable[[Tensor, Tensor], Any]
) -> None:
    real = operation(*pair)
    with FakeTensorMode() as mode, TrueLayouts():  # type: ignore[no-untyped-call]
        made = operation(*map(mode.from_tensor, pair))
    for ours, theirs in zip(pytree.tree_leaves(made), pytree.tree_leaves(real), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()


def test_a_batch_norm_whose_input_needs_no_gradient_has_those_of_its_parameters() -> None:
    with FakeTensorMode(), TrueLayouts():  # type: ignore[no-untyped-call]
        x, ones = torch.ones(4, 5).t(), torch.ones(4)
        made = aten.native_batch_norm_backward(
            x, x, ones, None, None, ones, ones, True, 1e-5, [False, True, True]
        )
    assert [gradient.shape for gradient in made[1:]] == [(4,), (4,)]


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


@given(shuffled())
def test_sizes_of_one_lie_as_they_do_with_data_where_a_tensor_is_viewed(
    pair: tuple[Tensor, Tensor],
) -> None:
    real = pair[0][:1]
    shapes = [1, *real.shape], [*real.shape, 1], [*real.shape[:-1], 1, real.shape[-1]]
    strides = [real.view(shape).stride() for shape in shapes]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        with TrueLayouts():  # type: ignore[no-untyped-call]
            views = [fake.view(shape) for shape in shapes]
    assert [view.stride() for view in views] == strides
    assert {view.untyped_storage()._cdata for view in views} == {fake.untyped_storage()._cdata}


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
}


@pytest.mark.parametrize(
    ("name", "stages"),
    [*((name, 3) for name in MODELS), *((name, 1) for name in MODELS if "written" in name)],
)
def test_models_whose_values_lie_in_other_orders_equal_the_loop(name: str, stages: int) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, stages, microbatches=2, loss=mse_loss) as pipe:
        for rows in (2, 4, 7):
            x = torch.randn(rows, *shape)
            y = torch.randn(rows, 16 if name == "one image a micro-batch" else shape[0], 3)
            pipe.step(x, target=y)
            loop.train(alone, 2, x, loss=mse_loss, target=y)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        loop.assert_same(model.state_dict(), alone.state_dict())
        model.eval()
        alone.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([alone(part) for part in x.tensor_split(2)]))
