"""What a submodule that is called as it is may draw, take and return, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.leaf_modules.draws import SeededDraws
from fxpipe.errors import ExecutionError, TraceError
from fxpipe.random import mix
from tests.helpers.around import Around
from tests.helpers.unasked import train_both
from tests.leaf_modules.test_unasked_leaves import Does, Function, branches
from tests.oracles import loop


def drops_layers(net: Any, x: Tensor) -> Tensor:
    for layer in net.layer:
        if net.training and torch.rand([]) < 0.5:
            continue
        x = torch.tanh(layer(x))
    return x


def drops_rarely_at_first(net: Any, x: Tensor) -> Tensor:
    drops = torch.empty(4).bernoulli_(torch.arange(4) / 4)
    for layer, dropped in zip(net.layer, drops, strict=True):
        x = x if net.training and dropped else torch.tanh(layer(x))
    return x


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def gained(net: Any, x: Tensor) -> Tensor:
    made: Tensor = net.layer(x) * net.layer.weight.gain
    return made


def test_an_attribute_of_a_parameter_is_there_when_its_module_is_called() -> None:
    torch.manual_seed(0)
    model: Any = Around(Does(gained, nn.Linear(4, 4)))
    alone, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        for gain in (2.0, 3.0):
            for each in (model, alone):
                each.inner.layer.weight.gain = gain
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 2, x, loss=F.mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_older_versions_of_a_parameter_have_its_attributes() -> None:
    model: Any = Around(Does(gained, nn.Linear(4, 4)))
    model.inner.layer.weight.gain = 2.0
    alone, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    alone.inner.layer.weight.gain = 2.0  # a copy of a parameter has none
    options: Any = {"schedule": "2bw", "optimizer": lambda own: torch.optim.SGD(own, lr=0.1)}
    with fxpipe.compile(model, 2, microbatches=2, loss=F.mse_loss, **options) as pipe:
        losses = [pipe.step(x, target=y), pipe.step(x, target=y)]  # both read the first version
    expected = loop.train(alone, 2, x, loss=F.mse_loss, target=y).loss
    assert [loss.item() for loss in losses] == [expected.item()] * 2


@pytest.mark.smoke
@pytest.mark.parametrize("drops", [drops_layers, drops_rarely_at_first])
def test_layers_are_dropped_by_the_seed_of_the_microbatch(drops: Function) -> None:
    torch.manual_seed(0)
    model = Around(Does(drops, layers()))
    alone = copy.deepcopy(model)
    numbers, draws = iter(range(100)), SeededDraws(0, 0)

    def begin(module: nn.Module, args: Any) -> None:
        draws.seed, draws.drawn = mix(seed, next(numbers)), 0

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
            with draws:
                expected = loop.train(alone, 4, x, loss=F.mse_loss, target=y)
            assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_leaf_that_an_earlier_call_was_cut_in_takes_its_weights_from_both_stages() -> None:
    torch.manual_seed(0)
    model = Around(Does(drops_layers, layers()))
    alone = copy.deepcopy(model)
    x = torch.randn(8, 4)
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss, partition=["inner.layer.2"]
    ) as pipe:
        pipe.eval()
        with torch.no_grad():
            before = pipe(x)
        pipe.train()
        torch.manual_seed(1)
        loss = pipe.step(x, target=x)
        pipe.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), before)
    leaf = [fxpipe.LeafModules("inner")]
    with fxpipe.compile(alone, 1, microbatches=2, loss=F.mse_loss, extensions=leaf) as pipe:
        torch.manual_seed(1)
        assert torch.equal(pipe.step(x, target=x), loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


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


@pytest.mark.smoke
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
    message = r"leaf module 'inner' returns a tensor of size \[3, 4\], and returned \[1, 4\]"
    with pytest.raises(ExecutionError, match=message):
        step(model, x)
    loop.assert_same(model.state_dict(), before)


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


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=1) if x.sum() < 100 else x


def test_a_model_with_leaves_may_be_called_in_inference_mode_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Clamps())
    given = [fxpipe.LeafModules(Clamps)]
    options: Any = {"loss": F.mse_loss, "extensions": given}
    with fxpipe.compile(model, 1, microbatches=2, **options) as pipe, torch.inference_mode():
        x = torch.randn(4, 4)
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


class Quantises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)


class Restores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.dequantize()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_stays_inside_of_a_leaf() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Quantises(), Restores()))
    options: Any = {"loss": F.mse_loss, "microbatches": 2}
    apart = fxpipe.compile(
        model, 1, extensions=[fxpipe.LeafModules(Quantises, Restores)], **options
    )
    with apart, torch.no_grad(), pytest.raises(TraceError, match="quantised"):
        apart(torch.ones(4, 4))
    with (
        fxpipe.compile(model, 1, extensions=[fxpipe.LeafModules("1")], **options) as pipe,
        torch.no_grad(),
    ):
        assert torch.equal(pipe(torch.ones(4, 4)), model(torch.ones(4, 4)))


class Balanced(nn.Linear):
    """Keeps a term of the loss, as a router of experts may, for the model to add up."""

    def __init__(self, kept: bool) -> None:
        super().__init__(4, 4)
        self.terms = [torch.full((), 0.5)] if kept else []
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.kept:
            self.terms = [y.square().mean()]
        return y


class Adding(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.first, self.last = Balanced(kept), Balanced(kept)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).tanh())
        loss: Tensor = y.square().mean() + 1e-5 * (self.first.terms[0] + self.last.terms[0])
        return loss


def test_what_a_leaf_sets_in_every_call_is_read_by_no_code_outside_of_it() -> None:
    """What it adds to the loss is too little for the graph's values to tell."""
    given = [fxpipe.LeafModules(Balanced)]
    options: Any = {"microbatches": 2, "extensions": given}
    with (
        fxpipe.compile(Adding(kept=False), 1, **options) as pipe,
        pytest.raises(TraceError, match=r"'first' sets its attribute 'terms' in every call"),
    ):
        pipe.step(torch.ones(4, 4))
    model = Adding(kept=True)
    alone, x = copy.deepcopy(model), torch.randn(4, 4)
    with fxpipe.compile(model, 1, **options) as pipe:
        assert torch.equal(pipe.step(x), loop.train(alone, 2, x, loss=lambda out: out).loss)
