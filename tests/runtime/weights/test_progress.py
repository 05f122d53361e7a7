"""The state of training besides the model, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxpipe.runtime.weights.progress import Progress


class Tied(nn.Module):
    """A parameter with two names, a layer without bias, and a buffer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.inner = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.inner[1].weight = self.first.weight


def test_the_state_has_all_names_of_each_tensor_and_the_constants_of_the_graph() -> None:
    model, constant = Tied(), torch.ones(2)
    state = Progress(model, None, bool).state_of(_graph(constant))
    expected = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        "table": constant,
    }
    assert {name: id(tensor) for name, tensor in state.items()} == {
        name: id(tensor) for name, tensor in expected.items()
    }


def test_without_an_optimizer_no_stage_has_one_and_parameters_hold_the_true_weights() -> None:
    progress = Progress(Tied(), None, bool)
    plan: Any = SimpleNamespace(stages=[None, None])
    assert progress.optimizers is None and progress.optimizers_of(plan) == (None, None)
    assert progress.settings() == [] and progress.weight_versions == []
    with progress.true_weights() as changed:
        assert not changed


def test_batches_count_and_an_end_is_told() -> None:
    progress = Progress(Tied(), None, bool)
    progress.count()
    progress.count()
    assert progress.trained == 2
    progress.end("stage 1 has updated")
    assert progress.ended == "stage 1 has updated"


def _graph(constant: torch.Tensor) -> Any:
    return SimpleNamespace(constants={"table": constant})
