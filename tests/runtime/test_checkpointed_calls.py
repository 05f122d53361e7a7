"""Calls of a pipe inside of ``torch.utils.checkpoint``, also where the first of them compiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import fxpipe


def gradients(*, inside: bool, called_before: bool, reentrant: bool) -> list[Tensor]:
    """The output of a call, and the gradients of its input and of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))
    x = torch.randn(6, 4, requires_grad=True)
    with fxpipe.compile(model, ["cpu"] * 2, partition=["3"], microbatches=2, loss=mse_loss) as pipe:
        if called_before:
            pipe(x)
        torch.manual_seed(1)
        output = checkpoint(pipe, x, use_reentrant=reentrant) if inside else pipe(x)
        assert isinstance(output, Tensor)
        output.square().sum().backward()
    assert x.grad is not None
    own = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(own) == 4
    return [output.detach(), x.grad, *own]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
def test_a_call_inside_of_checkpoint_has_the_results_of_one_outside(
    called_before: bool, reentrant: bool
) -> None:
    expected = gradients(inside=False, called_before=called_before, reentrant=reentrant)
    found = gradients(inside=True, called_before=called_before, reentrant=reentrant)
    assert all(map(torch.equal, found, expected))


def test_a_first_call_leaves_hooks_on_saved_tensors_as_they_are() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with (
        fxpipe.compile(nn.Linear(4, 4), ["cpu"], microbatches=2, loss=mse_loss) as pipe,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        pipe.prepare(torch.ones(4, 4), target=torch.ones(4, 4))
        assert packed == []
        value = torch.ones(3, requires_grad=True)
        value.exp()
    assert len(packed) == 1
