"""The check before first use: a wrong graph is refused, a right one passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import fxpipe
from fxpipe.compiler.model_check.check import check
from fxpipe.compiler.model_check.serial import SerialBackward
from fxpipe.errors import TraceError
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced
from fxpipe.kernels.kernel import BackwardResult
from fxpipe.passes.differentiate.part_backward import part_backward
from tests.helpers.exported import Recurrent
from tests.helpers.fronted import differentiated, front_end, in_stages, values_of
from tests.helpers.tiny import Tiny
from tests.oracles import loop

aten = torch.ops.aten


class Model(nn.Module):
    calls: Tensor

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        if self.function is not None:
            return self.function(self, x)
        self.calls += 1
        y = self.layer(x)
        return y * 2 + self.other(y.detach()).exp()


def checked(
    model: nn.Module,
    x: Tensor,
    edit: Callable[[Traced], None] | None = None,
    stages: int = 2,
    finish: Callable[[Plan], Plan] = lambda plan: plan,
) -> None:
    """Compile a model whose graph was edited, and check it as the compiler does."""
    traced: Traced = front_end(model, x)
    if edit is not None:
        edit(traced)
        traced.graph.lint()
        traced.module.recompile()
    plan = finish(differentiated(model, traced, in_stages(traced, stages), x))
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        check(
            traced,
            plan,
            values_of(traced, x),
            traced.state_of(model),
            lambda: (model(x), None),
            True,
        )
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def only(graph: fx.Graph, target: Any) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.target is target)
    return found


def bend_a_gradient(traced: Traced) -> None:
    """As if a detach were forgotten, the gradient of a layer is another."""
    assert traced.backward is not None
    graph = traced.backward.graph
    *_, node = (node for node in graph.nodes if node.target is aten.mm.default)
    with graph.inserting_after(node):
        bent = graph.call_function(aten.mul.Tensor, (node, 2))
    bent.meta.update(node.meta)
    bent.name = "bent"
    node.replace_all_uses_with(bent, lambda user: user is not bent)
    for name, value in traced.backward.gradients.items():
        if value == node.name:
            cast(dict[str, str], traced.backward.gradients)[name] = "bent"


def change_constant(traced: Traced) -> None:
    node = only(traced.graph, aten.mul.Tensor)
    node.args = (node.args[0], 2.5)


def change_operation(traced: Traced) -> None:
    only(traced.graph, aten.exp.default).target = aten.expm1.default


def forget_a_layer(traced: Traced) -> None:
    first, second = (node for node in traced.graph.nodes if node.target is aten.addmm.default)
    second.args = (first.args[0], second.args[1], first.args[2])


def change_what_is_written(traced: Traced) -> None:
    node = next(n for n in traced.graph.nodes if n.target is aten.add.Tensor and n.args[1] == 1)
    node.args = (node.args[0], 3)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (bend_a_gradient, "the gradient of 'layer."),
        (change_constant, "output 'add"),
        (change_operation, "output 'add"),
        (forget_a_layer, "output 'add"),
        (change_what_is_written, "written to the buffer 'calls'"),
    ],
)
def test_a_wrong_graph_is_refused_by_what_differs(
    edit: Callable[[Traced], None], what: str
) -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match="does not compute what the model computes") as caught:
        checked(Model(), torch.randn(3, 4), edit)
    assert what in str(caught.value)
    assert "fxpipe.LeafModules(its name)" in str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1])
def test_the_gradients_of_every_stage_are_compared(stage: int) -> None:
    def spoil(plan: Plan) -> Plan:
        """Add to the gradients of a stage's parameters."""

        def backward(*args: Any) -> BackwardResult:
            made = original(*args)
            return BackwardResult(made.inputs, [g if g is None else g + 1 for g in made.parameters])

        kernel: Any = plan.stages[stage].kernel
        original, kernel.backward = kernel.backward, backward
        return plan

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(TraceError, match=f"the gradient of '{2 * stage}"):
        checked(model, torch.randn(3, 4), finish=spoil)


@pytest.mark.smoke
def test_the_same_graph_unedited_passes() -> None:
    checked(Model(), torch.randn(3, 4))


class Normed(nn.Module):
    """The gradient of a bias before a BatchNorm is nothing but noise."""

    def __init__(self, offset: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x) + self.offset)
        return y.tanh() * 1e-3


def round_otherwise(traced: Traced) -> None:
    """Three times something, and a third of that: the same but for its last bits."""
    graph = traced.graph
    node = only(graph, aten.tanh.default)
    with graph.inserting_before(node):
        thrice = graph.call_function(aten.mul.Tensor, (node.args[0], 3.0))
        once = graph.call_function(aten.div.Tensor, (thrice, 3.0))
    for made in (thrice, once):
        made.meta.update(node.meta)
    node.args = (once,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_is_noise_may_be_other_noise(
    offset: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = Normed(offset, dtype), torch.randn(64, 4, dtype=dtype)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checked(model, x, round_otherwise)
    loop.assert_same(model.state_dict(), weights)


@pytest.mark.parametrize(("bits", "refused"), [(6, False), (3000, True)])
def test_what_rounding_puts_on_the_other_side_of_zero_has_another_gradient(
    bits: int, refused: bool
) -> None:
    """Sums of thousands of numbers, as in a BatchNorm of images, may be off by a few last bits."""
    eps = torch.finfo(torch.float32).eps

    def bent(model: Model, x: Tensor) -> Any:
        y: Tensor = model.layer(x)
        return y + (y - (1 - 2 / 3 * bits * eps)).relu()

    def rounded(traced: Traced) -> None:
        graph = traced.graph
        node = only(graph, aten.addmm.default)
        with graph.inserting_after(node):
            less = graph.call_function(aten.mul.Tensor, (node, 1 - bits * eps))
        less.meta.update(node.meta)
        node.replace_all_uses_with(less, lambda user: user is not less)

    model = Model(bent)
    nn.init.constant_(model.layer.weight, 0.25)
    nn.init.zeros_(model.layer.bias)
    with pytest.raises(TraceError, match=r"layer\.weight") if refused else nullcontext():
        checked(model, torch.ones(3, 4), rounded)


@pytest.mark.smoke
@pytest.mark.parametrize(("wrong", "refused"), [(1, False), (3, False), (4, True)])
def test_a_gradient_that_is_wrong_for_all_weights_nearby_is_refused(
    wrong: int, refused: bool
) -> None:
    """One ReLU that turns over does so for some weights, and far beyond what others show."""
    runs: list[SerialBackward] = []

    class Spoiled(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            if self not in runs:
                runs.append(self)
            gradients = super().run(stage)
            if "layer.weight" in gradients and len(runs) <= wrong:
                gradients["layer.weight"] += 1
            return gradients

    module = "fxpipe.compiler.model_check.gradients.SerialBackward"
    with (
        patch(module, Spoiled),
        pytest.raises(TraceError, match=r"layer\.weight") if refused else nullcontext(),
    ):
        checked(Model(), torch.randn(3, 4))
    assert len(runs) == 4


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_wrong_number_in_any_part_of_a_large_gradient_is_found(place: int, wrong: float) -> None:
    class Spoiled(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            gradients = super().run(stage)
            if "layer.weight" in gradients:
                gradients["layer.weight"].view(-1)[place] += wrong
            return gradients

    with (
        patch("fxpipe.compiler.model_check.check._CACHED", 4),
        patch("fxpipe.compiler.model_check.gradients.SerialBackward", Spoiled),
        pytest.raises(TraceError, match=r"the gradient of 'layer\.weight'"),
    ):
        checked(Model(), torch.randn(3, 4))


def test_a_small_gradient_is_no_noise() -> None:
    torch.manual_seed(0)
    model = Model(lambda self, x: (self.layer(x) + self.layer(x).detach()) * 1e-7)
    x = torch.randn(3, 4)
    checked(model, x)
    with pytest.raises(TraceError, match="the gradient of 'layer"):
        checked(model, x, bend_a_gradient)


@pytest.mark.smoke
def test_halves_of_a_backward_pass() -> None:
    checked(Model(), torch.randn(3, 4), finish=part_backward)


@pytest.mark.smoke
@pytest.mark.parametrize("half", ["input_grad", "weight_grad"])
def test_a_wrong_half_of_a_backward_is_refused(half: str) -> None:
    def spoiled(plan: Plan) -> Plan:
        plan = part_backward(plan)
        module = getattr(plan.stages[-1], half)
        node = only(module.graph, aten.mm.default)
        with module.graph.inserting_after(node):
            double = module.graph.call_function(aten.mul.Tensor, (node, 2))
        node.replace_all_uses_with(double, lambda user: user is not double)
        module.recompile()
        return plan

    with pytest.raises(TraceError, match="the gradient of '"):
        checked(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            torch.randn(3, 4),
            finish=spoiled,
        )


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tiny": (Tiny, lambda: torch.randn(3, 4)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.9)),
        lambda: torch.randn(3, 4),
    ),
    "attention with dropout": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
        lambda: torch.randn(3, 5, 8),
    ),
    "dropout of channels": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Dropout1d(0.4), nn.AlphaDropout(0.2)),
        lambda: torch.randn(3, 4, 5),
    ),
    "recurrent": (lambda: Recurrent().train(), lambda: torch.randn(3, 5, 3)),
    **{
        name: (lambda function=function: Model(function), lambda: torch.randn(3, 4))  # type: ignore[misc]
        for name, function in {
            "rand": lambda m, x: m.layer(x) * torch.rand(x.shape[0], 1) + torch.rand_like(x),
            "randn": lambda m, x: m.layer(x) * torch.randn(4) + torch.randn_like(x),
            "randint": lambda m, x: m.layer(x) * torch.randint(2, 9, (4,)),
            "bernoulli": lambda m, x: torch.bernoulli(m.layer(x).sigmoid()) * m.other(x),
            "randperm": lambda m, x: m.layer(x)[:, torch.randperm(4)],
            "functional": lambda m, x: functional.dropout(m.layer(x), 0.5, inplace=True),
        }.items()
    },
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_graph_passes_whatever_it_draws(name: str) -> None:
    factory, inputs = RIGHT[name]
    checked(factory(), inputs())


@pytest.mark.smoke
def test_a_wrong_chance_of_dropout_is_noticed() -> None:
    def change(traced: Traced) -> None:
        node = next(n for n in traced.graph.nodes if "dropout" in n.name)
        node.args = (node.args[0], 0.4, *node.args[2:])

    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4))
    with pytest.raises(TraceError, match="does not compute"):
        checked(model, torch.randn(3, 4), change)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_out_padding_is_refused_with_a_cure_that_works() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(4, 5, 8), torch.arange(5).expand(4, 5) > 3
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2) as pipe, torch.no_grad():
        with pytest.raises(TraceError, match=r"set_fastpath_enabled\(False\)"):
            pipe(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            made = pipe(x, src_key_padding_mask=padding)
            parts = zip(x.chunk(2), padding.chunk(2), strict=True)
            alone = [model(rows, src_key_padding_mask=places) for rows, places in parts]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(made, torch.cat(alone))


@pytest.mark.parametrize("halves", [False, True])
def test_the_check_keeps_no_gradients_of_a_stage_beside_those_of_the_next(halves: bool) -> None:
    """Neither of the model nor of the plan, nor those of halves beside those of a whole."""
    of_model: list[weakref.ref[Tensor]] = []
    of_plan: list[weakref.ref[Tensor]] = []
    counts: list[tuple[int, int]] = []

    def alive(gradients: list[weakref.ref[Tensor]]) -> int:
        return sum(gradient() is not None for gradient in gradients)

    class Watched(SerialBackward):
        def run(self, stage: Stage) -> dict[str, Tensor]:
            gradients = super().run(stage)
            of_plan.extend(map(weakref.ref, gradients.values()))
            counts.append((alive(of_model), alive(of_plan)))
            return gradients

    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: of_model.append(weakref.ref(gradient)))
    with patch("fxpipe.compiler.model_check.gradients.SerialBackward", Watched):
        finish = part_backward if halves else lambda plan: plan
        checked(model, torch.randn(3, 4), stages=3, finish=finish)
    assert len(counts) == 3 * (1 + halves)
    # a stage has two; with the last of them, the model's first of the next stage is there
    assert all(model <= 3 and plan == 2 for model, plan in counts)
