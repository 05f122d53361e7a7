"""Graphs that are made functional by rules, and those that the rules leave to PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.nn import functional as F

from fxpipe.extensions.fast_trace.rewrite import rewrite
from fxpipe.passes.tracing.trace import trace


class Model(nn.Module):
    """A function as a model with a counter and a BatchNorm."""

    count: Tensor

    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rewritten(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, list[str], list[Tensor]] | None:
    """The graph, what it writes, and its arguments."""
    program = trace(model, (x,), {}, [(0,)])
    found = rewrite(program)
    if found is None:
        return None
    state = {**dict(model.named_parameters()), **program.constants, **dict(model.named_buffers())}
    arguments = [
        x if spec.kind is InputKind.USER_INPUT else state[str(spec.target)].detach().clone()
        for spec in program.graph_signature.input_specs
    ]
    return *found, arguments


def counted(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    return x * model.count


def normalised(model: Model, x: Tensor) -> Tensor:
    return F.relu(model.norm(x * 2), inplace=True) + 1


def added_in_place(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    z = y.exp()
    y += z
    return y.mul_(z).tanh_() + z


def written_through_a_part(_: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1] * 3
    y[:, 0] = 7.0
    return y.masked_fill_(y == 7, -1.0)


def a_part_written_first(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    part = y[1:]
    part.add_(1)
    return y + y.sum()


def no_change_of_type(_: Model, x: Tensor) -> Tensor:
    y = x.to(x.dtype).contiguous() * 2
    return F.dropout(y.float(), 0.0).relu_() + y


def without_gradients(_: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * 2).abs().float()
    return x / scale


@pytest.mark.parametrize(
    "function",
    [
        counted,
        normalised,
        added_in_place,
        written_through_a_part,
        a_part_written_first,
        no_change_of_type,
        without_gradients,
    ],
    ids=lambda f: f.__name__,
)
def test_rules_keep_what_is_computed_and_written(function: Callable[..., Tensor]) -> None:
    model, x = Model(function), torch.randn(5, 4)
    found = rewritten(model, x)
    assert found is not None
    graph, targets, arguments = found
    assert not any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in graph.graph.nodes
    )
    before = [argument.clone() for argument in arguments]
    *written, made = graph(*arguments)
    assert all(map(torch.equal, arguments, before))
    old = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(made, model(x))
    new = dict(model.named_buffers())
    assert targets == [name for name in new if not torch.equal(new[name], old[name])]
    assert all(torch.equal(new[name], value) for name, value in zip(targets, written, strict=True))


def _transposed(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    y.t().add_(1)
    return y


def _view_read_later(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    view = y.view(-1)
    y.add_(1)
    return view


def _turned_by_einsum(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    torch.einsum("ij->ji", y).add_(1)
    return y


def _spread_over_a_grid(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    rows = torch.meshgrid(y[0], y[1], indexing="ij")[0]
    rows[:, :1].add_(1)
    return y


def _other_part_read_later(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    one, other = y[1:], y[:3]
    one.add_(1)
    return other + y.sum()


def _input(_: Model, x: Tensor) -> Tensor:
    return x.add_(1)


def _part_of_a_buffer(model: Model, x: Tensor) -> Tensor:
    mean = model.norm.running_mean
    assert mean is not None
    mean[1:].add_(1)
    return x * mean


def _drawn_in_place(_: Model, x: Tensor) -> Tensor:
    return (x * 2).uniform_()


def _cast(_: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T


@pytest.mark.parametrize(
    "function",
    [
        _transposed,
        _view_read_later,
        _turned_by_einsum,
        _spread_over_a_grid,
        _other_part_read_later,
        _input,
        _part_of_a_buffer,
        _drawn_in_place,
        _cast,
    ],
    ids=lambda f: f.__name__,
)
def test_what_the_rules_do_not_cover_is_left_to_pytorch(
    function: Callable[..., Tensor],
) -> None:
    assert rewritten(Model(function), torch.randn(5, 4)) is None
