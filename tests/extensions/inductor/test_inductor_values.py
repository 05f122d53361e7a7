"""Numbers of compiled stages that depend on more than shapes: on threads, on memory that a tensor's
entries share, on the default type of numbers, and indices of rows that are not there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from fxpipe.errors import ExecutionError, FxpipeError
from fxpipe.extensions.inductor import libraries
from fxpipe.extensions.inductor.library import Library
from tests.extensions.inductor.stage_libraries import graphs

needs_compiler = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


@pytest.fixture
def threads() -> Iterator[None]:
    """Two intra-op threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Rows(nn.Module):
    """Reads the same rows many times, and a value that is there once."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=1)
        self.scale = nn.Parameter(torch.randn(64, 3))

    def forward(self, index: Tensor) -> Tensor:
        found = self.words(index)
        y: Tensor = found.sum(1, keepdim=True).expand(-1, 64, -1) * self.scale
        return y


@pytest.mark.deep
@needs_compiler
def test_gradients_of_embeddings_are_the_same_to_the_bit_each_time(
    folder: Path, threads: None
) -> None:
    torch.manual_seed(0)
    model = Rows()
    alone = deepcopy(model)
    index, y = torch.randint(5, (300, 64)), torch.randn(300, 64, 3)
    mse_loss(alone(index), y).backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    found = []
    with fxpipe.compile(
        model, ["cpu"], microbatches=1, loss=mse_loss, extensions=["inductor"]
    ) as pipe:
        for _ in range(10):
            pipe.zero_grad()
            pipe.step(index, target=y)
            found.append([parameter.grad for parameter in model.parameters()])
        assert None not in graphs(pipe)
    for each in found:
        for here, first, there in zip(each, found[0], expected, strict=True):
            assert here is not None and first is not None and there is not None
            assert torch.equal(here, first) and torch.allclose(here, there, rtol=1e-4)


@pytest.mark.deep
@needs_compiler
def test_indices_of_no_row_are_the_error_that_pytorch_raises(folder: Path, threads: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Flatten(0, 1))
    index, target = torch.randint(5, (64, 64)), torch.randint(3, (64, 64))
    target[:, 1] = -100  # which counts for nothing
    no_row, no_class = index.clone(), target.clone()
    no_row[60, 3], no_class[60, 3] = 5, -1

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target.flatten())

    with fxpipe.compile(model, ["cpu"], microbatches=1, loss=loss, extensions=["inductor"]) as pipe:
        assert torch.allclose(pipe.step(index, target=target), loss(model(index), target))
        assert None not in graphs(pipe)
        with pytest.raises(ExecutionError, match="index out of range"):
            pipe.step(no_row, target=target)
        with pytest.raises(ExecutionError, match="Target -1 is out of bounds"):
            pipe.step(index, target=no_class)
        assert torch.allclose(pipe.step(index, target=target), loss(model(index), target))


@pytest.mark.deep
@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "mkldnn_rnn_layer") or not torch.backends.mkldnn.is_available(),
    reason="this build of torch lacks oneDNN",
)
def test_an_lstm_runs_as_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)[0]
            return y

    caplog.set_level(logging.INFO, "fxpipe")
    torch.manual_seed(0)
    model = Net()
    alone = deepcopy(model)
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5, 4)
    mse_loss(alone(x), y).backward()
    with fxpipe.compile(
        model, ["cpu"], microbatches=1, loss=mse_loss, extensions=["inductor"]
    ) as pipe:
        pipe.step(x, target=y)
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None and there.grad is not None
        assert torch.allclose(here.grad, there.grad, atol=1e-6)
    assert sum("is an LSTM" in each for each in caplog.messages) == 2


@pytest.mark.deep
@needs_compiler
def test_under_autocast_values_are_the_models_to_the_rounding_of_the_narrow_type(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
            self.last = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y: Tensor = self.last(self.first(x))
            return y.float()

    caplog.set_level(logging.INFO, "fxpipe")
    torch.manual_seed(0)
    model = Net()
    alone = deepcopy(model)
    x, y = torch.randn(8, 32), torch.randn(8, 8)
    mse_loss(alone(x), y).backward()
    options: dict[str, Any] = {"partition": ["last"], "extensions": ["inductor"]}
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=1, loss=mse_loss, **options) as pipe:
        pipe.step(x, target=y)
        assert [each is not None for each in graphs(pipe)] == [False, False, True, True]
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None and there.grad is not None
        bound = 8 * torch.finfo(torch.bfloat16).eps * float(there.grad.abs().max())
        assert torch.allclose(here.grad, there.grad, rtol=0, atol=bound)
    assert sum("is a norm with weights of another type" in each for each in caplog.messages) == 2


@pytest.mark.deep
@needs_compiler
def test_the_default_type_of_numbers_is_that_of_the_libraries(folder: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.arange(5) * 0.1) + torch.linspace(0, 1, 5) / 3

    x = torch.randn(4, 5, dtype=torch.float64)
    before = torch.get_default_dtype()
    try:
        for number in (torch.float32, torch.float64):
            torch.set_default_dtype(number)
            model = Net()
            with fxpipe.compile(model, ["cpu"], microbatches=1, extensions=["inductor"]) as pipe:
                assert torch.allclose(pipe(x), model(x), rtol=1e-14, atol=0.0)
                assert None not in graphs(pipe)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("suffix", [".so", ".pt2"])
def test_a_library_that_is_not_whole_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"library{suffix}"
    path.write_bytes(b"what a full disk has left")
    with pytest.raises(FxpipeError, match=f"{path.name} cannot be loaded .*delete it"):
        Library(path, torch.device("cpu"))
