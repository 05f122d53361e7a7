"""BatchNorm's running statistics, updated once a step by those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError, TraceError
from fxpipe.extensions.deferred_batchnorm.moments import gather
from tests.oracles import loop


def net(momentum: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    ).double()


def batch(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=random) * 3 + 5
    return x, torch.randn(samples, 2, dtype=torch.float64, generator=random)


def step(model: nn.Module, microbatches: int, x: Tensor, y: Tensor, **options: Any) -> None:
    options = {"devices": ["cpu"] * 2, **options}
    options["extensions"] = ["deferred_batchnorm", *options.get("extensions", ())]
    with fxpipe.compile(model, microbatches=microbatches, loss=mse_loss, **options) as pipe:
        pipe.step(x, target=y)


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_first_layers_statistics_are_those_of_one_whole_batch(schedule: str) -> None:
    model, alone = net(), net()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=4,
        loss=mse_loss,
        schedule=schedule,
        extensions=["deferred_batchnorm"],
    ) as pipe:
        for seed, samples in enumerate((8, 9, 11, 23, 8)):
            x, y = batch(samples, seed)
            pipe.step(x, target=y)
            alone[0](x)  # PyTorch itself, on the batch in one
    loop.assert_same(dict(model[0].named_buffers()), dict(alone[0].named_buffers()), 1e-12)
    assert model[0].num_batches_tracked == 5


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_the_next_layers_are_those_of_all_that_they_were_given(microbatches: int) -> None:
    """Normalisation stays per micro-batch: what reaches the second layer is not what one whole
    batch would send there, and its statistics are those of what does."""
    model, alone = net(), net()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=microbatches,
        loss=mse_loss,
        extensions=["deferred_batchnorm"],
    ) as pipe:
        for seed in range(3):
            x, y = batch(9, seed)
            pipe.step(x, target=y)
            parts = [alone[1](normalised(alone[0], part)) for part in x.tensor_split(microbatches)]
            update(alone[2], torch.cat(parts).detach())
            update(alone[0], x)
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()), 1e-12)


def normalised(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def update(norm: Any, x: Tensor) -> None:
    """By the formula, not by PyTorch."""
    dims = [0, *range(2, x.dim())]
    norm.running_mean += norm.momentum * (x.mean(dims) - norm.running_mean)
    norm.running_var += norm.momentum * (x.var(dims) - norm.running_var)
    norm.num_batches_tracked += 1


def test_gradients_and_losses_are_as_without() -> None:
    x, y = batch(9)
    model, alone = net(), net()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=4,
        loss=mse_loss,
        extensions=["deferred_batchnorm"],
    ) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 4, x, loss=mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_images_count_their_pixels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    alone = copy.deepcopy(model)
    x = torch.randn(5, 3, 6, 6) * torch.arange(1.0, 6.0)[:, None, None, None]
    step(model, 5, x, torch.randn(5, 32))
    alone[0](x)
    torch.testing.assert_close(model[0].running_var, alone[0].running_var)
    torch.testing.assert_close(model[0].running_mean, alone[0].running_mean)


def test_a_batch_of_5_in_4_micro_batches_commits_as_torchgpipes_does_not() -> None:
    """There 4 chunks of 5 samples make 3 micro-batches, and the statistics never change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    alone = copy.deepcopy(model)
    x = torch.randn(5, 4, 2, 2)
    step(model, 4, x, torch.randn(5, 2))
    alone(x)
    torch.testing.assert_close(model[0].running_mean, alone[0].running_mean)
    torch.testing.assert_close(model[0].running_var, alone[0].running_var)
    assert model[0].num_batches_tracked == 1


class Twice(nn.Module):
    """One BatchNorm that is called at two depths; in three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        y: Tensor = self.last(self.norm(self.middle(h)))
        return y


def test_a_module_called_twice_is_updated_twice_in_the_order_of_its_calls() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    alone = copy.deepcopy(model)
    x, y = batch(8)
    step(model, 3, x, y, devices=["cpu"] * 3, partition=["middle", "last"])
    parts = [alone.first(part) for part in x.tensor_split(3)]
    deeper = [alone.middle(normalised(alone.norm, part).relu()) for part in parts]
    update(alone.norm, torch.cat(parts).detach())
    update(alone.norm, torch.cat(deeper).detach())
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()), 1e-12)


def test_a_call_that_trains_updates_once_and_evaluation_not_at_all() -> None:
    model, alone = net(), net()
    x, _ = batch(9)
    with fxpipe.compile(
        model, ["cpu"] * 2, microbatches=3, extensions=["deferred_batchnorm"]
    ) as pipe:
        pipe(x)
        assert model[0].num_batches_tracked == 1
        with torch.no_grad():
            pipe(x)
        assert model[0].num_batches_tracked == 2
        before = {name: value.clone() for name, value in model.named_buffers()}
        output = pipe.eval()(x)
        loop.assert_same(dict(model.named_buffers()), before)
    update(alone[0], x)
    update(alone[0], x)
    torch.testing.assert_close(model[0].running_var, alone[0].running_var)
    torch.testing.assert_close(output, model.eval()(x))


@pytest.mark.parametrize(
    ("model", "extensions"),
    [
        (net(), [fxpipe.LeafModules(nn.Linear)]),
        # its updates are counted in a tensor, which no graph can read
        (nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)).double(), []),
    ],
)
def test_a_model_with_modules_that_are_called_as_they_are_is_refused(
    model: nn.Module, extensions: list[Any]
) -> None:
    with pytest.raises(TraceError, match="leave out DeferredBatchNorm, or what is called as it is"):
        step(model, 3, *batch(8), extensions=extensions)


def test_a_frozen_norm_stays_as_it_is() -> None:
    model = net()
    model[0].eval()
    before = {name: value.clone() for name, value in model[0].named_buffers()}
    step(model, 3, *batch(8))
    loop.assert_same(dict(model[0].named_buffers()), before)
    assert model[2].num_batches_tracked == 1


def test_a_failed_step_leaves_the_statistics() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.named_buffers()}
    x, y = batch(8)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    with pytest.raises(fxpipe.ExecutionError):
        step(model, 3, x, y, optimizer=lambda parameters: Failing(parameters, lr=0.1))
    loop.assert_same(dict(model.named_buffers()), before)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=6), st.integers(0, 99))
def test_gathered_moments_are_those_of_everything(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    parts = [torch.randn(size, 3, 2, dtype=torch.float64) + 1e6 for size in sizes]
    moments = torch.zeros(3, 3, dtype=torch.float64)
    for part in parts:
        moments = gather(moments, part, part.mean((0, 2)), part.var((0, 2)))
    whole = torch.cat(parts)
    count, mean, squares = moments
    assert count.tolist() == [2 * sum(sizes)] * 3
    torch.testing.assert_close(mean, whole.mean((0, 2)))
    torch.testing.assert_close(squares / (count - 1), whole.var((0, 2)), rtol=1e-8, atol=0.0)


class Reads(nn.Module):
    """Computes with the statistics that its BatchNorm is updating."""

    def __init__(self, read: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.last, self.read = nn.BatchNorm1d(4), nn.Linear(4, 2), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.read(self.norm, self.norm(x)))
        return y


def _before(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    assert norm.running_mean is not None
    return x + norm.running_mean


def _write(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)  # its own backward needs the others as they are
    return x


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (_before, "BatchNorm 'norm' are read or written by other code"),
        (_write, "written to the buffer 'norm.num_batches_tracked'"),
    ],
)
def test_statistics_that_the_model_itself_reads_or_writes_are_refused(read: Any, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        step(Reads(read).double(), 3, *batch(9))


def test_batchnorm_over_processes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(InputError, match=r"1 is a SyncBatchNorm.*deferred_batchnorm"):
        fxpipe.compile(model, ["cpu"])


def test_a_parameter_that_nothing_depends_on_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.unused = nn.BatchNorm1d(4), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _ = x * self.unused
            made: torch.Tensor = self.norm(x)
            return made

    model = Net()
    with fxpipe.compile(
        model, 1, microbatches=2, loss=nn.functional.mse_loss, extensions=["deferred_batchnorm"]
    ) as pipe:
        pipe.step(x := torch.randn(8, 4), target=x)
    assert model.norm.weight.grad is not None and model.unused.grad is None
