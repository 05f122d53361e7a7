"""What one call of a leaf module for real tells of all its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.compiler.leaf_modules.nests import UnfitLeaf
from fxpipe.compiler.leaf_modules.trial import Trial


class Does(nn.Module):
    """A leaf module that does anything."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, 2), function
        self.register_buffer("seen", torch.zeros(()))
        self.last: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


X, Z = torch.ones(3, 2), torch.ones(3, 2)


def trial(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Trial:
    return Trial("leaf", Does(function), args or (X,), kwargs)


def test_the_call_is_noted_with_what_it_reads_writes_and_keeps() -> None:
    def counts(m: Any, x: Tensor, scale: float = 1.0) -> Any:
        m.seen += 1
        return {"y": m.layer(x).tanh() * scale, "count": m.seen.clone()}

    call = trial(counts, X, scale=2.0).call(7)
    assert (call.number, call.name, call.draws) == (7, "leaf", False)
    assert call.state == ("layer.weight", "layer.bias", "seen") and call.written == ("seen",)
    assert [look.shape for look in call.looks] == [(3, 2), ()]
    assert call.differentiable == (True, False)
    assert call.held > 0
    assert call.given.filled([X])[1] == {"scale": 2.0}


def test_each_result_names_the_inputs_that_its_gradient_reaches() -> None:
    call = trial(lambda m, x, z: (x * 2, x + z, m.layer(z), z.detach()), X, Z).call(0)
    assert call.reached == tuple(map(frozenset, ({0}, {0, 1}, {1}, set[int]())))
    assert call.differentiable == (True, True, True, False)


def test_draws_are_noticed_even_where_their_rate_is_0() -> None:
    assert trial(lambda m, x: x + torch.rand(2)).call(0).draws
    assert not trial(lambda m, x: x + 1).call(0).draws
    leaf = nn.Sequential(nn.Dropout(0.0))
    assert Trial("leaf", leaf, (X,), {}).call(0).draws
    assert not Trial("leaf", leaf.eval(), (X,), {}).call(0).draws


def test_the_statistics_of_a_batchnorm_are_written() -> None:
    leaf = nn.Sequential(nn.BatchNorm1d(2))
    call = Trial("leaf", leaf, (X,), {}).call(0)
    assert call.written == ("0.running_mean", "0.running_var", "0.num_batches_tracked")
    assert Trial("leaf", leaf.eval(), (X,), {}).call(0).written == ()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "writes its input": (lambda m, x: x.add_(1), "writes into what it is given"),
    "returns a number": (lambda m, x: (x, 5), "returns int 5"),
    "returns a sparse tensor": (lambda m, x: x.to_sparse(), "to_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_leaf_may_do_is_refused_by_name(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnfitLeaf, match=f"leaf module 'leaf' .*{message}"):
        trial(function, torch.ones(3, 2))


def test_an_attribute_that_a_graph_would_read_as_a_constant_is_refused() -> None:
    def keeps(m: Any, x: Tensor) -> Tensor:
        m.last = x * 2
        return x + 1

    module = Does(keeps)
    made = Trial("leaf", module, (X,), {})
    made.refuse_constants([torch.ones(2)])
    with pytest.raises(UnfitLeaf, match="sets its attribute 'last' in every call"):
        made.refuse_constants([module.last])


def test_a_leaf_that_autograd_cannot_run_is_called_without_gradients() -> None:
    def whole(m: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("not here")
        return x * 2

    made = trial(whole)
    assert torch.equal(made.output, X * 2) and made.call(0).held == 0
