"""The stages of a step for micro-batches of another size, to be predicted and never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.front_end import Call
from fxpipe.ir.plan import StageCosts
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment


class Resized:
    """The stages of a compiled step, for any size of micro-batches that its graph allows."""

    def __init__(self, compiler: Compiler, compiled: Compiled) -> None:
        self._compiler, self._plans, self._compiled = compiler, compiler.plans, compiled
        module = compiled.traced.module
        graphs = self._plans.graphs.values()
        self._graph = next(graph for graph in graphs if graph.traced.module is module)

    def costs(self, samples: int) -> Mapping[int, StageCosts]:
        """Measure the stages with zeros; returns stage → its costs.

        Raises:
            FxpipeError: as ``Plans.plan``, or the model does not take zeros.
        """
        with self._followed(samples) as (call, traced, assignment):
            facts = call.as_trained(traced, self._compiler.options.model)
            return self._plans.placement.costs_of(facts, assignment)

    def step(self, samples: int, updates: bool) -> Compiled:
        """The same step, with a plan that is made for zeros, not checked, and not kept. Raises
        FxpipeError as ``costs``."""
        compiled = self._compiled
        traced, plan = compiled.traced, compiled.plan
        if samples != compiled.samples:
            with self._followed(samples) as (call, followed, assignment):
                graph = self._plans.relayed(call, followed, assignment)
                traced, plan = graph.traced, self._plans.differentiated(graph, call)
        lowered = self._compiler.lowered
        whole = partial(lowered, plan, compiled.schedule, compiled.purpose, updates)
        return replace(compiled, traced=traced, plan=plan, whole=whole, samples=samples)

    @contextmanager
    def _followed(self, samples: int) -> Iterator[tuple[Call, Traced, Assignment]]:
        """Yield the step for micro-batches of zeros, with a graph for that size and its stages.
        Inside, the model is as in ``Plans.gathered``."""
        plans, graph = self._plans, self._graph
        plans.look()
        with plans.gathered(replace(graph.call.zeros(), fixed=False)) as here:
            call = _of_size(here, samples)
            traced = plans.trace(here)
            if not traced.accepts(call.shapes):
                traced = plans.trace(call)
            yield call, traced, plans.placement.follow(traced, graph.traced, graph.assignment)


def _of_size(call: Call, samples: int) -> Call:
    """The same call for micro-batches of another size, with zeros for data."""

    def change(leaf: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        return leaf.new_zeros((*leaf.shape[:dim], samples, *leaf.shape[dim + 1 :]))

    return replace(call, leaves=[*map(change, call.leaves, call.batch.dims)], size=samples)
