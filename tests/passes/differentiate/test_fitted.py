"""What runs in place of operations gives the same, for tensors of any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpipe.passes.differentiate.fitted import FITTED

aten = torch.ops.aten
GROUPS = 2


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same tensor in other memory."""
    match how:
        case "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        case "wide":
            return torch.stack([x, x], -1)[..., 0]
        case "turned":
            return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    return x.clone()


@pytest.mark.parametrize("how", ["dense", "channels last", "wide", "turned"])
@pytest.mark.parametrize("other", ["dense", "channels last", "wide", "turned"])
def test_a_group_norm_takes_any_strides(how: str, other: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64)
    gradient = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 4, generator=generator, dtype=torch.float64).unbind()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = torch.group_norm(leaves[0], GROUPS, leaves[1], leaves[2])
    wanted = torch.autograd.grad(expected, leaves, gradient)
    sizes = (3, 4, 30, GROUPS)
    forward, backward = (
        FITTED[op.default] for op in (aten.native_group_norm, aten.native_group_norm_backward)
    )
    given = laid_out(x, how)
    made, mean, scale = forward(given, weight, bias, *sizes, 1e-5)
    torch.testing.assert_close(made, expected.detach())
    found = backward(
        laid_out(gradient, other), given, mean, scale, weight, *sizes, [True, True, True]
    )
    for one, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, there)


def test_a_view_is_one_of_any_strides() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(FITTED[aten.view.default](x, [6]), x.reshape(6))
    with pytest.raises(RuntimeError):
        aten.view.default(x, [6])


def test_who_asks_for_the_schema_sees_pytorchs() -> None:
    for op in (aten.native_group_norm, aten.native_group_norm_backward):
        assert FITTED[op.default].__wrapped__ is op.default
