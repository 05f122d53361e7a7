"""Garbage collection is off while many objects are made; what a pipe made goes with it."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.graph_module import _loader
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.front_end import FrontEnd
from fxpipe.compiler.placement import Placement
from fxpipe.kernels.graph import GraphKernel
from fxpipe.torchtools.state import without_collection

pytestmark = pytest.mark.traces


@without_collection()
def collects(fail: bool = False) -> bool:
    if fail:
        raise ValueError
    return gc.isenabled()


def test_collection_is_off_inside_and_on_again_behind_it() -> None:
    assert gc.isenabled()
    for _ in range(2):
        assert not collects()
        assert gc.isenabled()


def test_collection_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError):
        collects(fail=True)
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        assert not collects()
        assert not gc.isenabled()
    finally:
        gc.enable()


def _generated(names: Any) -> set[str]:
    return {name for name in names if name.startswith("<eval_with_key>")}


def _kinds() -> Counter[str]:
    """How many objects there are of each kind that is this library's or of a graph."""
    for _ in range(3):
        gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    ours = ("fxpipe.", "torch.fx.graph", "torch.fx.node", "functools.partial")
    return Counter(name for name in names if name.startswith(ours))


def _used(samples: int, **options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(samples, 4)
    with fxpipe.compile(model, 2 * ["cpu"], microbatches=2, loss=F.mse_loss, **options) as pipe:
        pipe.step(x, target=x)
        model.eval()
        pipe(x)


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (8, {}),
        (7, {"schedule": "2bw", "optimizer": lambda p: torch.optim.SGD(p, 0.1)}),
        (8, {"schedule": "zb-h1", "extensions": [fxpipe.LeafModules("2")]}),
    ],
)
def test_nothing_stays_of_a_pipe_that_is_gone(samples: int, options: dict[str, Any]) -> None:
    _used(samples, **options)  # what torch and this library load and make once
    kinds, lines, sources = _kinds(), _generated(linecache.cache), _generated(_loader.eval_cache)
    for _ in range(2):
        _used(samples, **options)
    assert not _kinds() - kinds
    assert _generated(linecache.cache) <= lines
    assert _generated(_loader.eval_cache) <= sources


def test_tracebacks_have_the_lines_of_graphs_that_can_run() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(x, target=x)
        kernel = pipe.plan.stages[0].kernel
        assert isinstance(kernel, GraphKernel)
        code: Any = type(kernel.forward_graph).forward.__code__
        assert "tanh" in "".join(linecache.getlines(code.co_filename))


def test_what_a_trace_has_dropped_is_gone_before_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[fx.Graph]] = []
    dropped: list[int] = []
    make, traced = fx.Graph.__init__, FrontEnd._captured

    def remembered(self: fx.Graph, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        make(self, *args, **options)

    def looked_at(self: FrontEnd, *args: Any, **options: Any) -> Any:
        found = traced(self, *args, **options)
        alive = sum(graph() is not None for graph in made)
        gc.collect()
        dropped.append(alive - sum(graph() is not None for graph in made))
        return found

    monkeypatch.setattr(fx.Graph, "__init__", remembered)
    monkeypatch.setattr(FrontEnd, "_captured", looked_at)
    with fxpipe.compile(nn.Linear(3, 3), ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(torch.ones(4, 3), target=torch.ones(4, 3))
    assert len(made) > 2
    assert dropped[0] == 0


def test_what_is_made_to_be_measured_is_gone_before_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing collects while something is compiled, and graphs are cycles."""
    measured: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    timed, costs = Placement._timed, Placement.node_costs

    def remembered(self: Placement, facts: Any) -> Any:
        measured.append(weakref.ref(facts["plan"].stages[0].graph))
        return timed(self, facts)

    def looked_at(self: Placement, facts: Any) -> Any:
        found = costs(self, facts)
        alive.extend(each() is not None for each in measured)
        return found

    monkeypatch.setattr(Placement, "_timed", remembered)
    monkeypatch.setattr(Placement, "node_costs", looked_at)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(torch.ones(4, 3), target=torch.ones(4, 3))
    assert alive == [False]
