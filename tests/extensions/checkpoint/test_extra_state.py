"""The extra state of modules is in checkpoints, and is checked like all else in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import CheckpointError

pytestmark = pytest.mark.smoke


class Noted(nn.Linear):
    """It keeps notes, which must be a dict."""

    def __init__(self, notes: Any) -> None:
        super().__init__(4, 4)
        self.notes = notes

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError("notes are a dict")
        self.notes = state


def compiled(model: nn.Module) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        ["cpu"] * 2,
        partition=["1"],
        microbatches=2,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def saved(model: nn.Module, folder: Path) -> None:
    with compiled(model) as pipe:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        pipe.checkpoint(folder / "file")
        pipe.save(folder / "folder")


@pytest.mark.parametrize("form", ["file", "folder"])
def test_extra_state_goes_on(form: str, tmp_path: Path) -> None:
    scale = torch.tensor([2.0, 3.0])
    saved(nn.Sequential(Noted({"seen": 3, "scale": scale}), Noted({"seen": 4})), tmp_path)
    first, second = Noted({}), Noted({"seen": 0})
    with compiled(nn.Sequential(first, second)) as pipe:
        (pipe.restore if form == "file" else pipe.load)(tmp_path / form)
    found: Tensor = first.notes.pop("scale")
    assert torch.equal(found, scale)
    assert (first.notes, second.notes) == ({"seen": 3}, {"seen": 4})


def test_what_a_module_does_not_take_changes_nothing(tmp_path: Path) -> None:
    saved(nn.Sequential(Noted({"seen": 3}), Noted([4])), tmp_path)
    first, second = Noted({"seen": 0}), Noted({"seen": 1})
    model = nn.Sequential(first, second)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with compiled(model) as pipe:
        with pytest.raises(CheckpointError, match=r"module '1' does not take .*notes are a dict"):
            pipe.restore(tmp_path / "file")
        assert pipe.batches == 0
    assert all(map(torch.equal, model.parameters(), before))
    assert (first.notes, second.notes) == ({"seen": 0}, {"seen": 1})
    with (
        compiled(nn.Sequential(nn.Linear(4, 4), Noted({}))) as pipe,
        pytest.raises(CheckpointError, match="its module '0' has extra state"),
    ):
        pipe.load(tmp_path / "folder")


def test_extra_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="modules/0/seen is a set"):
        saved(nn.Sequential(Noted({"seen": {3}}), Noted({})), tmp_path)
