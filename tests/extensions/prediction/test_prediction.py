"""Batches read weights that the optimizer's momentum predicts, as a loop that predicts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from tests.helpers.overlapping import MORE, OPTIMIZERS, SGD, MostVersions, compiled, make
from tests.oracles.delayed_loop import Factory, PredictedLoop

PREDICTED: dict[str, Any] = {"extensions": [fxpipe.Prediction()]}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "amsgrad"])
@pytest.mark.parametrize(
    ("schedule", "microbatches", "delay"), [("2bw", 3, 1), ("1f1b-async", 1, 2)]
)
def test_predicted_weights_are_where_the_momentum_points(
    schedule: str,
    microbatches: int,
    delay: int,
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = MostVersions(monkeypatch)
    model, data = make("mlp", 10, 4)
    factory = (OPTIMIZERS | MORE)[optimizer]
    expected = PredictedLoop.beside(model, factory, microbatches, delay=delay)
    with compiled(model, 3, microbatches, factory, schedule=schedule, **PREDICTED) as pipe:
        for t, (x, y) in enumerate(data):
            torch.testing.assert_close(
                pipe.step(x, target=y), expected.step(x, y), rtol=1e-12, atol=1e-12
            )
            if t == 4:
                pipe.flush()
        assert "predict" in str(pipe.schedule).splitlines()[0]
        assert fxpipe.Schedule.parse(str(pipe.schedule)) == pipe.schedule
        pipe.flush()
        # the newest, and a predicted one for each version that a batch may read
        assert pipe.weight_versions == [1 + delay + 1] * 3
        assert max(most.of(pipe)) <= 1 + delay + 1
    expected.assert_same(model, 1e-12)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "this SGD has none"),
        (lambda p: torch.optim.Rprop(p), "cannot predict from the state of Rprop"),
    ],
)
def test_prediction_without_a_momentum_is_refused(factory: Factory, message: str) -> None:
    model, [(x, y)] = make("mlp", 1, 4)
    with (
        compiled(model, 2, 2, factory, **PREDICTED) as pipe,
        pytest.raises(fxpipe.InputError, match=message),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("optimizer", [None, SGD])
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "schedule mine stages=1 microbatches=1 delay=0 predict\nplace 0\n0: F0 B0 U"],
)
def test_prediction_where_every_batch_reads_the_newest_weights_is_refused(
    schedule: str, optimizer: Factory | None
) -> None:
    options = PREDICTED if schedule == "1f1b" else {}  # the other says so itself
    with pytest.raises(fxpipe.InputError, match="none to predict; leave the prediction out"):
        fxpipe.compile(nn.Linear(2, 2), 1, schedule=schedule, optimizer=optimizer, **options)
