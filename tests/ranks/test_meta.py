"""A model that is built on the meta device trains as the same model built with data.

A rank allocates what its own stages have. The reference is the same model, built on the CPU in one
process after the same seed.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler import options
from tests.helpers.ranks import DeviceMesh, on_ranks

SEED = 5


class Layers(nn.Module):
    """Layers whose constructors draw: the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.layer(self.embed(tokens)))
        logits: Tensor = self.head(self.norm(out[:, -1]))
        return logits


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(11, (8, 5), generator=generator), torch.arange(8)


def compiled(devices: DeviceMesh | int, model: nn.Module, **chosen: Any) -> fxpipe.Pipeline:
    x, y = batch()
    defaults: dict[str, Any] = {
        "microbatches": 4,
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "partition": ["lstm"],
        "example": ((x,), {"target": y}),
    }
    return fxpipe.compile(model, devices, **{**defaults, **chosen})


def without_data(make: Callable[[], nn.Module] = Layers) -> nn.Module:
    with torch.device("meta"):
        return make()


def with_data() -> Layers:
    torch.manual_seed(SEED)
    return Layers()


def trained(pipe: fxpipe.Pipeline) -> dict[str, Any]:
    torch.manual_seed(3)
    x, y = batch()
    losses = [float(pipe.step(x, target=y)) for _ in range(3)]
    pipe.eval()
    output = pipe(x)
    pipe.train()
    return {"losses": losses, "output": output, "state": pipe.state_dict()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert torch.equal(found["output"], expected["output"])
    for name, value in found["state"].items():
        assert torch.equal(value, expected["state"][name]), name


def reset_and_train(mesh: DeviceMesh, whole: int) -> dict[str, Any]:
    options.WHOLE = whole
    model = without_data()
    pipe = compiled(mesh, model)
    torch.manual_seed(SEED + mesh.get_rank())  # rank 0's counts
    pipe.reset_parameters()
    made = trained(pipe)
    made["with data"] = {name for name, p in model.state_dict().items() if not p.is_meta}
    pipe.close()
    return made


@pytest.mark.parametrize("whole", [0, options.WHOLE])
def test_each_rank_draws_the_values_of_the_whole_model_and_keeps_its_own(whole: int) -> None:
    with compiled(2, with_data()) as pipe:
        expected = trained(pipe)
    ranks = on_ranks(2, reset_and_train, whole)
    names: set[str] = set()
    for found in ranks:
        assert_same(found, expected)
        assert found["with data"] == set(found["state"])
        assert not names & set(found["state"])
        names |= set(found["state"])
    assert names == set(expected["state"])


WIDTH, DEPTH = 3072, 16
WEIGHTS = 4 * DEPTH * WIDTH * (WIDTH + 1)
"""The bytes of the weights of a model of so many linear layers; training takes three times that, as
the sums of the gradients and what an update can be undone with are as large."""


def wide_layers() -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*layers)


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def train_within_a_limit(mesh: DeviceMesh, limit: float) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(-8, 1)  # threads share one arena; others reserve space that is unused
    compiled(2, Layers()).close()  # what is imported late is no part of the limit
    most = address_space() + int(limit * WEIGHTS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(int(1.5 * limit * WEIGHTS), dtype=torch.uint8)
    x = torch.ones(8, WIDTH)
    pipe = fxpipe.compile(
        without_data(wide_layers),
        mesh,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=30.0),
        example=((x,), {"target": x}),
    )
    torch.manual_seed(SEED)
    pipe.reset_parameters()
    losses = [float(pipe.step(x, target=x)) for _ in range(3)]
    own = sum(4 * value.numel() for value in pipe.state_dict().values())
    pipe.close()
    return {"losses": losses, "own": own}


@pytest.mark.parametrize(("size", "limit"), [(2, 1.8), (4, 0.95)])
def test_a_model_larger_than_a_process_trains_over_ranks(size: int, limit: float) -> None:
    ranks = on_ranks(size, train_within_a_limit, limit)
    assert sum(found["own"] for found in ranks) == WEIGHTS
    assert 3 * max(found["own"] for found in ranks) < limit * WEIGHTS
    torch.manual_seed(SEED)
    h = torch.ones(8, WIDTH)
    with torch.no_grad():
        for _ in range(DEPTH):  # one layer at a time
            h = F.relu(nn.Linear(WIDTH, WIDTH)(h))
    expected = float(F.mse_loss(h, torch.ones(8, WIDTH)))
    for found in ranks:
        assert found["losses"][0] == pytest.approx(expected, rel=1e-5)
        assert found["losses"] == ranks[0]["losses"]
        assert found["losses"] == sorted(set(found["losses"]), reverse=True)
