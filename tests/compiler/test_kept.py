"""Of calls of ever other sizes and values, only the results of the last ones are kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler import compiler, guard
from tests.helpers.profiles import DEEP
from tests.oracles import loop

pytestmark = pytest.mark.traces

KEPT = guard.KEPT if DEEP else 5


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiler, guard):
        monkeypatch.setattr(module, "KEPT", KEPT)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, name: str = "") -> Tensor:
        made: Tensor = self.layer(x)
        return made * len(name) if name else made


def _alive() -> dict[str, int]:
    """How many graphs and tensors there are."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return {
        "graphs": sum(issubclass(kind, fx.Graph) for kind in kinds),
        "tensors": sum(issubclass(kind, Tensor) for kind in kinds),
    }


def test_graphs_do_not_grow_with_ever_other_sizes_and_strings() -> None:
    model, alive = Net(), []
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for round_ in range(13 if DEEP else 3):  # over 200 steps
            for step in range(KEPT):
                number = KEPT * round_ + step
                batch: dict[str, Any] = {"name": "x" * number} if step % 2 else {}
                x = torch.randn(4 if step % 2 else 4 + 2 * number, 3)
                loop.clear(model)
                made = pipe.step(x, target=torch.zeros(len(x), 2), **batch)
                alone = loop.train(
                    model, 2, x, loss=F.mse_loss, target=torch.zeros(len(x), 2), **batch
                )
                assert torch.equal(made, alone.loss)
            alive.append(_alive())
            assert len(pipe._compiler.memo.values("call")) <= KEPT
        assert alive[-1]["graphs"] <= alive[1]["graphs"]
        assert alive[-1]["tensors"] <= alive[1]["tensors"] + 8


def test_states_of_the_model_do_not_grow_with_ever_other_ones() -> None:
    class Titled(Net):
        title = ""

        def forward(self, x: Tensor, name: str = "") -> Tensor:
            return super().forward(x, self.title)

    model, x = Titled(), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"], microbatches=2) as pipe:
        for length in range(1, 2 * KEPT + 2):
            model.title = "x" * length
            assert torch.equal(pipe(x), model(x))
            states = pipe._compiler._guard._states
            assert len(states) == min(length, KEPT)
        model.title = "x"  # long forgotten
        assert torch.equal(pipe(x), model(x))


def test_a_call_that_comes_again_is_kept_longer_than_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "fxpipe")
    with fxpipe.compile(Net(), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for step in range(KEPT + 4):
            for rows in (4, 6 + 2 * step):
                pipe.step(torch.randn(rows, 3), target=torch.zeros(rows, 2))
    assert sum("a step of 4 samples" in r.getMessage() for r in caplog.records) == 1
