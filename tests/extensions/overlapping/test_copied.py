"""A batch whose tensors the caller may overwrite while it is in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fxpipe.extensions.overlapping.step import copied_batch
from fxpipe.runtime.batch import Batch
from fxpipe.runtime.host import BatchHost
from tests.helpers.fronted import front_end

pytestmark = pytest.mark.smoke

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "every other column": lambda x: x[:, ::2],
    "transposed": lambda x: x.reshape(4, 5).t(),
    "repeated": lambda x: x[:, :1].expand(5, 4),
    "windows": lambda x: x.view(-1)[:8].unfold(0, 4, 1),
    "conjugate": lambda x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("way", LAYOUTS)
def test_copies_of_a_batch_stay_as_they_were(way: str) -> None:
    x = LAYOUTS[way](torch.randn(5, 4))
    table = torch.eye(4)

    class Tabled(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x + table.sum().to(x.dtype)

    batch = Batch.of(Tabled(), (x, table), {}, (), {"table": None})
    traced = replace(front_end(nn.ReLU(), torch.randn(5, 4)), inputs=("x", "table"))
    given = BatchHost(traced, batch.in_parts(2), frozenset(), 0).inputs
    copies = BatchHost(traced, copied_batch(batch.in_parts(2)), frozenset(), 0).inputs
    before = [part.clone() for part in given["x"]]
    assert all(map(torch.equal, copies["x"], before))
    for column in x.unbind(1):
        column.zero_()
    table.zero_()
    assert all(map(torch.equal, copies["x"], before))
    assert torch.equal(copies["table"][0], torch.eye(4))
