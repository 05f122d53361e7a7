"""Explicit forward and backward graphs: autograd's gradients to the bit, fresh, and lean."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from examples.unet import UNet
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import ORIGIN, Traced, Value
from fxpipe.kernels.graph import GraphKernel
from fxpipe.torchtools import source
from tests.helpers.exported import Recurrent, Sliced
from tests.helpers.fronted import (
    Answer,
    assert_equal,
    differentiated,
    front_end,
    in_stages,
    run_plan,
    seed_like,
    values_of,
    whole,
)
from tests.helpers.profiles import deep, some


class Model(nn.Module):
    hann: Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(7, 4)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("hann", torch.hann_window(4))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def rows() -> tuple[Any, ...]:
    return (torch.randn(3, 4, requires_grad=True),)


def indices() -> tuple[Any, ...]:
    return torch.randint(7, (3, 5)), torch.randn(3, 4, requires_grad=True)


def _views(m: Model, x: Tensor) -> Any:
    y = m.layer(x)
    return y.t(), y[:, 1:], y.reshape(-1)[::2], y


def _arguments(m: Model, x: Tensor) -> Any:
    return m.layer(x), x, m.scale, m.scale[1:]


def _several(m: Model, x: Tensor) -> Any:
    y = m.layer(x)
    z = y.tanh()
    return z * y + m.other(y) + m.other(z) * y.sum() + x


def _broadcast(m: Model, x: Tensor) -> Any:
    return m.layer(x)[:, None] * m.scale[:, None] + m.mean + x.sum(1)[:, None, None]


def _expanded(m: Model, x: Tensor) -> Any:
    y = m.layer(x)
    return m.scale.expand(2, 3, 4) * y, y.sum().expand(3, 4), y.mean(1, keepdim=True).expand(3, 5)


def _strided(m: Model, x: Tensor) -> Any:
    return m.layer(x).as_strided((3, 2, 2), (4, 2, 1)).unfold(0, 2, 1).exp(), x.t().contiguous()


def _integers(m: Model, index: Tensor, x: Tensor) -> Any:
    found = m.table(index)
    return found.sum(1) * m.layer(x), index + 1, (x > 0), m.table.weight[index[:, 0]]


def _some(m: Model, x: Tensor) -> Any:
    y = m.layer(x)
    return y.detach(), (y > 0).sum(), y.argmax(1), m.other(x.detach())


def _shared_parts(m: Model, x: Tensor) -> Any:
    a, b = m.layer(x).chunk(2, 1)
    c, d = m.other.weight.unbind(0)[:2]
    return a * b, a + c[:2], torch.stack([c, d]), torch.cat([x, x, a], 1)


def _identity_gradients(m: Model, x: Tensor) -> Any:
    return x + m.scale, (m.scale + m.layer.bias) + x, m.other.bias


def _reductions(m: Model, x: Tensor) -> Any:
    y = m.layer(x)
    return y.max(0).values, y.var(1), y.softmax(1).prod(1), y.norm(), torch.logsumexp(y, 0)


def _sorted(m: Model, x: Tensor) -> Any:
    return m.layer(x).sort(1).values, m.layer(x).topk(2).values, m.layer(x).cumsum(0)


def _spectra(m: Model, x: Tensor) -> Any:
    spectra = torch.stft(m.layer(x), 4, 2, window=m.hann, return_complex=True)
    return torch.istft(spectra * m.scale[:3, None], 4, 2, window=m.hann, length=4), spectra.abs()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "convolutions": (
        lambda: UNet(channels=2, base=2, depth=2),
        lambda: (torch.randn(3, 2, 8, 8, requires_grad=True),),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: (torch.randn(3, 5, 8, requires_grad=True),),
    ),
    "lstm": (lambda: Recurrent().eval(), lambda: (torch.randn(3, 5, 3, requires_grad=True),)),
    # of a width that vector kernels take whole: it computes in place on parts of a tensor
    "gru": (lambda: nn.GRUCell(4, 32), lambda: (torch.randn(3, 4), torch.randn(3, 32))),
    "slices": (Sliced, lambda: (torch.randint(10, (3, 6)),)),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.GELU()),
        lambda: (torch.randn(3, 4, 6, requires_grad=True),),
    ),
    **{
        function.__name__.strip("_").replace("_", " "): (
            lambda function=function: Model(function),  # type: ignore[misc]
            arguments,
        )
        for function, arguments in (
            (_views, rows),
            (_arguments, rows),
            (_several, rows),
            (_broadcast, rows),
            (_expanded, rows),
            (_strided, rows),
            (_integers, indices),
            (_some, rows),
            (_shared_parts, rows),
            (_identity_gradients, rows),
            (_reductions, rows),
            (_sorted, rows),
            (_spectra, rows),
        )
    },
}

cases = pytest.mark.parametrize("name", CASES)
some_cases = pytest.mark.parametrize("name", some(CASES))


@functools.cache
def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Traced]:
    torch.manual_seed(1)
    factory, arguments = CASES[name]
    model, args = factory(), arguments()
    return model, args, front_end(model, *args)


@cases
@pytest.mark.parametrize("stages", [*deep(1), 3])
def test_graphs_equal_autograd_to_the_bit(name: str, stages: int) -> None:
    model, args, traced = made(name)
    expected = Answer(model, *args)
    plan = differentiated(model, traced, in_stages(traced, stages), *args, inputs=True)
    ran = run_plan(model, traced, plan, *args)
    values = {**values_of(traced, *args), **state_by_name(model, traced), **ran.values}
    names = [out.name for out in traced.outputs if isinstance(out, Value)]
    for name_, there in zip(names, expected.leaves, strict=True):
        assert torch.equal(values[name_], there), name_
    for target, gradient in ran.gradients.items():
        if stages == 1:
            assert torch.equal(gradient, expected.gradients[target]), target
        else:
            torch.testing.assert_close(gradient, expected.gradients[target])
    # autograd gives None where a graph may give zeros, and no more than that
    assert set(ran.gradients) == set(expected.gradients)
    assert_equal(ran.state, {w.target: expected.buffers[w.target] for w in traced.writes})


@functools.cache
def in_one(name: str) -> Plan:
    """The case as a single stage, with all gradients."""
    model, args, traced = made(name)
    return differentiated(model, traced, whole(traced), *args, inputs=True)


def state_by_name(model: nn.Module, traced: Traced) -> dict[str, Tensor]:
    state = traced.state_of(model)
    return {a.name: state[a.target] for a in (*traced.parameters, *traced.buffers)}


def parts(
    model: nn.Module, traced: Traced, plan: Plan, args: tuple[Any, ...]
) -> tuple[GraphKernel, list[Tensor], list[Tensor], list[Any], list[Tensor]]:
    """A single stage's kernel, with parameters, buffers, inputs and gradients to call it with."""
    (stage,) = plan.stages
    assert isinstance(stage.kernel, GraphKernel)
    state, values = traced.state_of(model), values_of(traced, *args)
    gradients = [
        seed_like(torch.empty(plan.specs[e.value].shape, dtype=plan.specs[e.value].dtype))
        for e in plan.gradients_into(0)
    ]
    return (
        stage.kernel,
        [state[a.target].detach() for a in stage.parameters],
        [state[a.target] for a in stage.buffers],
        [v.detach() if isinstance(v := values[e.value], Tensor) else v for e in plan.edges_into(0)],
        gradients,
    )


@some_cases
def test_gradients_of_inputs_are_autograds(name: str) -> None:
    model, args, traced = made(name)
    expected = Answer(model, *args).inputs
    plan = in_one(name)
    kernel, parameters, buffers, inputs, gradients = parts(model, traced, plan, args)
    result = kernel.forward(parameters, buffers, inputs)
    found = kernel.backward(result.saved, gradients).inputs
    carried = [e.value for e in plan.gradients_from(0)]
    wanted = [n for n, x in zip(traced.inputs, args, strict=True) if n and x.requires_grad]
    assert len(found) == len(carried)
    ours = dict(zip(carried, found, strict=True))
    loose = {out.name for out in traced.outputs if isinstance(out, Value)}
    for name_, there in zip(wanted, expected, strict=True):
        if name_ in loose:
            continue  # an input that is returned: its gradient is the caller's to add
        assert there is None or torch.equal(ours[name_], there)


@some_cases
def test_parameter_gradients_are_memory_of_their_own(name: str) -> None:
    model, args, traced = made(name)
    plan = in_one(name)
    kernel, parameters, buffers, inputs, gradients = parts(model, traced, plan, args)
    result = kernel.forward(parameters, buffers, list(inputs))
    back = kernel.backward(list(result.saved), list(gradients))
    others = [*parameters, *buffers, *inputs, *gradients, *result.saved, *result.outputs]
    others += [*result.writes, *back.inputs]
    found = [gradient for gradient in back.parameters if gradient is not None]
    before = [x.clone() if isinstance(x, Tensor) else x for x in (*others, *found)]
    for index, gradient in enumerate(found):
        gradient.add_(1)
        now = [*others, *(g for i, g in enumerate(found) if i != index)]
        then = [x for i, x in enumerate(before) if i != len(others) + index]
        for here, there in zip(now, then, strict=True):
            assert not isinstance(here, Tensor) or torch.equal(
                here.nan_to_num() if here.is_floating_point() else here,
                there.nan_to_num() if there.is_floating_point() else there,
            )
        gradient.copy_(before[len(others) + index])


@some_cases
def test_arguments_are_emptied(name: str) -> None:
    model, args, traced = made(name)
    plan = in_one(name)
    kernel, parameters, buffers, inputs, gradients = parts(model, traced, plan, args)
    result = kernel.forward(parameters, buffers, inputs)
    assert inputs == []
    kernel.backward(result.saved, gradients)
    assert result.saved == []
    assert gradients == []


@some_cases
def test_generated_code_looks_up_no_operator_and_gives_what_the_graph_says(name: str) -> None:
    model, args, traced = made(name)
    kernel, parameters, buffers, inputs, _ = parts(model, traced, in_one(name), args)
    graph = kernel.forward_graph
    assert "torch.ops.aten." not in graph.code
    with torch.no_grad():
        wanted = fx.Interpreter(graph).boxed_run([*parameters, *buffers, *inputs])
        found = graph.forward([*parameters, *buffers, *inputs])
    count = kernel.outputs + kernel.writes  # what is saved may be an LSTM's scratch memory
    torch.testing.assert_close(list(found)[:count], list(wanted)[:count], rtol=0, atol=0)


def test_nothing_is_transposed_and_back() -> None:
    plan = in_one("transformer")
    for graph in (plan.stages[0].forward, plan.stages[0].backward):
        assert graph is not None
        turned = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
        assert turned
        assert not any(source in turned for node in turned for source in node.all_input_nodes)


@some_cases
def test_no_copy_of_a_parameter_is_saved(name: str) -> None:
    model, args, traced = made(name)
    plan = in_one(name)
    kernel, parameters, buffers, inputs, _ = parts(model, traced, plan, args)
    result = kernel.forward(parameters, buffers, inputs)
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    for saved in result.saved:
        if isinstance(saved, Tensor) and saved.untyped_storage().data_ptr() not in storages:
            assert not any(p.dim() > 1 and torch.equal(saved, p) for p in parameters)
            assert not any(
                p.dim() == 2 and p.shape[0] != p.shape[1] and torch.equal(saved, p.t())
                for p in parameters
            )


@some_cases
def test_gradients_that_lie_otherwise_give_the_same(name: str) -> None:
    model, args, traced = made(name)
    plan = in_one(name)
    kernel, parameters, buffers, inputs, gradients = parts(model, traced, plan, args)

    def run(inputs: list[Any], gradients: list[Tensor]) -> list[Any]:
        result = kernel.forward(parameters, buffers, inputs)
        back = kernel.backward(list(result.saved), gradients)
        return [*result.outputs, *back.inputs, *back.parameters]

    plain = run(list(inputs), list(gradients))
    other = run([otherwise(x) for x in inputs], [otherwise(g) for g in gradients])
    for here, there in zip(other, plain, strict=True):
        if isinstance(there, Tensor):
            assert torch.equal(here, there)
        else:
            assert here is there or here == there


def otherwise(x: Any) -> Any:
    """The same tensor with its strides reversed."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


@some_cases
def test_every_backward_node_knows_where_it_comes_from(name: str) -> None:
    _, _, traced = made(name)
    plan = in_one(name)
    (stage,) = plan.stages
    assert stage.backward is not None
    names = {node.name for node in traced.graph.nodes}
    for node in stage.backward.graph.nodes:
        if node.op == "call_function":
            origin = node.meta.get("custom", {}).get(ORIGIN)
            # an argument that the model returns as it is has no line
            assert (
                origin in names
                or source.of_node(node)
                or name == "identity gradients"
                or "view" in node.name
            )


def test_the_model_keeps_no_gradient_and_no_state_of_all_this() -> None:
    model, args, traced = made("convolutions")
    before = copy.deepcopy(model.state_dict())
    differentiated(model, traced, in_stages(traced, 3), *args)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal(model.state_dict(), before)
    assert not any(isinstance(x, Tensor) and x.grad is not None for x in pytree.tree_leaves(args))
