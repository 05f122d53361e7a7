"""Ranks compile the stages that they run, and agree on what is compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.inductor import libraries
from tests.extensions.inductor.stage_libraries import Net, batch, graphs, made, settings, stepped
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not libraries.can_compile(), reason="there is no C++ compiler, which inductor needs"
)


def statistics_of(schedule: str) -> list[str]:
    """The extension that copies of a stage need to agree on the statistics of a batch."""
    return ["deferred_batchnorm"] * (schedule == "chimera")


def ran(mesh: DeviceMesh, schedule: str, folder: Path) -> tuple[float, list[bool], str, list[int]]:
    os.environ.update(settings(folder))
    torch.manual_seed(0)
    model = Net()
    x, y = batch()
    with fxpipe.compile(
        model,
        mesh,
        schedule=schedule,
        microbatches=3,
        partition=["last"],
        loss=mse_loss,
        extensions=["inductor", *statistics_of(schedule)],
    ) as pipe:
        loss, own = float(stepped(pipe, x, y)), [each is not None for each in graphs(pipe)]
        return loss, own, str(pipe), [memory.peak for memory in pipe.simulate().memory]


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"] if DEEP else ["1f1b"])
def test_a_rank_compiles_its_own_stages_and_those_of_which_it_has_copies(
    schedule: str, folder: Path
) -> None:
    x, y = batch()
    with made("inductor", extensions=statistics_of(schedule)) as pipe:
        expected = float(stepped(pipe, x, y))
        first = next(graph for graph in graphs(pipe) if graph is not None)
        loaded = libraries._loaded.items()
        lost = next(path for (path, _), library in loaded if library is first.library)
    lost.unlink()  # a rank compiles this graph; the other libraries lie there
    told = on_ranks(2, ran, schedule, folder, timeout=200)
    assert lost.exists()
    assert [loss for loss, *_ in told] == pytest.approx([expected] * 2, rel=1e-5)
    both = schedule == "chimera"
    assert [compiled for _, compiled, *_ in told] == [
        [True, True, both, both],
        [both, both, True, True],
    ]
    (*_, shown, peaks), (*_, other, others) = told
    assert shown == other and "by stage: 2 of 2, 2 of 2" in shown
    assert peaks == others


def on_replicas(mesh: DeviceMesh, folder: Path) -> tuple[list[bool], dict[str, Tensor]]:
    """Gradients over two replicas, each with a batch of its own."""
    os.environ.update(settings(folder))
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    x, y = batch()
    own = slice(6 * (at := mesh.get_local_rank("dp")), 6 * (at + 1))
    with fxpipe.compile(
        model, mesh, microbatches=3, loss=mse_loss, extensions=["inductor"]
    ) as pipe:
        pipe.step(x[own], target=y[own])
        compiled = [each is not None for each in graphs(pipe)]
        named = pipe.named_parameters()
        return compiled, {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_replicas_have_the_same_gradients(folder: Path) -> None:
    (compiled, ours), (others, theirs) = on_ranks(2, on_replicas, folder, replicas=2, timeout=200)
    assert compiled == others
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    for x, y in zip(*(each.chunk(6) for each in batch()), strict=True):
        (mse_loss(model(x), y) / 6).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours[name], parameter.grad)
