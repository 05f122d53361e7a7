"""Leaf modules are called as they are, in every step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe
from fxpipe.compiler.leaf_modules import calls as leaf_calls
from fxpipe.errors import TraceError
from fxpipe.ir.called import calls_in
from tests.helpers.profiles import DEEP
from tests.oracles import loop


class Branching(nn.Module):
    """Does one thing or another, as its values are; counts its calls."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # a new tensor, while the norm writes its own in place
        positive = bool(self.layer(x).sum() > 0)  # reads values
        self.seen.append(positive)  # changes Python state
        y: Tensor = self.norm(x if positive else -2 * self.layer(x))
        return y


class Both(Branching):
    """Takes and returns nests."""

    def forward(self, given: Any, *, scale: float = 1.0) -> Any:
        y = super().forward(given["x"])
        return {"all": (y * scale, None), "last": given["rest"][0] + y}


class Net(nn.Module):
    """A leaf between layers, of which one has statistics and another a weight in common."""

    shift: Tensor
    counted: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.leaf: nn.Module = Branching(width)
        self.middle = nn.Linear(width, width)
        self.both = Both(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.middle.weight
        self.register_buffer("shift", torch.ones(width))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x))) + self.shift
        self.counted += 1
        z = self.middle(self.leaf(y))
        made = self.both({"x": z, "rest": [y, None]}, scale=0.5)
        out: Tensor = self.last(made["all"][0] * made["last"]) + torch.arange(4.0)
        return out


def train_both(
    model: nn.Module,
    partition: Any,
    leaves: Any,
    extensions: Any = (),
    sizes: Sequence[int] = (8, 9),
) -> nn.Module:
    """Two steps of the pipeline and the loop; the second with uneven micro-batches."""
    alone = copy.deepcopy(model)
    stages = 2 if partition == "auto" else len(partition) + 1
    with fxpipe.compile(
        model,
        ["cpu"] * stages,
        microbatches=2,
        loss=mse_loss,
        partition=partition,
        extensions=[fxpipe.LeafModules(*leaves), *extensions],
    ) as pipe:
        for rows in sizes:
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            loss = pipe.step(x, target=y)
            expected = loop.train(alone, 2, x, loss=mse_loss, target=y)
            assert torch.equal(loss, expected.loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        loop.assert_same(model.state_dict(), alone.state_dict())
        model.eval()
        alone.eval()
        pipe.eval()
        with torch.no_grad():
            x = torch.randn(4, 4)
            parts = [alone(part) for part in x.tensor_split(2)]
            assert torch.equal(pipe(x), torch.cat(parts))
        loop.assert_same(model.state_dict(), alone.state_dict())
    return alone


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "partition"),
    [("names", "auto"), ("classes", ["middle"]), ("modules", ["leaf", "middle"])],
)
def test_an_exported_model_with_leaves_equals_the_loop(kind: str, partition: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    leaves = {
        "names": ["leaf", "both"],
        "classes": [Branching],
        "modules": [model.leaf, model.both],
    }
    train_both(model, partition, leaves[kind], sizes=(8, 9) if kind == "names" or DEEP else (8,))


class Around(nn.Module):
    """Layers around some module; a parameter of its own is called as an operation is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.relu = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * self.relu
        out: Tensor = self.last(self.inner(y) + torch.relu(y - 1))
        return out


def test_leaves_of_ones_own_branch_on_values() -> None:
    torch.manual_seed(0)
    model = Around(Branching(4))
    alone = train_both(model, ["last"], ["inner"])
    assert isinstance(model.inner, Branching)
    assert isinstance(alone.inner, Branching)
    assert model.inner.seen[-2:] == alone.inner.seen[-2:]


class Backwards(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.smoke
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_leaves_run_in_every_step(when: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if when == "before":
        inner.register_forward_pre_hook(
            lambda module, args: (args[0] * 2 if args[0].sum() > 0 else args[0],)
        )
    else:
        inner.register_forward_hook(lambda module, args, out: Backwards.apply(out))  # type: ignore[no-untyped-call]
    train_both(Around(inner), ["last"], [inner])


def test_a_leaf_in_which_a_submodule_occurs_twice_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = Around(nn.Sequential(layer, nn.Tanh(), layer))
    before = [*map(id, model.parameters())]
    train_both(model, ["last"], ["inner"])
    assert [*map(id, model.parameters())] == before


def test_a_leaf_inside_of_a_leaf_is_the_outer_ones_affair() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(Branching(4), nn.Linear(4, 4))
    train_both(Around(inner), ["last"], ["inner", Branching])


@pytest.mark.smoke
def test_a_leaf_that_is_called_twice_keeps_both_calls_in_one_stage() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Branching(4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.leaf(torch.tanh(self.leaf(x))))
            return y

    torch.manual_seed(0)
    train_both(Twice(), "auto", [Branching])


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand([])


def test_a_constant_of_the_code_that_nothing_needs_is_left_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.where(x > 0, torch.tensor(1.0), torch.tensor(2.0))
            made: Tensor = self.last(self.leaf(x))
            return made

    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    with fxpipe.compile(model, 2, microbatches=2, extensions=[fxpipe.LeafModules("leaf")]) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


def test_a_stage_can_begin_at_a_leaf_that_draws() -> None:
    model, x = Around(Draws(4, 4)), torch.randn(8, 4)
    options: dict[str, Any] = {
        "microbatches": 2,
        "loss": mse_loss,
        "extensions": [fxpipe.LeafModules("inner")],
    }
    with fxpipe.compile(model, 2 * ["cpu"], partition=["inner"], **options) as pipe:
        pipe.step(x, target=x)
        read = {a.target for a in pipe.plan.stages[0].parameters}
    assert read == {"first.weight", "first.bias", "relu"}


def test_a_leaf_in_a_model_of_transformers() -> None:
    from benchmarks.models.others import CASES  # slow to import

    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == "GPT-2")
    model = case.model()
    alone = copy.deepcopy(model)
    options: dict[str, Any] = {
        "extensions": [fxpipe.LeafModules("transformer.h.1.mlp")],
        "microbatches": 2,
    }
    # autograd adds up what a leaf's stage and the next one give to one value in its own order
    with fxpipe.compile(model, ["cpu"] * 2, partition=["transformer.h.1"], **options) as pipe:
        batch = case.batch(4)
        loss = pipe.step(*batch.args, **batch.kwargs)
        leaves = [str(n.target) for s in pipe.plan.stages for n in calls_in(s.graph.graph.nodes)]
    assert leaves == ["called transformer.h.1.mlp"]
    expected = loop.train(alone, 2, loss=lambda output: output.loss, **batch.kwargs)
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def compiled(model: nn.Module, leaves: Any, extensions: Any = ()) -> None:
    x = torch.randn(4, 4)
    fxpipe.compile(
        model,
        ["cpu"],
        microbatches=1,
        loss=mse_loss,
        extensions=[fxpipe.LeafModules(*leaves), *extensions],
        example=((x,), {"target": x}),
    ).close()


class Does(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        if self.what == "writes":
            return x.add_(1)
        return (x, int(x.sum() > 0)) if self.what == "counts" else x


class Unpacks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x * 1)
        return y[0] if isinstance(y, tuple) else y


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("writes", "'inner.inner' writes into what it is given"),
        ("counts", "'inner.inner' returns int"),
    ],
)
def test_what_a_leaf_may_not_do_is_refused(what: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        compiled(Around(Unpacks(Does(what))), ["inner.inner"])
    train_both(Around(Unpacks(Does(what))), ["last"], ["inner"])


class Watching(nn.Linear):
    """Sees whether gradients are enabled."""

    seen: list[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.is_grad_enabled())
        return super().forward(x)


def test_a_leaf_sees_gradients_enabled_where_there_will_be_a_backward() -> None:
    watching = Watching(4, 4)
    watching.seen = []
    x = torch.randn(4, 4)
    with fxpipe.compile(
        Around(watching),
        ["cpu"] * 2,
        microbatches=2,
        loss=mse_loss,
        extensions=[fxpipe.LeafModules("inner")],
    ) as pipe:

        def infer() -> None:
            with torch.no_grad():
                pipe(x)

        runs: list[tuple[Callable[[], Any], bool]] = [
            (lambda: pipe.step(x, target=x), True),
            (lambda: pipe(x).sum().backward(), True),
            (infer, False),
        ]
        for run, enabled in runs:
            run()  # what is compiled is checked
            watching.seen.clear()
            run()
            assert watching.seen == [enabled] * 2


class Packed(nn.Module):
    """Sequences of several lengths through a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        packed = pack_padded_sequence(x, torch.full((len(x),), 2), batch_first=True)
        y: Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return y[:, -1]


@pytest.mark.smoke
@pytest.mark.parametrize("leaf", ["inner.layer", "inner"])
def test_a_packed_sequence_is_given_to_a_leaf_or_made_in_it(leaf: str) -> None:
    torch.manual_seed(0)
    train_both(Around(Packed()), ["last"], [leaf])


class Given(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner({"outputs": [OrderedDict(last=self.first(x))]})
        return y


class Takes(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        return super().forward(given["outputs"][0]["last"])


def test_an_object_that_a_leaf_is_given_is_made_anew_in_every_call() -> None:
    torch.manual_seed(0)
    train_both(Given(Takes(4, 4)), ["inner"], ["inner"])


@pytest.mark.smoke
def test_tracing_leaves_the_leaves_as_they_were() -> None:
    model = Around(Branching(4))
    calls = [module._compiled_call_impl for module in model.modules()]
    compiled(model, ["inner"])
    assert [module._compiled_call_impl for module in model.modules()] == calls
    assert leaf_calls._known == {}


def test_a_tensor_that_is_no_buffer_is_read() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.last(self.first(x) * self.table)
            return made

    model = Scaled()
    alone = copy.deepcopy(model)
    x = torch.randn(4, 4)
    options: Any = {"loss": mse_loss}
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, **options) as pipe:
        made = pipe.step(x, target=x)
    assert torch.equal(made, loop.train(alone, 2, x, loss=mse_loss, target=x).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
