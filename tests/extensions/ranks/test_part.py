"""A model of which a process has a part gives no tensor without data away unnoticed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from fxpipe.errors import InputError
from fxpipe.extensions.ranks.part import refuse_state, refusing
from fxpipe.torchtools.part import state_in_part


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.there = nn.Linear(2, 2, device="meta")
        self.register_buffer("table", torch.empty(2, device="meta"), persistent=False)

    def names(self) -> list[str]:
        return [name for name, _ in self.named_parameters()]

    def norm(self) -> float:
        return sum(float(p.detach().norm()) for p in self.parameters())


def parted() -> Model:
    model = Model()
    refuse_state(model, [*model.there.parameters(), *model.buffers()])
    return model


def test_a_state_dict_with_tensors_without_data_is_refused_by_name() -> None:
    model = parted()
    with pytest.raises(InputError, match=r"'there\.weight' has no data.*full=True"):
        model.state_dict()
    with pytest.raises(InputError, match=r"'model\.there\.weight'"):
        nn.ModuleDict({"model": model}).state_dict()
    assert [*model.here.state_dict()] == ["weight", "bias"]


def test_it_is_returned_where_the_caller_asks_for_a_part() -> None:
    model = parted()
    with state_in_part():
        assert len(model.state_dict()) == 4
        other: list[str] = []

        def elsewhere() -> None:
            try:
                model.state_dict()
            except InputError:
                other.append("refused")

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert other == ["refused"]  # the other thread did not ask
    with pytest.raises(InputError):
        model.state_dict()


def test_once_the_data_is_there_the_state_dict_is_whole() -> None:
    model = parted()
    model.there.to_empty(device="cpu")
    assert len(model.state_dict()) == 4  # the table is in no state dict


def test_a_method_that_computes_with_what_is_lacking_is_refused_and_others_run() -> None:
    model = parted()
    assert refusing(model, model.names)() == model.names()
    with pytest.raises(InputError, match=r"norm\(\) of the model computes with 'there\.weight'"):
        refusing(model, model.norm)()
    assert refusing(model, 5) == 5
