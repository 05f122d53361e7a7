"""The two nodes of a leaf module together compute what autograd does around the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.compiler.leaf_modules.calls import LeafCalls
from fxpipe.compiler.leaf_modules.extension import LeafModules
from fxpipe.compiler.leaf_modules.nodes import LeafBackward, LeafForward, Look
from fxpipe.compiler.leaf_modules.trial import Trial
from fxpipe.errors import InputError, TraceError
from fxpipe.passes.tracing.capture import UntracedCalls


class Leaf(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, 2), function
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def branches(m: Any, x: Tensor, z: Tensor) -> Any:
    m.seen += 1
    y = m.layer(x)
    return (y if bool(y.sum() > 0) else -y) * z, y.detach()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 2), torch.randn(3, 2)


def nodes(
    module: nn.Module, given: tuple[Tensor, ...], which: list[int], wanted: list[int]
) -> tuple[LeafForward, LeafBackward]:
    trial = Trial("leaf", module, given, {})
    call = trial.call(0)
    state = dict((*module.named_parameters(), *module.named_buffers()))
    parts = [*given, *(state[name] for name in call.state)]
    needs = [at in wanted for at in range(len(given))]
    needs += [isinstance(state[name], nn.Parameter) for name in call.state]
    call = replace(call, needs=tuple(needs))
    looks = [Look.of(x) for x, has in zip(parts, needs, strict=True) if has]
    return LeafForward(call, module), LeafBackward(call, which, wanted, looks)


def run(forward: LeafForward, given: tuple[Tensor, ...]) -> list[Any]:
    module = forward.module
    state = dict((*module.named_parameters(), *module.named_buffers()))
    return forward(given, [state[name] for name in forward.call.state])


def test_forward_and_backward_equal_autograd() -> None:
    module, given = Leaf(branches), batch()
    forward, backward = nodes(module, given, [0], [0, 1])
    x, z = (each.clone().requires_grad_() for each in given)
    expected, beside = module(x, z)
    buffer, gradient = module.get_buffer("seen"), torch.randn(3, 2)
    seen = buffer.clone()
    wanted = torch.autograd.grad(expected, [x, z, *module.parameters()], gradient)
    results = run(forward, given)
    assert torch.equal(results[0], expected) and torch.equal(results[1], beside)
    assert torch.equal(results[2], seen + 1) and torch.equal(buffer, seen)  # a new value
    made = backward([gradient], results[3], given, ())
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True) if a is not None)
    assert len(made) == 4


def test_only_gradients_that_are_wanted_are_returned() -> None:
    module, given = Leaf(branches), batch()
    forward, backward = nodes(module, given, [0], [1])
    made = backward([torch.ones(3, 2)], run(forward, given)[3], given, ())
    assert [x is not None and x.shape for x in made] == [(3, 2), (2, 2), (2,)]


def test_a_gradient_that_autograd_does_not_find_is_0_or_none() -> None:
    def uses_one(m: Any, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = m.layer(x) if bool(x.sum() < 1e9) else m.layer(z)
        return out + 0 * z if torch.is_inference_mode_enabled() else out

    module, given = Leaf(uses_one), batch()
    forward, backward = nodes(module, given, [0], [0, 1])
    gradient = torch.ones(3, 2)
    made = backward([gradient], run(forward, given)[-1], given, ())
    assert made[1] is not None and not made[1].any()
    made = backward.adding([1])([gradient], run(forward, given)[-1], given, ())
    assert made[0] is not None and made[1] is None


def test_results_lie_in_memory_of_their_own() -> None:
    module = Leaf(lambda m, x, z: (x, x.t(), m.layer(x)[:, :1]))
    given = batch()
    forward, _ = nodes(module, given, [0], [0])
    results = run(forward, given)[:3]
    places = {each.untyped_storage().data_ptr() for each in (*results, *given)}
    assert len(places) == 5
    assert [each.stride() for each in results] == [look.strides for look in forward.call.looks]


def test_a_size_that_depends_on_values_is_refused() -> None:
    module, given = (
        Leaf(lambda m, x, z: m.layer(x)[z[:, 0] > 0]),
        (torch.ones(3, 2), torch.ones(3, 2)),
    )
    forward, _ = nodes(module, given, [0], [0])
    with pytest.raises(TraceError, match="its size depends on values"):
        run(forward, (given[0], torch.tensor([[1.0, 0], [-1, 0], [1, 0]])))


def test_a_backward_that_fails_is_told_by_the_name_of_the_leaf() -> None:
    _, backward = nodes(Leaf(branches), batch(), [0], [0])
    with pytest.raises(InputError, match="backward of 'leaf' fails"), backward.refusing():
        raise ZeroDivisionError


def test_the_calls_of_leaf_modules_are_what_a_trace_asks_for() -> None:
    calls: UntracedCalls = LeafCalls({})
    with calls.opaque(nn.Identity()):
        pass
    assert LeafModules("experts").given and not LeafModules().given
