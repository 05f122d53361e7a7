"""Stages that inductor has compiled, beside a plain loop over the same libraries, and beside the
same pipe with its graphs as they are."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.inductor import compile_stages, libraries
from fxpipe.extensions.inductor.library import Library
from fxpipe.extensions.inductor.lower_graph import graph_text
from tests.extensions.inductor import stage_libraries
from tests.extensions.inductor.stage_libraries import Net, batch, gradients, graphs, made, stepped
from tests.helpers.profiles import deep

pytestmark = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("gpipe", {"recompute": "always", "extensions": [fxpipe.Dispatch("thread")]}),
        ("zb-h1", {}),
    ],
)
def test_a_step_equals_a_loop_over_its_libraries_and_the_model_to_rounding(
    folder: Path, schedule: str, options: Any
) -> None:
    x, y = batch()
    with made("inductor", schedule, **options) as pipe, made(None, schedule, **options) as other:
        for each in (pipe, other):
            each.prepare(x, target=y)
        assert None not in graphs(pipe) and not any(graphs(other))
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        expected = gradients(pipe, x, y, schedule == "zb-h1")
        loss, plain = stepped(pipe, x, y), stepped(other, x, y)
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, before[name].add(expected[name], alpha=-0.1))
        assert torch.allclose(loss, plain, rtol=1e-5)
        for here, there in zip(
            pipe.state_dict().values(), other.state_dict().values(), strict=True
        ):
            assert torch.allclose(here, there, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_random_numbers_are_those_without_a_compiler(folder: Path, schedule: str) -> None:
    x, y = batch()
    losses = []
    for compiler in ("inductor", None):
        with made(compiler, schedule) as pipe:
            torch.manual_seed(2)
            losses.append([float(pipe.step(x, target=y)) for _ in range(3)])
            assert all(graphs(pipe)) == (compiler is not None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.deep
def test_another_start_compiles_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = batch()
    with made("inductor") as pipe:
        pipe.step(x, target=y)
        costs = [stage.costs for stage in pipe.plan.stages]
    folder = copied(folder, tmp_path, monkeypatch)  # to which nobody else adds
    known = set(folder.glob("*.so"))
    with pytest.MonkeyPatch.context() as patch, made("inductor") as pipe:
        patch.setattr(libraries, "start_pool", None)
        pipe.step(x, target=y)
        assert None not in graphs(pipe)
        assert [stage.costs for stage in pipe.plan.stages] == costs  # so cuts are the same, too
        assert "compiled graphs, by stage: 2 of 2, 2 of 2" in str(pipe)
        assert set(folder.glob("*.so")) == known


def copied(folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the libraries, for the rest of a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(to))
    leave = shutil.ignore_patterns("tmp*")  # what others are writing
    return Path(shutil.copytree(folder, to / "fxpipe", ignore=leave))


@pytest.mark.parametrize(
    "sizes", [((4, 1),), *deep(((4, 1), (2, 2), (4, 2)))], ids=["one size", *deep("two sizes")]
)
def test_equal_graphs_share_a_library_and_other_sizes_get_one_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    taken: set[Library] = set()

    def load(*given: Any) -> Library:
        taken.add(library := plain(*given))
        return library

    plain = libraries.load_library
    monkeypatch.setattr(compile_stages, "load_library", load)
    with (
        fxpipe.compile(
            model,
            ["cpu"] * 4,
            microbatches=1,
            partition=["1", "2", "3"],
            extensions=["inductor"],
        ) as pipe,
        torch.no_grad(),
    ):
        for samples, number in sizes:
            x = torch.randn(samples, 4)
            assert torch.allclose(pipe(x), model(x), atol=1e-6)
            assert len(taken) == number
        assert len(graphs(pipe)) == 4 and None not in graphs(pipe)


def test_graphs_are_compiled_side_by_side(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processes that meet: each waits for the other to open a pipe."""
    os.mkfifo(tmp_path / "meet")
    monkeypatch.setattr(libraries, "compile_package", stage_libraries.opened)
    tasks = [(str(tmp_path / "meet"), mode) for mode in "rw"]
    assert sorted(libraries.compile_all(tasks, fork=True)) == [(0, "r"), (1, "w")]


def test_after_a_process_has_ended_others_compile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "compile_package", stage_libraries.ending)
    assert dict(libraries.compile_all([(1,)], fork=True)) == {0: "its process has ended"}
    answers = dict(libraries.compile_all([(0,), (2,), (3,)], fork=True))
    assert answers == dict.fromkeys(range(3), "")


@contextmanager
def words() -> Iterator[tuple[fxpipe.Pipeline, nn.Module, Tensor, Tensor]]:
    """A pipe of an embedding and two products, which is two libraries, the model, and a batch with
    which it has been prepared."""
    side = 64
    torch.manual_seed(0)
    layers = nn.Linear(side, side), nn.GELU(), nn.Linear(side, side)
    model = nn.Sequential(nn.Embedding(3, side), *layers)
    x, y = torch.arange(side) % 3, torch.randn(side, side)
    alone = deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"], microbatches=1, loss=mse_loss, extensions=["inductor"]
    ) as pipe:
        pipe.prepare(x, target=y)
        assert None not in graphs(pipe)
        yield pipe, alone, x, y


@pytest.mark.deep
def test_whole_numbers_may_be_indices(folder: Path) -> None:
    with words() as (pipe, alone, x, y):
        loss = mse_loss(alone(x), y)
        loss.backward()
        assert torch.allclose(pipe.step(x, target=y), loss, rtol=1e-5)
        for ours, theirs in zip(pipe.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


@pytest.mark.smoke
def test_what_is_not_compiled_runs_as_it_is_and_is_recorded(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO, "fxpipe")
    x, y = batch()
    with made("inductor") as pipe, made(None) as other:
        assert torch.equal(stepped(pipe, x, y), stepped(other, x, y))
        assert not any(graphs(pipe)) and str(pipe).count("compiled graphs") == 0
    told = [r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage()]
    assert len(told) == 4
    assert told[0].startswith("the graph of stage 0 for forward runs as it is: there is no C++")


@pytest.mark.deep
def test_a_parameter_of_another_layout_is_given_to_the_graph_as_it_is(folder: Path) -> None:
    x, y = batch()
    with made("inductor") as pipe:
        pipe.prepare(x, target=y)
        expected = gradients(pipe, x, y, False)
        weight = pipe.get_parameter("layer.weight")
        weight.data = weight.data.T.contiguous().T
        for name, gradient in gradients(pipe, x, y, False).items():
            assert torch.allclose(gradient, expected[name], atol=1e-6)


@pytest.mark.deep
def test_memory_is_predicted_as_without_libraries_and_with_the_zeros_of_the_first_sums(
    folder: Path,
) -> None:
    with words() as (pipe, alone, x, y):
        with fxpipe.compile(alone, ["cpu"], microbatches=1, loss=mse_loss) as other:
            other.prepare(x, target=y)
            without = other.simulate().memory[0].peak
        side = len(x)
        weights = 4 * (2 * (side * side + side) + 3 * side)
        assert pipe.simulate().memory[0].peak == without + weights


@pytest.mark.smoke
def test_a_graph_that_cannot_be_exported_runs_as_it_is_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.export, "save", fail)
    caplog.set_level(logging.INFO, "fxpipe")
    x, y = batch()
    with made("inductor") as pipe:
        stepped(pipe, x, y)
    told = [r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage()]
    assert len(told) == 4 and all("no such operator" in each for each in told)


class Holding(Extension):
    holds_saved = True


@pytest.mark.smoke
def test_what_excludes_it_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="Holding captures"):
        fxpipe.compile(Net(), ["cpu"], extensions=["inductor", Holding()])


@pytest.mark.smoke
def test_the_text_of_a_graph_is_that_of_another_process() -> None:
    x, y = batch()
    with made(None) as pipe:
        pipe.prepare(x, target=y)
        forwards = [stage.forward for stage in pipe.plan.stages if stage.forward is not None]
        texts = [graph_text(forward, 1) for forward in forwards]
    assert any("native_dropout" in text for text in texts)
    assert not any(" at 0x" in text for text in texts)


@pytest.mark.smoke
@pytest.mark.parametrize("extensions", [[], ["inductor"]])
def test_torch_compile_of_a_layer_is_told_where_stages_are_not_compiled(
    extensions: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    layer: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    fxpipe.compile(nn.Sequential(nn.Linear(4, 4), layer), 2, extensions=extensions).close()
    told = ["torch.compile of '1'" in record.getMessage() for record in caplog.records]
    assert told == [True] * (not extensions)
