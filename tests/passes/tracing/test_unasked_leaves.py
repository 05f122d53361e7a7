"""Where a line cannot be traced, the smallest submodule around it is called as it is, and told."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as map_
from torch._higher_order_ops import while_loop
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe
import fxpipe.passes.tracing.trace
from fxpipe.errors import ExecutionError, PartitionError
from fxpipe.random.generators import mix
from fxpipe.random.leaf_draws import SeededDraws, draw_from
from tests.helpers.around import Around
from tests.oracles import loop

# torch.cond's own, in any model
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

Function = Callable[[Any, Tensor], Any]


class Does(nn.Module):
    """Any function of a layer and the input."""

    def __init__(self, function: Function, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4) if layer is None else layer

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@contextmanager
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The library's warnings so far."""
    caplog.clear()
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, "fxpipe"):
        yield messages
    messages += [r.getMessage() for r in caplog.records if r.name == "fxpipe"]


def train_both(
    model: nn.Module, x: Tensor, target: Any, loss: Any = F.mse_loss, **options: Any
) -> None:
    """Three steps of a pipeline and the plain loop, with an optimizer."""
    options = {"partition": ["last"], **options}
    alone = copy.deepcopy(model)
    devices = len(options["partition"]) + 1
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    with fxpipe.compile(
        model,
        devices * ["cpu"],
        microbatches=2,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        **options,
    ) as pipe:
        for rows in (8, 8, 7):
            parts = tuple(t[:rows] for t in target) if isinstance(target, tuple) else target[:rows]
            made = pipe.step(x[:rows], target=parts)
            expected = loop.train(alone, 2, x[:rows], loss=loss, target=parts)
            theirs.step()
            theirs.zero_grad()
            assert torch.equal(made, expected.loss)
    loop.assert_same(model.state_dict(), alone.state_dict())


def masks(net: Any, x: Tensor) -> Tensor:
    y, chosen = x.clone(), x[:, 0] > 0
    y[chosen] = net.layer(x[chosen])
    return y


def reads(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x) * x[x > 0].mean()
    return y


def branches(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    return y if y.sum() > 0 else -y


def as_array(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    return y + torch.from_numpy(2 * y.detach().numpy())


def differentiates(net: Any, x: Tensor) -> Tensor:
    made: Tensor = torch.func.grad(lambda z: net.layer(z).tanh().sum())(x)
    return made


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


def chooses_layers(net: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.sum() > 0, net.layer, torch.tanh, (x,))
    return y


def goes_on(net: Any, x: Tensor) -> Tensor:
    start = torch.tensor(0), net.layer(x)
    more: Tensor = while_loop(lambda i, y: y.abs().sum() > i, lambda i, y: (i + 1, y / 2), start)[1]
    return more


def goes_on_unrecorded(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = goes_on(net, x)
    y: Tensor = net.layer(x) * factor
    return y


def maps(net: Any, x: Tensor) -> Tensor:
    y: Tensor = map_(lambda row, other: row * other, net.layer(x), x[0])  # type: ignore[arg-type]
    return y


@pytest.mark.parametrize(
    ("inner", "leaf", "tracer"),
    [
        (lambda: Does(masks), "inner", "export"),
        (lambda: Does(reads), "inner", "export"),
        (lambda: Does(as_array), "inner", "export"),
        (lambda: Does(differentiates), "inner", "export"),
        (lambda: Does(packs, nn.LSTM(4, 4, batch_first=True)), "inner", "export"),
        (lambda: Does(asks_a_part, Does(branches)), "inner", "export"),
        (lambda: Does(scales, Does(counts)), "inner", "export"),
        (lambda: nn.Sequential(nn.Sequential(Does(branches), nn.Tanh())), "inner.0.0", "export"),
        (lambda: Does(chooses), "inner", "export"),
        (lambda: Does(goes_on_unrecorded), "inner", "export"),
        (lambda: Does(maps), "inner", "export"),
        (lambda: Does(chooses), "inner", "symbolic"),
        (lambda: Does(as_array), "inner", "symbolic"),
        (lambda: Does(asks_a_part, Does(branches)), "inner", "symbolic"),
        (lambda: nn.Sequential(nn.Sequential(Does(branches), nn.Tanh())), "inner.0.0", "symbolic"),
    ],
)
def test_the_smallest_submodule_that_can_be_called_is_and_a_warning_says_so(
    inner: Callable[[], nn.Module], leaf: str, tracer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Around(inner())
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), torch.randn(8, 4), tracer=tracer)
    (message,) = messages
    assert message.startswith("Around cannot be traced at ")
    assert f"{__file__}:" in message
    assert "autograd drives backward in every stage" in message
    assert f"leaf_modules=[{leaf!r}]" in message


def test_stages_with_control_flow_of_torchs_own_trace_in_turns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*map(Does, (chooses, goes_on, chooses_layers)), nn.Linear(4, 4))
    alone = copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    with fxpipe.compile(
        model, 3 * ["cpu"], microbatches=4, loss=F.mse_loss, partition=["1", "2"]
    ) as pipe:
        made = pipe.step(x, target=y)
        assert torch.equal(made, loop.train(alone, 4, x, loss=F.mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_what_is_drawn_in_a_branch_is_the_microbatchs() -> None:
    def draws(net: Any, x: Tensor) -> Tensor:
        noise = torch.cond(x.sum() > 0, torch.rand_like, torch.randn_like, (x.detach(),))
        y: Tensor = net.layer(x) * noise
        return y

    losses = []
    for cuts in (["inner"], ["inner", "last"]):
        torch.manual_seed(0)
        model, x = Around(Does(draws)), torch.randn(8, 4)
        with fxpipe.compile(
            model, (len(cuts) + 1) * ["cpu"], microbatches=4, loss=F.mse_loss, partition=cuts
        ) as pipe:
            torch.manual_seed(0)
            losses.append([pipe.step(x, target=x) for _ in range(2)])
    (first, second), again = losses
    assert torch.equal(torch.stack([first, second]), torch.stack(again))
    assert not torch.equal(first, second)


def test_submodules_of_one_class_become_leaves_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []

    def trace(model: nn.Module, *args: Any, **options: Any) -> Any:
        traces.append(type(model).__name__)
        return original(model, *args, **options)

    original = fxpipe.passes.tracing.trace.trace
    monkeypatch.setattr("fxpipe.passes.tracing.trace.trace", trace)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(4), Does(branches)) for _ in range(4)]
    model, cuts = Around(nn.Sequential(*layers)), ["inner.2", "last"]
    with told(caplog) as messages:
        train_both(model, torch.randn(8, 4), torch.randn(8, 4), partition=cuts)
    # it fails once; micro-batches of 4 come alone, and then with those of 3
    assert traces == ["Around"] * 4
    (message,) = messages
    assert "4 submodules, 'inner.0.1' …, are therefore called as they are" in message
    assert "leaf_modules=[Does]" in message


def test_what_is_marked_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with told(caplog) as messages:
        train_both(
            Around(Does(branches)), torch.randn(8, 4), torch.randn(8, 4), leaf_modules=["inner"]
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
    assert [m.split(" is therefore")[0].split()[-1] for m in messages] == ["'last'", "'embedding'"]
    train_both(model, x, x, lambda made, x: made)


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


def drops_layers(net: Any, x: Tensor) -> Tensor:
    for layer in net.layer:
        if net.training and torch.rand([]) < 0.5:
            continue
        x = torch.tanh(layer(x))
    return x


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def test_layers_are_dropped_by_the_seed_of_the_microbatch() -> None:
    torch.manual_seed(0)
    model = Around(Does(drops_layers, layers()))
    alone = copy.deepcopy(model)
    numbers = iter(range(100))

    def begin(module: nn.Module, args: Any) -> None:
        draw_from(None, torch.tensor(mix(seed, next(numbers))), 0)

    alone.inner.register_forward_pre_hook(begin)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=4, loss=F.mse_loss, partition=["inner"]
    ) as pipe:
        for step in range(3):
            torch.manual_seed(step)
            made = pipe.step(x, target=y)
            torch.manual_seed(step)
            seed = int(torch.randint(2**62, (), dtype=torch.int64))
            numbers = iter(range(4))
            with SeededDraws():
                expected = loop.train(alone, 4, x, loss=F.mse_loss, target=y)
            assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_leaf_that_an_earlier_call_was_cut_in_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model = Around(Does(drops_layers, layers()))
    x = torch.randn(8, 4)
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss, partition=["inner.layer.2"]
    ) as pipe:
        pipe.eval()
        with torch.no_grad():
            before = pipe(x)
        pipe.train()
        with pytest.raises(PartitionError, match=r"'inner' is called as it is.*leaf_modules="):
            pipe.step(x, target=x)
        pipe.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), before)


def picks(net: Any, x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def picks_some(net: Any, x: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    return x[chosen] if chosen.any() else x


class Shares(Around):
    """Divides by a number of rows, which would be a constant in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        share: Tensor = self.last(y).sum() / y.shape[0]
        return share


def step(model: nn.Module, x: Tensor) -> None:
    with fxpipe.compile(
        model,
        2 * ["cpu"],
        microbatches=2,
        partition=["last"],
        loss=lambda made, y: made.sum().sum(),
    ) as pipe:
        pipe.step(x, target=x)


@pytest.mark.parametrize("function", [picks, picks_some])
def test_a_size_that_depends_on_values_and_leaves_the_leaf_is_refused(function: Function) -> None:
    torch.manual_seed(0)
    model = Shares(Does(function))
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.first.bias.zero_()
    x = torch.ones(8, 4)
    x[:5, 0] = -1
    x[3] = 1
    before = copy.deepcopy(model.state_dict())
    if function is picks:  # no submodule holds all of it, and what follows is not cut
        with pytest.raises(PartitionError, match="'last' computes nothing"):
            step(model, x)
    else:
        message = r"leaf module 'inner' returns a tensor of size \[3, 4\], and returned \[1, 4\]"
        with pytest.raises(ExecutionError, match=message):
            step(model, x)
    loop.assert_same(model.state_dict(), before)


class Counted(Around):
    """Uses a number that its submodule returns, in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return torch.relu(self.last(self.first(x)))
        y, count = self.inner(self.first(x))
        made: Tensor = self.last(y) * count
        return made


def test_a_leaf_that_the_rest_of_forward_makes_needless_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(8, 4)
    with (
        told(caplog) as messages,
        fxpipe.compile(Counted(Does(counts)), 2 * ["cpu"], microbatches=2, loss=F.mse_loss) as pipe,
    ):
        pipe.step(x, target=x)
        pipe.eval()
        pipe(x)
    assert [m.count("What forward does after its call of 'first'") for m in messages] == [1]


class Masked(Does):
    """Takes a mask, or none."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.function(self, x if mask is None else x + mask)


class Asks(Around):
    """Takes other ways when it is traced, as models do to spare masks; one cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling()
        y = self.inner(self.first(x), torch.zeros(4) if traced else None)
        if traced and not torch.compiler.is_exporting() and y.sum() > 0:
            y = y * 1
        made: Tensor = self.last(y)
        return made


def test_a_leaf_may_get_a_mask_when_it_is_traced_that_it_does_not_get_when_it_runs() -> None:
    torch.manual_seed(0)
    train_both(Asks(Masked(branches)), torch.randn(8, 4), torch.randn(8, 4))
