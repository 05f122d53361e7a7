"""Where a line cannot be traced, the smallest submodule around it is called as it is, and told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._functorch.aot_autograd
from torch import Tensor, nn
from torch._higher_order_ops import map as map_
from torch._higher_order_ops import while_loop
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe
from tests.helpers.around import Around
from tests.helpers.profiles import deep
from tests.helpers.unasked import told, train_both

Function = Callable[[Any, Tensor], Any]


class Does(nn.Module):
    """Any function of a layer and the input."""

    def __init__(self, function: Function, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4) if layer is None else layer

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def masks(net: Any, x: Tensor) -> Tensor:
    y, chosen = x.clone(), x[:, 0] > 0
    y[chosen] = net.layer(x[chosen])
    return y


def assigns(net: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = net.layer.bias.sum()  # whose gradient is that of as many entries
    made: Tensor = net.layer(y)
    return made


def branches(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    return y if y.sum() > 0 else -y


def as_array(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    return y + torch.from_numpy(2 * y.detach().numpy())


def packs(net: Any, x: Tensor) -> Tensor:
    lengths = (x[:, 0] > 0).long() + 1
    sequences = x.unsqueeze(1).expand(-1, 3, -1)
    packed = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
    y: Tensor = pad_packed_sequence(net.layer(packed)[0], batch_first=True, total_length=3)[0]
    return y[:, 0]


def asks_a_part(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer.function(net.layer, x)  # it is not called as a module
    return y


def counts(net: Any, x: Tensor) -> Any:
    return x, int((x > 0).sum())


def scales(net: Any, x: Tensor) -> Tensor:
    y, count = net.layer(x)
    made: Tensor = y * count
    return made


def chooses(net: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.sum() > 0, torch.sin, lambda y: y * y, (net.layer(x),))
    return y


def goes_on(net: Any, x: Tensor) -> Tensor:
    start = torch.tensor(0), net.layer(x)
    more: Tensor = while_loop(lambda i, y: y.abs().sum() > i, lambda i, y: (i + 1, y / 2), start)[1]
    return more


def maps(net: Any, x: Tensor) -> Tensor:
    y: Tensor = map_(lambda row, other: row * other, net.layer(x), x[0])  # type: ignore[arg-type]
    return y


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("inner", "leaf"),
    [
        (lambda: Does(masks), "inner"),
        (lambda: Does(asks_a_part, Does(branches)), "inner"),
        (lambda: nn.Sequential(nn.Sequential(Does(branches), nn.Tanh())), "inner.0.0"),
        *deep(
            (lambda: Does(assigns), "inner"),
            (lambda: Does(packs, nn.LSTM(4, 4, batch_first=True)), "inner"),
            (lambda: Does(scales, Does(counts)), "inner"),
        ),
    ],
)
def test_the_smallest_submodule_that_can_be_called_is_and_a_warning_says_so(
    inner: Callable[[], nn.Module],
    leaf: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Around(inner())
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), torch.randn(8, 4))
    (message,) = messages
    assert message.startswith("Around cannot be traced at ")
    assert f"{__file__}:" in message
    assert "its stage alone is not captured into CUDA graphs" in message
    assert f"fxpipe.LeafModules({leaf!r})" in message
    inside, every = (
        sum(p.numel() for p in module.parameters()) for module in (model.get_submodule(leaf), model)
    )
    assert f" is called as it is: {leaf!r}, with {100 * inside / every:.0f} % of the" in message
    assert f", which leaves {100 - 100 * inside / every:.0f} % of them to cut" in message


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        (lambda: (nn.Linear(4, 4), Does(masks), nn.Linear(4, 4)), "33 %"),
        (lambda: (nn.Linear(4, 900), nn.Linear(900, 4), Does(masks), nn.Tanh()), "less than 1 %"),
        (lambda: (nn.Tanh(), Does(masks), nn.Tanh()), "100 %"),
        (lambda: (nn.Linear(4, 4), Does(branches, nn.Tanh()), nn.Tanh()), "0 %"),
    ],
)
def test_the_warning_says_which_share_of_the_parameters_is_called(
    parts: Callable[[], Sequence[nn.Module]], share: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    *first, last = parts()
    model = nn.Sequential(OrderedDict(first=nn.Sequential(*first), last=last))
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), torch.randn(8, 4))
    assert f", with {share} of the parameters: no cut falls into it" in messages[0]


@pytest.mark.smoke
@pytest.mark.parametrize("function", [chooses, goes_on, maps])
def test_control_flow_of_torchs_own_is_refused_with_what_to_write(function: Function) -> None:
    options: Any = {"microbatches": 2, "loss": F.mse_loss}
    with (
        fxpipe.compile(Around(Does(function)), 2, **options) as pipe,
        pytest.raises(fxpipe.TraceError, match="write an if or a loop of Python instead"),
    ):
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))


@pytest.mark.smoke
def test_submodules_of_one_class_become_leaves_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []

    def capture(stack: Any, whole: Any, inputs: Any) -> Any:
        traces.append(type(whole._held[0]).__name__)
        return original(stack, whole, inputs)

    name = "torch._functorch.aot_autograd.aot_export_joint_with_descriptors"
    original = torch._functorch.aot_autograd.aot_export_joint_with_descriptors
    monkeypatch.setattr(name, capture)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(4), Does(branches)) for _ in range(4)]
    model, cuts = Around(nn.Sequential(*layers)), ["inner.2", "last"]
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), torch.randn(8, 4), partition=cuts)
    # it fails as under torch.compile and as under torch.export; then the micro-batches of a whole
    # batch, and those of a partial one
    assert traces == ["Around"] * 4
    (message,) = messages
    assert "called as it is: 'inner.0.1', 'inner.1.1', 'inner.2.1', …, with" in message
    assert "fxpipe.LeafModules(Does)" in message


def test_what_is_marked_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with told(caplog) as messages:
        train_both(
            Around(Does(branches)),
            torch.randn(8, 4),
            torch.randn(8, 4),
            extensions=[fxpipe.LeafModules("inner")],
        )
    assert messages == []


class Words(nn.Module):
    """Class probabilities of an adaptive softmax, a named tuple, after an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, max_norm=0.5)
        self.last = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.tanh(self.embedding(x)), x).loss
        return loss


def test_adaptive_softmax_and_scaled_embeddings_train_as_by_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Words()
    weights = model.embedding.weight.detach().clone()
    x = torch.randint(10, (8,))
    with told(caplog) as messages:
        fxpipe.compile(model, 2 * ["cpu"], partition=["last"], example=((x,), {})).close()
    assert torch.equal(model.embedding.weight, weights)  # compiling scales no row
    assert ["called as it is: 'last'," in m for m in messages] == [True, False]
    assert ["called as it is: 'embedding'," in m for m in messages] == [False, True]
    train_both(model, x, x, lambda made, x: made)


@pytest.mark.smoke
def test_a_loss_that_cannot_be_traced_is_called_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def ctc(made: Tensor, words: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        chances = made.unflatten(1, (6, 4)).transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(chances, words, lengths, counts)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24))
    words = torch.randint(1, 4, (8, 3)), torch.full((8,), 6), torch.randint(1, 4, (8,))
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), words, ctc, partition=["2"])
    assert [m.split(" at ")[0] for m in messages] == ["the loss cannot be traced"]
