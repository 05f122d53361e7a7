"""Modules of torch.nn are called as they are, and nothing between them works in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrize

import fxpipe
from examples.unet import UNet
from fxpipe.errors import TraceError
from fxpipe.extensions.symbolic.trace import trace_symbolically
from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.partition.atoms import Footprint, atoms_of
from fxpipe.passes.partition.measure import NodeCost
from tests.extensions.model_check.test_check import Backwards
from tests.oracles import loop


def trained_alike(
    model: nn.Module,
    inputs: Callable[[int], Tensor],
    partition: list[str],
    target: Any,
    extensions: Sequence[Any] = (),
) -> None:
    """Two steps of a pipeline over leaf modules, and of the plain loop, have the same bits."""
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * (len(partition) + 1),
        microbatches=2,
        loss=mse_loss,
        partition=partition,
        extensions=["symbolic", *extensions],
    ) as pipe:
        for batch in (4, 5):
            x = inputs(batch)
            loop.clear(model, alone)
            loss = pipe.step(x, target=target(x))
            assert torch.equal(loss, loop.train(alone, 2, x, loss=mse_loss, target=target(x)).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
            loop.assert_same(model.state_dict(), alone.state_dict())


def rows(batch: int) -> Tensor:
    return torch.randn(batch, 4)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def symbolic(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    return trace_symbolically(model, args, kwargs)


def outputs(model: nn.Module, traced: Traced, *args: Any) -> Any:
    del model
    return traced.module(*args)


@pytest.mark.smoke
def test_a_u_net_of_leaves_equals_the_loop() -> None:
    torch.manual_seed(0)
    trained_alike(
        UNet(channels=2, base=2, depth=2),
        lambda n: torch.randn(n, 2, 8, 8),
        ["downs.1", "widens.1"],
        zeros,
    )


def _branch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3 if output.sum() > 0 else -output


def _backwards(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    result: Tensor = Backwards.apply(output)  # type: ignore[no-untyped-call]
    return result


class Absolute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs() if x.sum() > 0 else x - 1


class Branching(nn.Linear):
    """A layer whose control flow depends on its values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y - 1


Branching.__module__ = "torch.nn.modules.branching"  # what makes a module a leaf


@pytest.mark.smoke
@pytest.mark.parametrize("hook", [_branch, _backwards])
def test_hooks_of_leaves_run_with_branches_and_gradients_of_their_own(hook: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[1].register_forward_hook(hook)
    trained_alike(model, rows, ["2"], zeros)


def test_control_flow_inside_a_leaf_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Branching(4, 4), nn.Linear(4, 4))
    traced = symbolic(model, rows(3))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    trained_alike(model, rows, ["2"], zeros)


def test_control_flow_inside_a_parametrised_layer_works() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Absolute())
    trained_alike(nn.Sequential(nn.Linear(4, 4), layer), rows, ["1"], zeros)


class Between(nn.Module):
    """Leaves with any function between them."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        z = self.function(y, self.act(y * 1))
        return self.last(z) + z


def _adds(y: Tensor, z: Tensor) -> Tensor:
    y += z
    y *= 2
    return y


def _methods(y: Tensor, z: Tensor) -> Tensor:
    return y.add_(z).mul_(2).tanh_()


def _functions(y: Tensor, z: Tensor) -> Tensor:
    z = functional.relu(y, inplace=True) + functional.leaky_relu(z * 1, 0.1, inplace=True)
    return torch.relu_(z)


@pytest.mark.parametrize("function", [_adds, _methods, _functions])
def test_what_works_in_place_between_leaves_makes_new_values(
    function: Callable[[Tensor, Tensor], Any],
) -> None:
    torch.manual_seed(0)
    trained_alike(Between(function), rows, ["last"], zeros)


def test_a_value_changed_in_place_is_read_as_it_was_then() -> None:
    def function(y: Tensor, z: Tensor) -> Tensor:
        early = y * 1
        y.add_(1)
        return early + y

    model, x = Between(function).requires_grad_(False), rows(3)
    traced = symbolic(model, x)
    expected = copy.deepcopy(model)(x)
    for _ in range(2):
        (found,) = outputs(model, traced, x)
        assert torch.equal(found, expected)


def test_a_module_in_place_gets_a_copy() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = rows(3)
    before = x.clone()
    traced = symbolic(model, x)
    outputs(model, traced, x)
    assert torch.equal(x, before)


def _assigns(y: Tensor, z: Tensor) -> Tensor:
    y[:, 0] = 1  # writes a column
    return y


def _through_view(y: Tensor, z: Tensor) -> Tensor:
    y.view(-1).add_(1)  # writes a view
    return y


def _through_turned_view(y: Tensor, z: Tensor) -> Tensor:
    y.movedim(0, 1).add_(1)  # writes a turned view
    return y


def _copies(y: Tensor, z: Tensor) -> Tensor:
    return y.copy_(z)  # writes a copy


def _branches(y: Tensor, z: Tensor) -> Tensor:
    return y if y.sum() > 0 else z  # takes a branch


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("function", "line"),
    [
        (_assigns, "writes a column"),
        (_through_view, "writes a view"),
        (_through_turned_view, "writes a turned view"),
        (_copies, "writes a copy"),
        (_branches, "takes a branch"),
    ],
)
def test_refusals_name_the_line_and_a_cure(
    function: Callable[[Tensor, Tensor], Any], line: str
) -> None:
    with pytest.raises(TraceError, match=r"leave out fxpipe.Symbolic|fxpipe.LeafModules") as caught:
        symbolic(Between(function), rows(3))
    assert line in str(caught.value)
    assert __file__ in str(caught.value)


@pytest.mark.parametrize("name", ["nested", "variadic"])
def test_inputs_that_are_no_tensor_of_their_own_are_refused(name: str) -> None:
    class Takes(nn.Module):
        def forward(self, nested: Any, *variadic: Any) -> Any:
            return nested

    args = ([rows(3)],) if name == "nested" else (rows(3), rows(3))
    with pytest.raises(TraceError, match=name if name == "nested" else "one by one"):
        trace_symbolically(Takes(), args, {})


def test_training_and_evaluation_follow_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    alone = copy.deepcopy(model)
    x = rows(6)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, extensions=["symbolic"]) as pipe:
        pipe.eval()
        alone.eval()
        with torch.no_grad():
            before = copy.deepcopy(model.state_dict())
            assert torch.equal(pipe(x), torch.cat([alone(part) for part in x.tensor_split(2)]))
            loop.assert_same(model.state_dict(), before)
        pipe.train()
        assert (pipe(x) == 0).any()
        assert int(model.state_dict()["1.num_batches_tracked"]) == 2


def test_tracing_changes_no_buffer_that_the_caller_keeps() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    traced = symbolic(model, rows(3))
    assert {write.target for write in traced.writes} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    assert not symbolic(model.eval(), rows(3)).writes
    assert [type(out) for out in traced.outputs] == [Value]
    assert {a.target for a in traced.parameters} == {n for n, _ in model.named_parameters()}


def test_constants_of_a_call_are_traced_as_they_are() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0, *, twice: bool = False) -> Tensor:
            y: Tensor = self.layer(x) * scale
            return y + y if twice else y

    model, x = Scaled(), rows(3)
    traced = symbolic(model, x, 3.0, twice=True)
    assert [name is not None for name in traced.inputs] == [True, False, False]
    names = [n.target for n in traced.graph.nodes if n.op == "placeholder"]
    args = [x if name == "x" else None for name in names]
    assert torch.equal(traced.module(*args)[0], model(x, 3.0, twice=True))


def test_a_leaf_called_for_its_statistics_alone_is_called() -> None:
    class Watches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watch = nn.BatchNorm1d(4)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            self.watch(y)
            return y

    trained_alike(Watches(), rows, ["watch"], zeros)


class Pair(NamedTuple):
    first: Tensor
    rest: tuple[Tensor, ...]


@dataclass
class Seen:
    last: Tensor
    hidden: list[Tensor]
    note: str = "none"


class Returns(nn.Module):
    """Returns what a function makes of the last value, the hidden one and the input."""

    def __init__(self, made: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.outer, self.made = nn.Linear(4, 4), nn.Linear(4, 4), made

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x)
        return self.made(self.outer(hidden), hidden, x)


def returned(
    made: Callable[..., Any], loss: Callable[[Any], Tensor], x: Tensor
) -> tuple[Any, list[Any]]:
    """What a pipe over ``Returns(made)`` returns, and what the model returns of each micro-batch;
    after a step whose gradients are those of the loop."""
    torch.manual_seed(0)
    model = Returns(made)
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model, 2, microbatches=2, loss=loss, partition=["outer"], extensions=["symbolic"]
    ) as pipe:
        pipe.step(x)
        loop.train(alone, 2, x, loss=loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        with torch.no_grad():
            return pipe(x), [alone(part) for part in x.chunk(2)]


@pytest.mark.parametrize(
    ("made", "tensors"),
    [
        (lambda y, h, x: Pair(y, (h, x)), lambda out: [out.first, *out.rest]),
        (lambda y, h, x: Seen(y, [h, x]), lambda out: [out.last, *out.hidden]),
        (lambda y, h, x: {"seen": Seen(y, [h]), "x": x}, lambda out: [out["seen"].last, out["x"]]),
    ],
    ids=["named tuple", "dataclass", "nested"],
)
def test_named_tuples_and_dataclasses_are_returned_as_by_the_model(
    made: Callable[..., Any], tensors: Callable[[Any], list[Tensor]]
) -> None:
    def loss(output: Any) -> Tensor:
        return torch.stack([tensor.square().mean() for tensor in tensors(output)]).sum()

    found, wanted = returned(made, loss, torch.randn(4, 4))
    assert type(found) is type(wanted[0])
    for own, *parts in zip(tensors(found), *map(tensors, wanted), strict=True):
        assert torch.equal(own, torch.cat(parts))


class Optional(nn.Module):
    """Branches on what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, by: float = 2.0, plain: bool = False
    ) -> Any:
        hidden = self.inner(x)
        hidden = hidden * by if scale is None else hidden * scale
        return self.outer(hidden if plain else hidden.relu())


@pytest.mark.parametrize(
    "given", [{}, {"scale": torch.full((4, 4), 3.0)}, {"plain": True}, {"by": 3.0, "plain": True}]
)
def test_what_is_not_given_has_its_default(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, target = Optional(), torch.randn(4, 4), torch.randn(4, 4)
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model, 2, microbatches=2, loss=mse_loss, partition=["outer"], extensions=["symbolic"]
    ) as pipe:
        loss = pipe.step(x, target=target, **given)
    wanted = loop.train(alone, 2, x, loss=mse_loss, target=target, **given)
    assert torch.equal(loss, wanted.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_graph_is_for_any_size_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    options: Any = {"loss": mse_loss, "extensions": [fxpipe.Symbolic()]}
    with fxpipe.compile(model, 2, microbatches=4, **options) as pipe:
        for count in (8, 12, 7):
            pipe.step(rows(count), target=rows(count))
        assert len(pipe._compiler.plans.graphs) == 1


def test_a_copy_stays_with_the_module_that_may_work_on_it_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    traced = symbolic(model, rows(2))
    costs = {node.name: NodeCost(0.0, 0.0, 0) for node in traced.graph.nodes}
    atoms = atoms_of(traced, costs, Footprint()).nodes
    assert [[node.target for node in nodes] for nodes in atoms] == [["0"], ["clone", "1"], ["2"]]
