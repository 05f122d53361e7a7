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


def with_gradients(model: Model) -> Model:
    for parameter in model.here.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_what_needs_all_gradients_is_refused() -> None:
    """Such as a norm to clip by, which would be another one in each process."""
    model = with_gradients(parted())
    with pytest.raises(InputError, match=r"clip_grad_norm_ would see .*optimizer=..., clip_norm="):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(InputError, match=r"GradScaler would see .*optimizer=..., scaler="):
        scaler.step(torch.optim.SGD(model.parameters()))
    assert model.here.bias.grad is not None
    assert model.here.bias.grad.tolist() == [1, 1]


def test_what_needs_each_gradient_by_itself_works() -> None:
    model, plain = with_gradients(parted()), with_gradients(Model())
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters())
        nn.utils.clip_grad_value_(each.parameters(), 0.1)
        optimizer.step()
        assert len(optimizer.state) == 2
        optimizer.zero_grad()
        each.there.weight.grad = torch.ones(2, 2, device="meta")
        del each.there.weight.grad
    assert all(p.grad is None for p in model.parameters())


def test_with_data_again_a_parameter_has_a_gradient_as_any() -> None:
    model = parted()
    model.there.to_empty(device="cpu")
    model.there(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(6**0.5)
