"""What a model writes without its graph telling is written all the same, or refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.profiles import DEEP, deep
from tests.oracles import loop


class Net(nn.Module):
    """Two layers, and anything between them."""

    mean: Tensor

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.extra = nn.Linear(6, 6)
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(6))
        self.plain = torch.zeros(6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.between(self, self.first(x)).tanh())
        return made


def step_as_the_loop(model: nn.Module, schedule: str, sizes: Sequence[int] = (6,)) -> None:
    """With a second size there is a graph for all."""
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model, 2 * ["cpu"], schedule=schedule, microbatches=3, loss=F.cross_entropy
    ) as pipe:
        for rows in (6, 7, 3) if DEEP else sizes:
            x, target = torch.randn(rows, 6), torch.randint(3, (rows,))
            made = pipe.step(x, target=target)
            expected = loop.train(alone, 3, x, loss=F.cross_entropy, target=target)
            assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(model.state_dict(), alone.state_dict())


def normed(net: Any, x: Tensor) -> Any:
    return net.norm(x.view(-1, 3, 2)).reshape(-1, 6)


def normed_beside_a_write_through_a_view(net: Any, x: Tensor) -> Any:
    y = normed(net, x)
    y.view(-1, 2, 3)[:, 0].add_(1)  # this PyTorch itself makes functional
    return normed(net, y)


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "zb-h1"])
@pytest.mark.parametrize("between", [normed, normed_beside_a_write_through_a_view])
def test_instance_norms_running_statistics_are_the_loops(between: Any, schedule: str) -> None:
    model = Net(between)
    step_as_the_loop(model, schedule, (6, 7, 3))
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.any()


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "zb-h1"])
@pytest.mark.parametrize("affine", [True, False])
def test_batchnorms_that_average_over_all_batches_are_the_loops(
    affine: bool, schedule: str
) -> None:
    step_as_the_loop(
        nn.Sequential(
            nn.Unflatten(1, (3, 2)),
            nn.BatchNorm1d(3, momentum=None, affine=affine),
            nn.Linear(2, 2),
            nn.BatchNorm1d(3, momentum=None),
            nn.Flatten(),
            nn.Linear(6, 3),
        ),
        schedule,
    )


def test_statistics_that_stand_for_two_are_written_as_in_the_loop() -> None:
    def between(net: Any, x: Tensor) -> Any:
        return F.instance_norm(torch.stack([x, -x], 2), net.mean, net.mean).sum(2)

    step_as_the_loop(Net(between), "1f1b")


@torch.library.custom_op("fxpipe_tests::secretly", mutates_args=())
def secretly(mean: Tensor) -> Tensor:
    mean.add_(1)
    return mean + 0


secretly.register_fake(torch.empty_like)


def test_a_write_that_an_operation_does_not_tell_is_noticed_by_comparison() -> None:
    def between(net: Any, x: Tensor) -> Any:
        return x + secretly(net.mean)

    model = Net(between)
    with pytest.raises(fxpipe.TraceError, match="written to the buffer 'mean'"):
        step_as_the_loop(model, "1f1b")


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "zb-h1"])
def test_a_function_mapped_over_weights_trains_as_by_the_loop(schedule: str) -> None:
    def between(net: Any, x: Tensor) -> Any:
        weights = torch.stack([net.extra.weight, net.first.weight])
        rows = torch.vmap(lambda w: x @ w)(weights).sum(0)
        return torch.vmap(lambda row: row * row.sum())(rows)

    step_as_the_loop(Net(between), schedule)


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "zb-h1"])
def test_a_layer_mapped_over_rows_trains_as_by_the_loop(schedule: str) -> None:
    def between(net: Any, x: Tensor) -> Any:
        return torch.vmap(lambda row: net.extra(row) * row.sum())(x)

    step_as_the_loop(Net(between), schedule, (6, 7))


@pytest.mark.parametrize(
    "between",
    [
        lambda net, x: x + F.one_hot(x.argmax(1), 6),
        lambda net, x: x[:, torch.arange(5, -1, -1)] + x.gather(1, x.argsort(1)),
        lambda net, x: x[torch.arange(len(x)), x.argmax(1), None] + x,
    ],
    ids=["classes", "columns", "entries"],
)
def test_what_is_chosen_by_whole_numbers_is_traced(
    between: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(between)
    step_as_the_loop(model, "1f1b", (6, 7))
    assert "cannot be traced" not in caplog.text


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "zb-h1"])
def test_data_is_read_and_a_buffers_data_is_written_as_by_the_loop(schedule: str) -> None:
    def between(net: Any, x: Tensor) -> Any:
        net.mean.data.mul_(0.9).add_(x.data.mean(0))
        return net.extra(x) @ net.first.weight.data - net.mean

    step_as_the_loop(Net(between), schedule, (6, 7))


def write_plain(net: Any, x: Tensor) -> Any:
    net.plain.copy_(x.detach().mean(0))
    return x - net.plain


def write_parameter(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        net.extra.weight.clamp_(-0.1, 0.1)
    made = net.extra(x)
    return made


def write_value(net: Any, x: Tensor) -> Any:
    made = x * net.extra.weight[0]
    x.data.mul_(1 + 1e-6)  # as the gradient of the weight will read it
    return made


def clamp(net: Any, x: Tensor) -> Any:
    net.extra.weight.data.clamp_(-0.1, 0.1)
    return net.extra(x)


def assign(net: Any, x: Tensor) -> Any:
    net.mean.data = x.detach().mean(0)
    return x - net.mean


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (
            write_plain,
            "in write_plain: .* is no buffer of the model.*register_buffer",
        ),
        (write_parameter, r"writes into its parameter 'extra\.weight' while it runs"),
        (write_value, r"test_hidden_writes\.py:\d+, in write_value: x\.data\.mul_.*a copy"),
        (clamp, r"test_hidden_writes\.py:\d+, in clamp: net\.extra\.weight\.data\.clamp_"),
        (assign, r"test_hidden_writes\.py:\d+, in assign: net\.mean\.data = .*no_grad"),
    ],
)
def test_what_no_graph_can_write_is_refused_by_name(between: Any, message: str) -> None:
    with pytest.raises(fxpipe.TraceError, match=message):
        step_as_the_loop(Net(between), "1f1b")


def centre(net: Any, x: Tensor) -> Any:
    """As observers of quantisation do: what is measured decides the shape."""
    net.mean.resize_(6).mul_(0.5).add_(x.detach().mean(0))
    return x - net.mean


def replace_centre(net: Any, x: Tensor) -> Any:
    net.mean = x.detach().mean(0)
    return x - net.mean


@pytest.mark.parametrize("between", [centre, replace_centre])
def test_a_buffer_that_gets_its_shape_when_the_model_runs_is_refused_until_it_has_run(
    between: Any,
) -> None:
    torch.manual_seed(0)
    model = Net(between)
    model.mean = torch.zeros(1)
    with pytest.raises(
        fxpipe.TraceError, match=r"buffer 'mean' has the shape \[1\] and gets \[6\]"
    ):
        step_as_the_loop(model, "1f1b")
    assert model.mean.shape == (1,)


def test_a_model_that_is_trained_for_quantisation_equals_the_loop() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it will be called one day
        quantization.prepare_qat(model.train(), inplace=True)
    model(torch.randn(6, 6))
    step_as_the_loop(model, "1f1b")


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    with (
        fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.cross_entropy) as pipe,
        pytest.raises(fxpipe.TraceError, match=r"'0\.weight' is torch\.sparse_coo.*sparse=False"),
    ):
        pipe.step(torch.randint(5, (4, 2)), target=torch.randint(3, (4,)))


class Writing(nn.Module):
    """Writes into its input before it reads it."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.write = nn.Linear(16, 16), nn.Linear(16, 3), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        made: Tensor = self.last(self.first(x).tanh() + x)
        return made


def scaled(x: Tensor) -> Any:
    return x.mul_(2)


def rectified(x: Tensor) -> Any:
    return F.relu_(x)


def partly_set(x: Tensor) -> Any:
    x.view(-1)[0] = 1


@pytest.mark.parametrize("write", [scaled, rectified, partly_set])
def test_a_model_that_writes_into_its_input_is_refused_and_that_is_put_back(
    write: Callable[[Tensor], Any],
) -> None:
    x, y = torch.randn(6, 16), torch.randn(6, 3)
    before = x.clone()
    with (
        fxpipe.compile(Writing(write), 2, microbatches=3, loss=F.mse_loss) as pipe,
        pytest.raises(fxpipe.TraceError, match=r"writes into its input 'x'; .*x.clone\(\)"),
    ):
        pipe.step(x, target=y)
    assert torch.equal(x, before)


def test_a_loss_that_writes_into_its_target_is_refused_and_that_is_put_back() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        target.mul_(2)
        return F.mse_loss(output, target)

    x, y = torch.randn(6, 6), torch.randn(6, 3)
    before = y.clone()
    with (
        fxpipe.compile(nn.Linear(6, 3), 1, microbatches=3, loss=loss) as pipe,
        pytest.raises(fxpipe.TraceError, match="writes into its input"),
    ):
        pipe.step(x, target=y)
    assert torch.equal(y, before)
