"""A result known from equal operands is what PyTorch derives for these operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.fast_trace.known_results import KnownResults
from fxpipe.torchtools.pytrees import memory

aten = torch.ops.aten


def _look(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


CALLS: dict[str, Callable[[Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "a new tensor": lambda x: (aten.mm.default, (x, x.t()), {}),
    "in another type": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.float64}),
    "a view": lambda x: (aten.transpose.int, (x, 0, 1), {}),
    "a view with an offset": lambda x: (aten.slice.Tensor, (x, 0, 1, 3), {}),
    "several": lambda x: (aten.native_layer_norm.default, (x, [5], None, None, 1e-5), {}),
    "several views": lambda x: (aten.split.Tensor, (x, 2), {}),
    "strides of the operand": lambda x: (aten.relu.default, (x.t(),), {}),
    "without operands": lambda x: (aten.ones.default, ([2, 3],), {}),
    "one left out": lambda x: (
        aten.native_layer_norm_backward.default,
        (x, x, [5], x[:, :1], x[:, :1], None, None, [True, False, False]),
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_time_the_result_is_as_pytorch_derives_it(name: str) -> None:
    known = KnownResults()
    with FakeTensorMode():
        for _ in range(3):
            x = torch.empty(4, 5)
            func, args, kwargs = CALLS[name](x)
            results = _flat(known.result(func, args, kwargs))
            expected = _flat(func(*args, **kwargs))
            assert [*map(_look, results)] == [*map(_look, expected)]
            shared = [isinstance(r, Tensor) and memory(r) == memory(x) for r in results]
            alike = [isinstance(r, Tensor) and memory(r) == memory(x) for r in expected]
            assert shared == alike


def test_results_of_equal_operands_have_memory_of_their_own() -> None:
    known = KnownResults()
    with FakeTensorMode():
        x = torch.empty(4, 4)
        results = [known.result(aten.relu.default, (x,), {}) for _ in range(3)]
    assert len(known) == 1
    assert len({memory(result) for result in results}) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x, 1.0),
        lambda x: (x, True),
        lambda x: (x.t(), 1),
        lambda x: (x.double(), 1),
        lambda x: (x[:1], 1),
    ],
    ids=["a float", "a bool", "strides", "a type", "a shape"],
)
def test_operands_that_differ_in_anything_are_told_apart(
    other: Callable[[Tensor], tuple[Any, ...]],
) -> None:
    known = KnownResults()
    with FakeTensorMode():
        x = torch.empty(4, 5, dtype=torch.int64)
        known.result(aten.mul.Tensor, (x, 1), {})
        args = other(x)
        result = known.result(aten.mul.Tensor, args, {})
        assert _look(result) == _look(aten.mul.Tensor(*args))


def test_results_whose_shapes_depend_on_data_are_never_known() -> None:
    known = KnownResults()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(4)
        sparse = mode.from_tensor(torch.eye(3).to_sparse())
        for _ in range(2):
            known.result(aten.view.dtype, (x, torch.int32), {})
            known.result(aten._values.default, (sparse.coalesce(),), {})
    assert len(known) == 1  # the view


def test_under_other_settings_other_results_are_known() -> None:
    usual = KnownResults.shared()
    assert KnownResults.shared() is usual
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with FakeTensorMode():
            x = torch.empty(3, dtype=torch.int64)
            assert KnownResults.shared() is not usual
            assert KnownResults.shared().result(aten.sqrt.default, (x,), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)
    with FakeTensorMode():
        x = torch.empty(3, dtype=torch.int64)
        assert usual.result(aten.sqrt.default, (x,), {}).dtype is torch.float32


@pytest.mark.traces
def test_a_deeper_model_of_equal_layers_derives_nothing_more() -> None:
    derived = []
    x = torch.randn(8, 4)
    for layers in (3, 9):
        KnownResults._by_settings.clear()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)))
        with fxpipe.compile(model, ["cpu"], microbatches=2, loss=mse_loss) as pipe:
            pipe.step(x, target=x)
        derived.append(len(KnownResults.shared()))
    assert 0 < derived[0] == derived[1]
