"""Captures leave the model as it was, and name the lines that they cannot hold."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.torchtools import source
from tests.helpers.fronted import front_end, run_graph
from tests.oracles import loop


class Computes(nn.Module):
    """A layer, then any function of its output and its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Keeps(nn.Module):
    """Counts its calls, keeps statistics, draws random numbers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.drop(self.norm(x)) + torch.rand_like(x)
        return y


@pytest.mark.parametrize("training", [True, False])
def test_tracing_leaves_state_and_generators_alone(training: bool) -> None:
    model = Keeps().train(training)
    before = copy.deepcopy(model.state_dict())
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    x = torch.randn(3, 4)
    torch.set_rng_state(random)
    front_end(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert {n: b._version for n, b in model.named_buffers()} == versions
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(module.training == training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_training_and_evaluation_graphs_differ_as_the_model_does() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    training = front_end(model.train(), x)
    assert training.seeded
    assert {w.target for w in training.writes} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    evaluation = front_end(model.eval(), x)
    assert not evaluation.seeded
    assert not evaluation.writes
    assert torch.equal(run_graph(model, evaluation, x)[0], model(x))


def test_modes_of_single_modules_are_traced() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model[1].eval()
    traced = front_end(model, torch.randn(3, 4))
    assert traced.writes
    assert not traced.seeded


def _branches(y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y  # a branch on values


def _reads_item(y: Tensor) -> Tensor:
    return y * int(y.sum().item() > 0)  # a number from values


def _as_numbers(y: Tensor) -> Tensor:
    return torch.from_numpy(y.detach().numpy() * 2)  # leaves PyTorch


@pytest.mark.parametrize(
    ("function", "line", "cure"),
    [
        (_branches, "a branch on values", "torch.where or masks"),
        (_reads_item, "a number from values", "torch.where or masks"),
        (_as_numbers, "leaves PyTorch", "PyTorch's own operations"),
    ],
)
def test_a_refusal_names_the_line_and_a_cure(
    function: Callable[[Tensor], Tensor], line: str, cure: str
) -> None:
    with pytest.raises(TraceError) as caught:
        front_end(Computes(function), torch.randn(3, 4))
    message = str(caught.value)
    assert "Computes cannot be traced at" in message
    assert f"{__file__}:" in message
    assert line in message
    assert cure in message


def test_an_error_of_the_model_itself_is_told_with_its_line() -> None:
    with pytest.raises(TraceError, match=r"unsupported here.*oops") as caught:
        front_end(Computes(_fails), torch.randn(3, 4))
    assert isinstance(caught.value.__cause__, ValueError)


def _fails(y: Tensor) -> Tensor:
    raise ValueError("oops")  # unsupported here


@pytest.mark.parametrize("decoder", [True, False])
def test_an_attention_mask_is_applied_as_it_is_and_not_compared(decoder: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            if decoder:
                return self.layers(x.flip(1), x, src_mask=mask.T, tgt_mask=mask)
            return self.layers.encoder(x, mask=mask)

    torch.manual_seed(0)
    model = Masked()
    x, causal = torch.randn(3, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    traced = front_end(model, x, causal)
    for mask in (causal, -2 * torch.eye(5), causal.clamp(min=-1)):
        torch.testing.assert_close(run_graph(model, traced, x, mask)[0], model(x, mask))


def wrapped(model: nn.Sequential, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(model[0], backend=backend)
    model[0] = compiled
    return model


def compiled_in_place(model: nn.Sequential, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def with_a_compiled_function(model: nn.Sequential, backend: Any) -> nn.Module:
    tanh = torch.compile(torch.tanh, backend=backend)
    model[1].forward = lambda x: tanh(x)
    return model


@pytest.mark.parametrize("change", [wrapped, compiled_in_place, with_a_compiled_function])
def test_what_torch_compile_has_wrapped_is_captured_as_it_was(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    alone = copy.deepcopy(model)
    x, y = torch.randn(4, 4), torch.randn(4, 3)

    def backend(module: fx.GraphModule, _: object) -> fx.GraphModule:
        raise AssertionError("nothing is to be compiled")

    model = change(model, backend)
    with fxpipe.compile(model, 2, microbatches=2, loss=nn.functional.mse_loss) as pipe:
        loss = pipe.step(x, target=y)
        assert not any(stage.calls for stage in pipe.plan.stages)
    warned = any("torch.compile of" in record.message for record in caplog.records)
    assert warned == (change is not with_a_compiled_function)
    expected = loop.train(alone, 2, x, loss=nn.functional.mse_loss, target=y).loss
    assert torch.equal(loss, expected)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python:RuntimeWarning")
def test_inside_torch_compile_a_pipe_is_called_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    alone = copy.deepcopy(model)
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    compiled: list[Any] = []

    def backend(module: fx.GraphModule, _: object) -> fx.GraphModule:
        compiled.extend(n.target for n in module.graph.nodes if n.op == "call_function")
        return module

    with fxpipe.compile(model, 2, microbatches=2, loss=nn.functional.mse_loss) as pipe:
        out = torch.compile(pipe, backend=backend)(x)
        assert compiled == []
        out.sum().backward()
        expected = torch.cat([alone(part) for part in x.tensor_split(2)])
        expected.sum().backward()
        assert torch.equal(out, expected)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        loop.clear(model, alone)
        loss = torch.compile(lambda: pipe.step(x * 2, target=y) + 1, backend=backend)()
        assert {operator.mul} <= {*compiled} <= {operator.mul, operator.add}  # of the step nothing
        expected = loop.train(alone, 2, x * 2, loss=nn.functional.mse_loss, target=y).loss
    assert torch.equal(loss, expected + 1)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_first_step_may_be_taken_while_autograd_looks_for_anomalies() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    alone = copy.deepcopy(model)
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    with (
        torch.autograd.set_detect_anomaly(True),
        fxpipe.compile(model, 2, microbatches=2, loss=nn.functional.mse_loss) as pipe,
    ):
        pipe.step(x, target=y)
        assert torch.is_anomaly_enabled()
        loop.train(alone, 2, x, loss=nn.functional.mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Windows(nn.Module):
    """Makes a mask with ``torch.vmap``, and computes otherwise while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def seen(query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < 3)

        mask = torch.vmap(torch.vmap(seen, (None, 0)), (0, None))(torch.arange(4), torch.arange(4))
        y = self.first(x)
        exported = torch.compiler.is_exporting()
        made: Tensor = self.last(y @ mask.float() if exported else (y.unsqueeze(-1) * mask).sum(1))
        return made


def test_vmap_is_traced_as_the_model_computes_it_when_it_is_not_exported() -> None:
    torch.manual_seed(0)
    model = Windows()
    alone, x = copy.deepcopy(model), torch.randn(8, 4)
    with fxpipe.compile(model, 2, microbatches=2, loss=torch.mean) as pipe:
        pipe.step(x)
        assert "mul" in str(pipe.plan)
        assert "matmul" not in str(pipe.plan)
    loop.train(alone, 2, x, loss=torch.mean)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Regions(nn.Module):
    """Layers inside of ``autocast``, and one inside of ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.frozen(x)
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.last(self.first(x).relu() + kept)
        return out.float()


def test_operations_under_autocast_and_no_grad_are_those_of_their_modules() -> None:
    model = Regions()
    traced = front_end(model, torch.randn(6, 4))
    nodes = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert [source.module_paths(node) for node in nodes] == [["frozen"], ["first"], ["last"]]
    assert "self.frozen(x)" in source.of_node(nodes[0])
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    mse = nn.functional.mse_loss
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse, partition=["last"]) as pipe:
        pipe.step(x, target=y)
        assert "last" in pipe.plan.stages[1].modules


def test_an_input_that_is_returned_twice_comes_back_as_it_was_given() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Any:
            y = self.layer(x) * scale
            return {"loss": y.sum(), "scale": scale, "again": (scale, x, x), "rows": (y, y)}

    x, scale = torch.randn(7, 4), torch.tensor(1 / 3)
    with fxpipe.compile(Twice(), 2, microbatches=3) as pipe:
        _, output = pipe.step(x, scale, return_output=True)
    assert all(torch.equal(each, scale) for each in (output["scale"], output["again"][0]))
    assert all(torch.equal(each, x) for each in output["again"][1:])
    assert torch.equal(*output["rows"])


def test_no_code_is_generated_for_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[fx.Graph] = []
    code = fx.Graph.python_code

    def noted(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        made.append(graph)
        return code(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", noted)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    traced = front_end(model, x)
    assert not made
    assert "tanh" in traced.module.code
    assert made  # it is generated when somebody asks for it
