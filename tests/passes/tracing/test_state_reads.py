"""What is computed of buffers and of other tensors that a model keeps is computed in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop

SHARED = torch.ones(4)


class Keeps(nn.Module):
    """Has tensors of all kinds, which ``made`` reads."""

    table: Tensor

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4))
        self.plain = torch.ones(4)
        self.listed = [torch.ones(4)]
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) * self.made(self))
        return out


READS: dict[str, Callable[[Any], Any]] = {
    "an operator": lambda m: 2 * m.table,
    "a function": lambda m: torch.exp(m.table),
    "a branch of values": lambda m: torch.where(m.table > 1.5, m.table, -m.table),
    "a part": lambda m: m.table[:1],
    "parts": lambda m: torch.cat([part * 2 for part in m.table.split(2)]),
    "rows": lambda m: torch.stack([row + 1 for row in m.table]),
    "a property": lambda m: m.table[None].mT[:, 0] * 2,
    "its form": lambda m: (m.table * 2).view(2, -1).sum(0).repeat(m.table.shape[0] // 2),
    "a form of what is made": lambda m: (m.table + 1).mul(3 if (m.table + 1).ndim == 1 else 2),
    "by its name": lambda m: m.get_buffer("table") * 2,
    "by the state dict": lambda m: m.state_dict()["table"] * 2,
    "a tensor that is no buffer": lambda m: m.plain.square(),
    "one in a list": lambda m: m.listed[0] * 2,
    "a global one": lambda m: SHARED * 2,
    "a parameter in a dictionary": lambda m: dict(m.named_parameters())["weight"] * 2,
    "all parameters": lambda m: sum(p.sum() for p in m.parameters()),
}


@pytest.mark.parametrize("read", READS)
def test_what_is_made_of_a_tensor_follows_the_tensor(read: str) -> None:
    SHARED.fill_(1.0)
    torch.manual_seed(0)
    model = Keeps(READS[read])
    x, target = torch.randn(8, 4), torch.randint(3, (8,))
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe:
        before = pipe.step(x, target=target)
        with torch.no_grad():
            for tensor in (model.table, model.weight, model.plain, model.listed[0], SHARED):
                tensor.fill_(3.0)
        alone = copy.deepcopy(model)
        loop.clear(model, alone)
        made = pipe.step(x, target=target)
    expected = loop.train(alone, 2, x, loss=F.cross_entropy, target=target)
    assert torch.equal(made, expected.loss)
    assert not torch.equal(made, before)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
