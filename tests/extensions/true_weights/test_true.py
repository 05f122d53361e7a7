"""In the block parameters hold their true weights, and behind it what they held before."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.extensions.true_weights.true import true_weights

pytestmark = pytest.mark.smoke


class Predicting(torch.optim.SGD):
    """Its parameters hold twice their true weights."""

    of: Callable[[Tensor], Tensor] = staticmethod(lambda x: x / 2)

    def true_weights(self) -> Mapping[Tensor, Tensor]:
        return {p: type(self).of(p.detach()) for g in self.param_groups for p in g["params"]}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([2.0, 4.0]))


def test_the_true_weights_are_there_in_the_block_alone() -> None:
    one, other = parameter(), parameter()
    with true_weights(Predicting([one])) as changed:
        assert changed == {one}
        assert one.tolist() == [1, 2] and other.tolist() == [2, 4]
        assert one.requires_grad
    assert one.tolist() == [2, 4]


def test_what_is_written_in_the_block_stays() -> None:
    one, two = parameter(), parameter()
    with true_weights(Predicting([one, two])), torch.no_grad():
        one.fill_(7)
    assert one.tolist() == [7, 7] and two.tolist() == [2, 4]


def test_an_error_in_the_block_puts_back_what_was_held() -> None:
    one = parameter()
    with pytest.raises(ZeroDivisionError), true_weights(Predicting([one])):
        raise ZeroDivisionError
    assert one.tolist() == [2, 4]


def test_an_optimizer_that_tells_none_changes_nothing() -> None:
    one = parameter()
    with true_weights(torch.optim.SGD([one], lr=0.1)) as changed:
        assert not changed and one.tolist() == [2, 4]


def test_a_tensor_unlike_the_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predicting, "of", staticmethod(lambda x: x.double()))
    one = parameter()
    with pytest.raises(InputError, match=r"float64.*float32"), true_weights(Predicting([one])):
        raise AssertionError
    assert one.tolist() == [2, 4]
