"""A call of whose outputs some are not used in the loss."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.oracles import loop


class Heads(nn.Module):
    """Four heads: the third reads its weight and the body's value without gradients, and of the
    fourth only an index is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second, self.third, self.fourth = (
            nn.Linear(4, 4) for _ in range(5)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.body(x).tanh()
        third = nn.functional.linear(early.detach(), self.third.weight.detach(), self.third.bias)
        second, chosen = self.second(early), self.fourth(early).argmax(1, keepdim=True)
        return {
            "first": self.first(early),
            "second": second,
            "third": third,
            "early": early,
            "fourth": early.gather(1, chosen),
        }


@pytest.mark.parametrize(
    "used", [["first"], ["second"], ["third"], ["early"], ["fourth"], ["first", "third"]]
)
@pytest.mark.parametrize("leaves", [[], ["second"]])
def test_what_only_unused_outputs_read_gets_no_gradient(
    leaves: Sequence[str], used: Sequence[str]
) -> None:
    model, x = Heads(), torch.linspace(-1, 1, 16).view(4, 4)
    other = copy.deepcopy(model)
    given, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=2,
        partition=["second"],
        extensions=[fxpipe.LeafModules(*leaves)],
    ) as pipe:
        output = pipe(given)
        sum((output[name] ** 2).sum() for name in used).backward()
    for part in theirs.tensor_split(2):
        output = other(part)
        sum((output[name] ** 2).sum() for name in used).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(other))
    loop.assert_same({"x": given.grad}, {"x": theirs.grad})
