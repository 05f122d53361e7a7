"""Stages that inductor has compiled, beside a plain loop over the same libraries, and beside the
same pipe with its graphs as they are."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import InputError
from fxpipe.kernels.inductor import Library
from fxpipe.passes.inductor import images, libraries
from fxpipe.passes.inductor.channels_last import lay_channels_last
from fxpipe.passes.inductor.worker import LARGE, MULTIPLIES, multiply_by_onednn
from tests.helpers.profiles import deep
from tests.helpers.stage_libraries import MICROBATCHES, Net, batch, graphs, made

pytestmark = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


def gradients(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor, halves: bool) -> dict[str, Tensor]:
    """Those of a loop over the micro-batches that calls the libraries, one after another."""
    one: Any
    two: Any
    one, two = pipe.plan.stages
    state = {**dict(pipe.named_parameters()), **dict(pipe.named_buffers())}
    sums: dict[int, Any] = {0: (), 1: ()}

    def arguments(stage: Any) -> tuple[list[Tensor], list[Tensor]]:
        return [state[a.target] for a in stage.parameters], [state[a.target] for a in stage.buffers]

    def back(stage: Any, saved: list[Any], given: list[Tensor]) -> list[Tensor]:
        sent: list[Tensor]
        if not halves:
            sent, sums[stage.index] = stage.kernel.backward(saved, given, sums[stage.index])
            return sent
        sent, deferred = stage.kernel.input_grad(saved, given)
        sums[stage.index] = stage.kernel.weight_grad(deferred, sums[stage.index])
        return sent

    with torch.no_grad():
        for x_part, y_part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            values = {"x": x_part, "given_1": y_part}
            saved = {}
            for stage in (one, two):
                edges = pipe.plan.edges_into(stage.index)
                result = stage.kernel.forward(*arguments(stage), [values[e.value] for e in edges])
                names = dict.fromkeys(e.value for e in pipe.plan.edges_from(stage.index))
                values.update(zip(names, result.outputs, strict=True))
                saved[stage.index] = result.saved
            sent = back(two, saved[1], [torch.tensor(1 / MICROBATCHES)])
            back(one, saved[0], sent)
    return {
        argument.target: total
        for stage in (one, two)
        for argument, total in zip(stage.parameters, sums[stage.index], strict=True)
    }


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {}), ("gpipe", {"recompute": "always", "dispatch": "thread"}), ("zb-h1", {})],
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
        loss, plain = pipe.step(x, target=y), other.step(x, target=y)
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, before[name].add(expected[name], alpha=-0.1))
        assert torch.allclose(loss, plain, rtol=1e-5)
        for here, there in zip(
            pipe.state_dict().values(), other.state_dict().values(), strict=True
        ):
            assert torch.allclose(here, there, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_random_numbers_are_those_without_a_compiler(folder: Path, schedule: str) -> None:
    x, y = batch()
    losses = []
    for compiler in ("inductor", None):
        with made(compiler, schedule, dropout=0.5) as pipe:
            torch.manual_seed(2)
            losses.append([float(pipe.step(x, target=y)) for _ in range(3)])
            assert all(graphs(pipe)) == (compiler is not None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


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
        patch.setattr(libraries, "Popen", None)
        pipe.step(x, target=y)
        assert None not in graphs(pipe)
        assert [stage.costs for stage in pipe.plan.stages] == costs  # so cuts are the same, too
        assert "graphs compiled by inductor, by stage: 2 of 2, 2 of 2" in str(pipe)
        assert set(folder.glob("*.so")) == known


def copied(folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the libraries, for the rest of a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(to))
    leave = shutil.ignore_patterns("tmp*")  # what others are writing
    return Path(shutil.copytree(folder, to / "fxpipe", ignore=leave))


def test_auto_takes_a_library_that_pays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = batch()
    with made("inductor") as pipe:
        pipe.step(x, target=y)
    folder = copied(folder, tmp_path, monkeypatch)
    for seconds, taken in (((1.0, 0.95), True), ((1.0, 0.96), False)):
        for path in folder.glob("*.json"):
            if "seconds" in (record := json.loads(path.read_text())):
                path.write_text(json.dumps({**record, "seconds": seconds}))
        with made("auto") as pipe:
            pipe.step(x, target=y)
            assert all(graph is not None for graph in graphs(pipe)) == taken
            assert any(graph is not None for graph in graphs(pipe)) == taken


def test_equal_graphs_share_a_library_and_other_sizes_get_one_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    taken: set[Library] = set()

    def load(*given: Any) -> Library:
        taken.add(library := plain(*given))
        return library

    plain = libraries.Libraries.load
    monkeypatch.setattr(libraries.Libraries, "load", load)
    with (
        fxpipe.compile(
            model,
            ["cpu"] * 4,
            microbatches=1,
            partition=["1", "2", "3"],
            stage_compiler="inductor",
        ) as pipe,
        torch.no_grad(),
    ):
        for samples, number in ((4, 1), (2, 2), (4, 2)):
            x = torch.randn(samples, 4)
            assert torch.allclose(pipe(x), model(x), atol=1e-6)
            assert len(taken) == number
        assert len(graphs(pipe)) == 4 and None not in graphs(pipe)


def test_graphs_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that meet: each waits for the other to open a pipe."""
    os.mkfifo(tmp_path / "meet")
    process = """
import json, sys
for line in sys.stdin:
    path, mode, peak = json.loads(line)
    open(path, mode).close()
    print(json.dumps(["", peak]), flush=True)
"""
    monkeypatch.setattr(libraries, "Popen", Popen)
    monkeypatch.setattr(libraries, "_WORKER", (sys.executable, "-c", process))
    monkeypatch.setattr(libraries, "processors", lambda: 2)
    tasks = [(str(tmp_path / "meet"), mode, peak) for mode, peak in (("r", 7), ("w", 8))]
    answers = sorted(libraries.compile_all(tasks))
    assert answers == [(0, libraries.Answer("", 7)), (1, libraries.Answer("", 8))]


def words(side: int = round(LARGE ** (1 / 3)) + 1) -> tuple[nn.Module, Tensor]:
    """An embedding and a large product, which are one library, and their input."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(3, side), nn.Linear(side, side)), torch.arange(side) % 3


def test_whole_numbers_may_be_indices(folder: Path) -> None:
    model, x = words()
    with (
        fxpipe.compile(model, ["cpu"], microbatches=1, stage_compiler="inductor") as pipe,
        torch.no_grad(),
    ):
        assert torch.allclose(pipe(x), model(x), atol=1e-5)
        assert None not in graphs(pipe)


@pytest.mark.skipif(not MULTIPLIES, reason="this build of torch lacks MKL or oneDNN")
def test_large_products_are_given_to_onednn_and_are_the_same_to_rounding(folder: Path) -> None:
    side = round(LARGE ** (1 / 3)) + 1

    def products(a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
        # the last two, a sum of matrices and a small product, are not given
        return [a @ b, a.T @ b.T, torch.addmm(bias, a, b), torch.addmm(a, a, b), a[:9] @ b]

    torch.manual_seed(0)
    given = torch.randn(side, side), torch.randn(side, side), torch.randn(side)
    graph = make_fx(products, tracing_mode="fake")(*given)
    multiply_by_onednn(graph.graph)
    graph.recompile()
    assert str(graph.graph).count("mkldnn._linear_pointwise") == 3
    assert all(map(partial(torch.allclose, atol=1e-3), graph(*given), products(*given)))
    model, x = words()
    with fxpipe.compile(model, ["cpu"], microbatches=1, stage_compiler="inductor") as pipe:
        with torch.no_grad():
            assert torch.allclose(pipe(x), model(x), atol=1e-5)
        assert any(b"_linear_pointwise" in path.read_bytes() for path in folder.glob("*.so"))


class Images(nn.Module):
    """Convolutions with what may stand between them, a skip to the end, and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.middle = nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2))
        )
        self.across = nn.Linear(2, 2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.across(self.middle(high))
        y: Tensor = self.last(torch.cat([high, self.up(low)], 1))
        return y


def images_pipe(compiler: Any, schedule: str = "1f1b") -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(
        Images(),
        ["cpu", "cpu"],
        schedule=schedule,
        microbatches=MICROBATCHES,
        partition=["up"],
        loss=mse_loss,
        stage_compiler=compiler,
    )


@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1")])
def test_compiled_convolutions_read_and_make_images_in_channels_last_order(
    folder: Path, schedule: str
) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, 4, 4), torch.randn(6, 2, 4, 4)
    with images_pipe("inductor", schedule) as pipe, images_pipe(None, schedule) as other:
        pipe.prepare(x, target=y)
        assert None not in graphs(pipe)
        orders = {
            node.meta["val"].is_contiguous(memory_format=torch.channels_last)
            for stage in pipe.plan.stages
            if stage.forward is not None
            for node in stage.forward.graph.nodes
            if node.target is torch.ops.aten.convolution.default
        }
        assert orders == {True}
        high = next(edge for edge in pipe.plan.edges if edge.kind == "act")
        assert pipe.plan.specs[high.value].strides == (64, 1, 16, 4)
        expected = gradients(pipe, x, y, schedule == "zb-h1")
        loss, plain = pipe.step(x, target=y), other.step(x, target=y)
        assert torch.allclose(loss, plain, rtol=1e-5)
        for (name, here), there in zip(pipe.named_parameters(), other.parameters(), strict=True):
            assert here.grad is not None and there.grad is not None
            assert torch.equal(here.grad, expected[name])
            assert torch.allclose(here.grad, there.grad, atol=1e-6)
            assert here.grad.stride() == here.stride()
        with torch.no_grad():
            assert pipe(x).is_contiguous() and torch.allclose(pipe(x), other(x), atol=1e-6)


def test_images_stay_as_they_lie_where_as_many_copies_would_be_needed() -> None:
    def laid(*between: nn.Module) -> bool:
        convolutions = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        model = nn.Sequential(convolutions[0], *between, convolutions[1], *between, convolutions[2])
        with fxpipe.compile(model, ["cpu"], microbatches=1) as pipe, torch.no_grad():
            pipe(torch.randn(2, 2, 4, 4))
            return lay_channels_last(pipe.plan) is not pipe.plan

    assert laid(nn.ReLU()) and laid(nn.AvgPool2d(1), nn.Dropout(0.0))
    assert not laid(nn.LayerNorm([2, 4, 4]))


def test_batchnorm_on_images_in_channels_last_order_rounds_as_pytorch_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 32, 32).add_(3).contiguous(memory_format=torch.channels_last)
    given = torch.randn_like(x), torch.randn(8), torch.randn(8), torch.zeros(8), torch.ones(8)

    def run(norm: Any, back: Any, kind: torch.dtype) -> list[Tensor]:
        image, grad, weight, bias, mean, var = (each.to(kind) for each in (x, *given))
        made = norm(image, weight, bias, mean, var, True, 0.1, 1e-5)
        saved = made[1], made[2]
        wanted = [True] * 3
        return [*made, *back(grad, image, weight, mean, var, *saved, True, 1e-5, wanted)]

    theirs = (
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten.native_batch_norm_backward.default,
    )
    exact = run(*theirs, torch.float64)
    for found, there in zip(run(images._norm, images._norm_backward, x.dtype), exact, strict=True):
        assert (found - there).abs().max() <= 2e-6 * there.abs().max()


def test_max_pooling_in_channels_last_order_is_pytorchs_own(folder: Path) -> None:
    torch.manual_seed(0)
    with images_pipe("inductor") as pipe:
        pipe.prepare(torch.randn(6, 3, 4, 4), target=torch.randn(6, 2, 4, 4))
        libraries_of_it = [path.read_bytes() for path in folder.glob("*.so")]
        for name in (b"_max_pool2d_with_indices", b"_max_pool2d_with_indices_backward"):
            assert any(name in each for each in libraries_of_it)


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
        assert torch.equal(pipe.step(x, target=y), other.step(x, target=y))
        assert not any(graphs(pipe)) and str(pipe).count("compiled by inductor") == 0
    told = [r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage()]
    assert len(told) == 4
    assert told[0].startswith("the graph of stage 0 for forward runs as it is: there is no C++")


def test_a_parameter_of_another_layout_is_given_to_the_graph_as_it_is(folder: Path) -> None:
    x, y = batch()
    with made("inductor") as pipe, made(None) as other:
        for each in (pipe, other):
            each.prepare(x, target=y)
            weight = each.get_parameter("layer.weight")
            weight.data = weight.data.T.contiguous().T
        assert torch.allclose(pipe.step(x, target=y), other.step(x, target=y), rtol=1e-5)


def test_the_memory_of_a_library_is_measured(folder: Path) -> None:
    torch.manual_seed(0)
    side, rows = 64, 32
    layers = (nn.Linear(side, side), nn.GELU(), nn.Linear(side, side))
    with fxpipe.compile(
        nn.Sequential(*layers),
        ["cpu"],
        microbatches=1,
        loss=mse_loss,
        stage_compiler="inductor",
    ) as pipe:
        pipe.prepare(torch.randn(rows, side), target=torch.randn(rows, side))
        forward, backward = (graph for graph in graphs(pipe) if graph is not None)
        value, weights = 4 * rows * side, 2 * 4 * (side * side + side)
        # two products and what the GELU gives, and the output besides the loss; two gradients
        assert 3 * value <= forward.peak <= 6 * value
        assert value <= backward.peak <= weights + 4 * value
        assert pipe.simulate().memory[0].peak >= 2 * weights + 3 * value


@pytest.mark.parametrize("first", [(1.0, 0.5), (1.0, 2.0)])
def test_what_was_measured_first_counts_for_all_processes_of_a_host(
    first: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one, other = libraries.Libraries(), libraries.Libraries()
    (tmp_path / "fxpipe" / "key.json").write_text("what a broken disk has left")
    (tmp_path / "fxpipe" / "key.so").touch()
    one.write("key", libraries.Record(seconds=first))
    other.write("key", libraries.Record(seconds=(7.0, 7.0)))
    for each in (one, other):
        assert (found := each.record("key")) is not None and (*found.seconds,) == first


def test_what_excludes_it_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="there is no stage_compiler 'gcc'"):
        made("gcc")
    with pytest.raises(InputError, match="cuda_graphs captures"):
        fxpipe.compile(Net(), ["cpu"], cuda_graphs=True, stage_compiler="auto")
