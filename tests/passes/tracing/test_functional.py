"""Captured graphs are functional: nothing is written in place, and the numbers are the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.ir.traced import SEED, Literal, Traced, Value
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    run_graph,
    run_plan,
    whole,
)
from tests.helpers.profiles import some
from tests.oracles import loop


class Model(nn.Module):
    """Two layers of which one may be tied to the other, buffers, and any function over them."""

    count: Tensor
    mean: Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(4))
        self.table = torch.arange(4.0)  # neither a parameter nor a buffer
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def relu_(model: Model, x: Tensor) -> Any:
    return torch.relu_(model.layer(x)) * 2


def assigned_column(model: Model, x: Tensor) -> Any:
    y: Tensor = model.layer(x)
    y[:, 0] = x[:, 1] * 2
    y[:, 1:3] += 1
    return model.other(y)


def write_through_views(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    z = y.t()[1:].unsqueeze(0)[..., :3]
    z.mul_(3).clamp_(max=4)
    y.diagonal().zero_()
    return y * x


def write_through_hidden_views(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    torch.einsum("ij->ji", y).add_(1)
    rows = torch.meshgrid(y[0], y[1], indexing="ij")[0]
    rows[:, :1].mul_(2)
    return y * x


def masked(model: Model, x: Tensor) -> Any:
    y: Tensor = model.layer(x)
    y[y > 0] = 0.5
    y.masked_fill_(y < -1, 2.0)
    return y + model.layer(x)


def counted(model: Model, x: Tensor) -> Any:
    model.count += 1
    model.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return model.layer(x) * model.mean * model.count


def buffer_slice(model: Model, x: Tensor) -> Any:
    model.mean[1:3] = x.detach().amax()
    return model.layer(x) + model.mean


def buffer_replaced(model: Model, x: Tensor) -> Any:
    model.mean = model.mean * 2 + x.detach().sum(0)
    return model.layer(x) + model.mean


def scattered(model: Model, x: Tensor) -> Any:
    y: Tensor = model.layer(x)
    index = torch.tensor([0, 2])
    y.index_add_(1, index, x[:, :2])
    return torch.empty_like(y).copy_(y).add_(1)


def lifted(model: Model, x: Tensor) -> Any:
    y: Tensor = model.layer(x) * model.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return y


def normalised(model: Model, x: Tensor) -> Any:
    y: Tensor = nn.functional.batch_norm(model.layer(x), model.mean, model.mean + 1, training=False)
    return nn.functional.leaky_relu(y, inplace=True)


def without_gradient(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    with torch.no_grad():
        scale = (y * model.other.weight.sum()).exp()
    return y * scale


@torch.no_grad()
def _decorated(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sigmoid()


def without_gradient_by_decorator(model: Model, x: Tensor) -> Any:
    a, b = _decorated(model.layer(x))
    return a * model.other(b)


def nothing_but_no_gradient(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    with torch.no_grad():
        z = y + 1
    return z, y


def cast_without_gradient(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    with torch.no_grad():
        z = y.to(torch.float32).contiguous().sigmoid()
    return y * z


def detached(model: Model, x: Tensor) -> Any:
    y = model.layer(x)
    return y * y.detach().tanh() + model.other(y.detach())


def with_gradient_inside(model: Model, x: Tensor) -> Any:
    with torch.no_grad():
        y = model.layer(x)
    with torch.enable_grad():
        return y * model.other(x)


MODELS = [
    relu_,
    assigned_column,
    write_through_views,
    write_through_hidden_views,
    masked,
    counted,
    buffer_slice,
    buffer_replaced,
    scattered,
    lifted,
    normalised,
    without_gradient,
    without_gradient_by_decorator,
    nothing_but_no_gradient,
    cast_without_gradient,
    detached,
    with_gradient_inside,
]


def assert_functional(traced: Traced) -> None:
    """No operation's schema says that it writes, and each constant is its own argument."""
    for node in traced.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output"), node.op
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node.target
            assert not node.target._schema.name.endswith("_"), node.target
    given = {a.name for a in (*traced.parameters, *traced.buffers)} | set(traced.inputs)
    assert {n.name for n in traced.graph.nodes if n.op == "placeholder"} <= given | {SEED}


@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
def test_the_graph_is_functional_leaves_its_arguments_alone_and_computes_outputs_and_buffers(
    function: Callable[..., Any],
) -> None:
    model, x = Model(function), torch.randn(5, 4)
    traced = front_end(model, torch.randn(5, 4))
    assert_functional(traced)
    expected = Answer(model, x)
    given = copy.deepcopy(model.state_dict()), x.clone()
    output, writes = run_graph(model, traced, x)
    assert_equal(model.state_dict(), given[0])
    assert torch.equal(x, given[1])
    leaves = output if isinstance(output, tuple) else (output,)
    for here, there in zip(leaves, expected.leaves, strict=True):
        assert torch.equal(here, there)
    before = dict(model.named_buffers())
    changed = {n for n, b in expected.buffers.items() if not torch.equal(b, before[n])}
    assert changed <= set(writes)
    for name, value in writes.items():
        assert torch.equal(value, expected.buffers[name])


@pytest.mark.parametrize("function", some(MODELS), ids=lambda f: f.__name__)
def test_the_gradients_are_autograds(function: Callable[..., Any]) -> None:
    model, x = Model(function), torch.randn(5, 4)
    expected = Answer(model, x)
    traced = front_end(model, x)
    plan = differentiated(model, traced, whole(traced), x)
    ran = run_plan(model, traced, plan, x)
    assert_equal(ran.gradients, expected.gradients)


def _writes_input(model: Model, x: Tensor) -> Any:
    x.mul_(2)
    return model.layer(x)


def _writes_part_of_input(model: Model, x: Tensor) -> Any:
    x.view(-1)[0] = 1
    return model.layer(x)


@pytest.mark.parametrize("function", [_writes_input, _writes_part_of_input])
def test_a_write_into_an_input_is_refused_with_a_cure(function: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"writes into its input.*x\.clone\(\)"):
        front_end(Model(function), torch.randn(5, 4))


def test_a_copy_of_an_input_may_be_written() -> None:
    model, x = Model(lambda model, x: model.layer(x.clone().mul_(2))), torch.randn(5, 4)
    assert torch.equal(run_graph(model, front_end(model, x), x)[0], model(x))


def test_what_is_no_parameter_or_buffer_is_a_constant() -> None:
    model = Model(lifted)
    traced = front_end(model, torch.randn(5, 4))
    held = list(traced.constants.values())
    assert any(torch.equal(constant, model.table) for constant in held)
    assert any(torch.equal(constant, torch.arange(1.0, 5.0)) for constant in held)
    named = {buffer.target for buffer in traced.buffers}
    assert set(traced.constants) <= named
    assert not set(traced.constants) & set(model.state_dict())


def test_a_tied_parameter_is_one_argument() -> None:
    model = Model(lambda model, x: model.other(model.layer(x)))
    model.other.weight = model.layer.weight
    x = torch.randn(5, 4)
    traced = front_end(model, x)
    assert len(traced.parameters) == 3
    expected = Answer(model, x)
    ran = run_plan(model, traced, differentiated(model, traced, whole(traced), x), x)
    (weight,) = (name for name in ran.gradients if name.endswith("weight"))
    assert torch.equal(ran.gradients[weight], expected.gradients["layer.weight"])


def test_what_nothing_reads_is_no_argument() -> None:
    model = Model(lambda model, x, unused, flag, *, more=None: model.layer(x))
    args = (torch.randn(5, 4), torch.randn(5, 2), True)
    traced = front_end(model, *args, more=torch.randn(5))
    assert {p.target for p in traced.parameters} == {"layer.weight", "layer.bias"}
    assert not traced.buffers
    assert [name is not None for name in traced.inputs] == [True, False, False, False]
    assert sum(node.op == "placeholder" for node in traced.graph.nodes) == 3


def test_outputs_nest_as_the_models_do() -> None:
    def function(model: Model, x: Tensor) -> Any:
        y = model.layer(x)
        return {"y": y, "more": [None, 3, (y.sum(), x.shape[1])], "again": y}

    model, x = Model(function), torch.randn(5, 4)
    traced = front_end(model, x)
    output, _ = run_graph(model, traced, x)
    expected = model(x)
    assert list(output) == list(expected)
    assert torch.equal(output["y"], expected["y"])
    assert torch.equal(output["again"], expected["again"])
    assert output["more"][:2] == [None, 3]
    assert torch.equal(output["more"][2][0], expected["more"][2][0])
    assert output["more"][2][1] == 4
    kinds = [type(out) for out in traced.outputs]
    assert kinds == [Value, Literal, Literal, Value, Literal, Value]


def test_a_copy_that_the_model_returns_is_its_own() -> None:
    def function(model: Model, x: Tensor) -> Any:
        y = model.layer(x)
        return y, y.clone()

    model, x = Model(function), torch.randn(5, 4)
    (y, clone), _ = run_graph(model, front_end(model, x), x)
    assert torch.equal(y, clone)
    assert y.data_ptr() != clone.data_ptr()


@pytest.mark.parametrize(
    "function",
    [
        lambda model, y: (each := y.clone(), torch.exp(y) + torch.sin(y) * each)[1],
        lambda model, y: sum((each := y.clone(), torch.exp(each), torch.sin(each), torch.tan(y))),
    ],
)
def test_gradients_of_what_is_copied_are_added_up_in_the_order_of_the_model(
    function: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    model = Model(lambda model, x: function(model, torch.sigmoid(model.layer(x))))
    alone, x = copy.deepcopy(model), torch.randn(64, 4)

    def loss(y: Tensor) -> Tensor:
        return y.square().mean()

    with fxpipe.compile(model, 2, microbatches=2, loss=loss) as pipe:
        pipe.step(x)
    loop.train(alone, 2, x, loss=loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_every_node_that_computes_knows_its_line() -> None:
    model = Model(write_through_views)
    traced = front_end(model, torch.randn(5, 4))
    from fxpipe.torchtools import source

    lines = [source.of_node(n) for n in traced.graph.nodes if n.op == "call_function"]
    assert sum(__file__ in line for line in lines) > len(lines) / 2


def test_an_input_written_to_a_buffer_and_a_buffer_returned_are_values() -> None:
    def function(model: Model, x: Tensor) -> Any:
        model.mean.copy_(x[0].detach())
        model.count = x.detach()
        return model.layer(x), model.extra, model.extra

    model, x = Model(function), torch.randn(5, 4)
    model.register_buffer("extra", torch.randn(3))
    model.count = torch.zeros(5, 4)
    traced = front_end(model, x)
    output, writes = run_graph(model, traced, x)
    assert torch.equal(output[1], model.get_buffer("extra"))
    assert torch.equal(output[2], model.get_buffer("extra"))
    assert_equal(writes, {"mean": x[0], "count": x})
    plan = differentiated(model, traced, whole(traced), x)
    assert_equal(run_plan(model, traced, plan, x).state, writes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4)])
def test_gradients_flow_through_a_copy_into_other_shapes_and_types(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def function(model: Model, x: Tensor) -> Any:
        y = torch.zeros(*shape, dtype=dtype).t() if len(shape) == 2 else torch.zeros(shape)
        y = y.transpose(0, 1) if len(shape) == 2 else y
        return y.copy_(model.layer(x)) * 2

    model, x = Model(function), torch.randn(5, 4)
    expected = Answer(model, x)
    traced = front_end(model, x)
    ran = run_plan(model, traced, differentiated(model, traced, whole(traced), x), x)
    assert_equal(ran.gradients, expected.gradients)


def test_a_buffer_that_the_model_replaces_is_trained_as_one_that_it_writes() -> None:
    model, x = Model(buffer_replaced), torch.randn(6, 4)
    alone = copy.deepcopy(model)
    buffer = model.mean
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=lambda y: y.mean()) as pipe:
        for _ in range(2):
            pipe.step(x)
            for part in x.tensor_split(2):
                alone(part)
        assert model.mean is buffer
        assert torch.equal(buffer, alone.mean)
