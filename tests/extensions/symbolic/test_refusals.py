"""What torch.fx cannot trace is refused with its line, and with the way out."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe
from fxpipe.errors import TraceError
from tests.extensions.leaf_modules import test_rest
from tests.extensions.leaf_modules.test_leaf_modules import Around, Does, Unpacks
from tests.helpers.refusals import refused, stepped
from tests.helpers.tiny import Tiny
from tests.oracles import loop
from tests.passes.tracing import test_untraceable
from tests.passes.tracing.test_state_reads import Keeps


def test_a_decorated_forward_that_cannot_be_traced_symbolically_can_be_exported() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes, **heads))
    tokens = torch.randint(8, (2, 3))
    with (
        fxpipe.compile(model, 1, microbatches=1, extensions=["symbolic"]) as pipe,
        pytest.raises(TraceError, match=r"decorator .* hides .*; leave out fxpipe\.Symbolic"),
    ):
        pipe.step(input_ids=tokens, labels=tokens)
    with fxpipe.compile(model, 1, microbatches=1) as pipe:
        assert pipe.step(input_ids=tokens, labels=tokens).isfinite()


class Wide(nn.Module):
    """Sizes a tensor by Python, which a symbolic trace would keep as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + torch.ones(3 if isinstance(x.shape[1], torch.fx.Proxy) else 4)


def test_a_symbolic_graph_that_fails_names_the_line_and_export_traces_the_model() -> None:
    x = torch.randn(4, 4)
    options: Any = {"microbatches": 2, "loss": F.mse_loss}
    with (
        fxpipe.compile(Wide(), 1, **options, extensions=["symbolic"]) as pipe,
        pytest.raises(
            TraceError, match=r"test_refusals\.py:\d+, .*leave out fxpipe\.Symbolic.*, or"
        ),
    ):
        pipe.step(x, target=x)
    with fxpipe.compile(Wide(), 1, **options) as pipe:
        assert pipe.step(x, target=x).isfinite()


def count(module: Any) -> Any:
    module.table += 1
    return module.table


def count_by_method(module: Any) -> Any:
    return module.table.add_(1)


def replace(module: Any) -> Any:
    module.table = module.table * 2
    return module.table


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda m: float(m.table[0]), "depends on the values of a tensor"),
        (lambda m: m.table.tolist()[0], "depends on the values of a tensor"),
        (lambda m: 1 if torch.equal(m.table, m.plain) else 2, "depends on the values of a tensor"),
        (count, "writes into a tensor that the model keeps"),
        (count_by_method, "writes into a tensor that the model keeps"),
        (replace, "replaces the buffer 'table'"),
    ],
)
def test_numbers_of_buffers_and_writes_into_them_are_refused_by_their_line(
    made: Callable[[Any], Any], reason: str
) -> None:
    x, model = torch.ones(4, 4), Keeps(made)
    before = model.table.clone()
    with (
        fxpipe.compile(model, ["cpu"], microbatches=2, extensions=["symbolic"]) as pipe,
        pytest.raises(fxpipe.TraceError, match=reason) as caught,
    ):
        pipe(x)
    assert torch.equal(model.table, before)
    assert "test_refusals.py" in str(caught.value)


def test_a_line_of_the_models_own_forward_is_refused() -> None:
    x = torch.randn(8, 4)
    model = test_rest.Net(test_rest.branches)
    with (
        fxpipe.compile(model, 2, microbatches=2, loss=F.mse_loss, extensions=["symbolic"]) as pipe,
        pytest.raises(TraceError, match=r"# here \(.*fxpipe\.LeafModules\(its name\)"),
    ):
        pipe.step(x, target=x)


@pytest.mark.parametrize(
    ("function", "construct"),
    [
        (test_untraceable.branches, "a branch on the values of a tensor"),
        (test_untraceable.loops, "a loop whose length depends on a tensor's values"),
        (test_untraceable.array, "a NumPy array made of a tensor"),
    ],
)
def test_what_depends_on_values_is_refused_outside_of_submodules(
    function: Callable[[Any, Tensor], Tensor], construct: str
) -> None:
    with pytest.raises(TraceError) as caught:
        test_untraceable.compiled(test_untraceable.Inner(function), ["symbolic"])
    for part in ("# here (", construct, "leave out fxpipe.Symbolic()", "fxpipe.LeafModules("):
        assert part in str(caught.value)


def test_a_leaf_module_that_writes_into_what_it_is_given_is_refused_by_its_line() -> None:
    x = torch.randn(4, 4)
    message = r"'inner\.inner' at .*py.* writes into what it is given"
    options: Any = {"extensions": [fxpipe.LeafModules("inner.inner"), "symbolic"]}
    with (
        fxpipe.compile(
            Around(Unpacks(Does("writes"))), ["cpu"], microbatches=1, loss=F.mse_loss, **options
        ) as pipe,
        pytest.raises(TraceError, match=message),
    ):
        pipe.step(x, target=x)


class WritesThroughCast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone()
        hidden.float().add_(1)  # no new tensor, where the type is the same
        return hidden


def test_an_unseen_write_is_refused_with_a_cure_that_works() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 4), WritesThroughCast(), nn.Linear(4, 4)),
        torch.randn(4, 4),
    )
    target = torch.randn(4, 4)
    options: dict[str, Any] = {
        "microbatches": 2,
        "loss": F.mse_loss,
    }
    with (
        fxpipe.compile(model, 2, extensions=["symbolic"], **options) as pipe,
        pytest.raises(TraceError) as raised,
    ):
        pipe.step(x, target=target)
    assert "fxpipe.LeafModules(its name)" in str(raised.value)
    alone = copy.deepcopy(model)
    given: list[Any] = ["symbolic", fxpipe.LeafModules("1")]
    with fxpipe.compile(model, 2, extensions=given, **options) as pipe:
        loss = pipe.step(x, target=target)
    assert torch.equal(loss, loop.train(alone, 2, x, loss=F.mse_loss, target=target).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Branching(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = h * 2
        return self.last(h)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_traced_names_its_line_and_the_cure() -> None:
    where = f"Branching cannot be traced at {__file__}:"
    parts = ["in forward", "if h.sum() > 0:", "fxpipe.LeafModules("]
    refused(TraceError, lambda: stepped(Branching(), extensions=["symbolic"]), where, *parts)


def test_a_trace_error_is_short_and_the_rest_is_in_the_debug_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG", "fxpipe"), pytest.raises(TraceError) as raised:
        stepped(Branching(), extensions=["symbolic"])
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    assert len(lines) < 20
    link = "see docs/errors.md#traceerror"
    assert lines[-2:] == [f"fxpipe.errors.TraceError: {raised.value}", link]
    assert not any("torch/fx" in line for line in lines)
    told = caplog.text
    assert "torch/fx" in told and "Traceback" in told


class Noise(nn.Module):
    """Draws a tensor of nothing."""

    def forward(self) -> Tensor:
        return torch.from_numpy(numpy.random.rand(4)).float()


class Noisy(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x) + self.inner())
        return y


def test_a_leaf_that_draws_and_takes_no_tensor_is_refused_by_name() -> None:
    x = torch.randn(4, 4)
    with (
        fxpipe.compile(
            Noisy(Noise()), 2, microbatches=2, loss=F.mse_loss, extensions=["symbolic"]
        ) as pipe,
        pytest.raises(TraceError, match=r"leaf module 'inner' draws .*numpy.random.*give it one"),
    ):
        pipe.step(x, target=x)
