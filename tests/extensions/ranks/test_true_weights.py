"""True weights over ranks: each rank tells those of its own stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fxpipe
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles.delayed_loop import MSE
from tests.runtime.test_true_weights import MICROBATCHES, Predicted, Weights, made, of, same


def trained(mesh: DeviceMesh, folder: Path) -> tuple[Weights, Tensor, list[bool]]:
    """The weights after training, an output by them, and whether it goes on from the folder, and
    from a state dict, as it should."""
    model, data = made(6)
    options: dict[str, Any] = {"schedule": "2bw", "partition": ["2"], "loss": MSE}
    options |= {"microbatches": MICROBATCHES, "optimizer": of("xpipe")}
    with fxpipe.compile(model, mesh, **options) as pipe:

        def after(batches: list[tuple[Tensor, Tensor]]) -> Weights:
            for x, y in batches:
                pipe.step(x, target=y)
            return {name: t.clone() for name, t in pipe.state_dict(full=True).items()}

        weights = after(data)
        with torch.no_grad():
            output = pipe(data[0][0])
        pipe.save(folder)
        later = after(data[:2])
        pipe.load(folder)
        again = after(data[:2])
        pipe.load_state_dict(weights)
        loaded = after([])
        return weights, output, [same(again, later), same(loaded, weights)]


def test_each_rank_shows_saves_and_loads_the_true_weights_of_its_stages(tmp_path: Path) -> None:
    model, data = made(6)
    expected = Predicted(model, "xpipe")
    for x, y in data:
        expected.step(x, y)
    expected.hold(expected.true[-1])
    with torch.no_grad():
        parts = data[0][0].chunk(MICROBATCHES)
        alone = torch.cat([expected.model(part) for part in parts])
    for weights, output, goes_on in on_ranks(2, trained, tmp_path / "run"):
        assert same(weights, expected.true[-1])
        assert torch.equal(output, alone)
        assert goes_on == [True, True]
    dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
    assert same(torch.load(tmp_path / "run.pt")["model"], expected.true[-1])
