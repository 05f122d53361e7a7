"""The costs of stages that were cut by names, which are measured once somebody asks for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.plans import Graph
from fxpipe.errors import told
from fxpipe.log import LOGGER
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.backend import is_worker
from fxpipe.torchtools.state import under


def measured_call(pipe: Pipeline) -> Compiled:
    """The call that is shown, with the costs of its stages. Raises InputError if nothing is
    compiled yet."""
    compiled = pipe._calls.compiled()
    if compiled.plan.stages[0].costs is None and not is_worker():
        with pipe._engine.quiet():
            compiled = pipe._calls.shown = _with_costs(pipe._compiler, compiled)
    return compiled


def _with_costs(compiler: Compiler, compiled: Compiled) -> Compiled:
    """The same call with the costs of its stages, which are measured now unless they were."""
    placement, model = compiler.plans.placement, compiler.options.model
    with compiler.compiling(f"{type(model).__name__}, to know what stages cost"):
        _measure(compiler)
    stages = tuple(replace(s, costs=placement.costs.get(s.index)) for s in compiled.plan.stages)
    plan = replace(compiled.plan, stages=stages)
    larger = compiled.samples / placement.samples
    threads = compiler.choice.threads(plan, compiled.schedule, larger)
    made = replace(compiled, plan=plan, threads=threads)
    for known in compiler.memo.values("call"):
        if known.compiled is compiled:
            compiler.memo.replace(known, known._replace(compiled=made))
    return made


def _measure(compiler: Compiler) -> None:
    """Measure with zeros, as the data of the call is gone. If operations refuse them, nothing is
    measured, which the log says."""
    placement = compiler.plans.placement
    graphs: list[Graph] = compiler.memo.values("graph")
    if placement.costs or not graphs:
        return
    traced, assignment = graphs[0].traced, graphs[0].assignment
    # whatever modes the caller is in
    with torch.inference_mode(False), torch.enable_grad(), under(()):
        try:
            facts = graphs[0].call.zeros().as_trained(traced, compiler.options.model)
            placement.costs = placement.by_stage(traced, assignment, placement.node_costs(facts))
        except Exception as error:
            LOGGER.info("the stages are not measured: %s", told(error))
