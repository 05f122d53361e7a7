"""Where parameters are while a model is compiled for devices with memory of their own; with real
ones see tests/gpu/test_compile_memory.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe.torchtools.meta import lent


def test_lent_parameters_share_one_memory_and_get_their_own_data_back() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    weight.grad = torch.ones_like(weight)
    before = [
        (x, x.data_ptr(), x.detach().clone()) for x in (*model.parameters(), *model.buffers())
    ]
    with lent(model, [], torch.device("cpu"), apart=True):
        assert len({x.data_ptr() for x in model.parameters()}) == 1
        assert model[0].weight is weight
        assert weight.grad is None
        assert not torch.equal(weight, before[0][2])
        model(torch.randn(8, 16)).sum().backward()
        assert model[1].num_batches_tracked == 1
    for tensor, place, value in before:
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, value)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model[2].weight.grad is None
