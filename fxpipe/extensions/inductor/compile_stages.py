"""Have torch's inductor compile the graphs of every stage, each into a library of its own.

before:  forward:  a = mm(x, w);  b = relu_(a);  return (b, x, w)
after:   the same graph, which now calls a library: it makes b; x and w are passed through

Libraries are made ahead of time (AOTInductor), in parallel processes. They are kept in inductor's
cache folder under a hash of the graph, its layouts, the number of threads, the processor and
torch's version: equal blocks share one, and a second start compiles nothing. Graphs that inductor
cannot compile run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, told
from fxpipe.extend import Extension
from fxpipe.extensions.inductor.libraries import (
    can_compile,
    compile_all,
    find_library,
    folder,
    keep_library,
    kept,
    key_of,
    load_library,
)
from fxpipe.extensions.inductor.library import LibraryCall, Wiring
from fxpipe.extensions.inductor.lower_graph import CannotCompile, graph_text, lowered
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import COMPILED, GraphKernel
from fxpipe.log import LOGGER
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.runner import Pass

_OPTIONS = {"layout_optimization": False}
"""Options of inductor. What stages send and save must keep its layout, so convolutions in another
layout would need copies, with which the forward of a U-Net is no faster than as it is."""


def compile_stages(plan: Plan, threads: int, own: Collection[int]) -> Plan:
    """Plan → Plan: compile the graphs of the kernels, except in stages with leaf modules.

    Graphs that were compiled before are loaded.

    Args:
        plan: the plan.
        threads: how many intra-op threads the libraries use.
        own: the stages that this process runs; others stay as they are.
    """
    jobs = [job for stage in plan.stages if stage.index in own for job in _jobs(stage, threads)]
    _make(jobs, {**_OPTIONS, "cpp.threads": threads})
    changed = {id(job.module): job.changed() for job in jobs}
    stages = (
        replace(stage, kernel=stage.kernel.mapped(lambda graph: changed.get(id(graph), graph)))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


class GraphToCompile:
    """One graph of a stage, to be compiled.

    Attributes:
        module: the graph with the code that runs it as it is.
        what: its name in messages.
        key: the key of its library; equal graphs share one.
        reason: why it cannot be compiled; empty as long as it can.
        device: where it runs.
    """

    def __init__(self, module: fx.GraphModule, what: str, threads: int) -> None:
        """Lower the graph for inductor; if that fails, set ``reason``. Its library will use so many
        intra-op threads."""
        self.module = module
        self.what = what
        self.key = self.reason = ""
        self._wiring: Wiring
        try:
            graph, self._wiring = lowered(module.graph)
        except CannotCompile as refused:
            self.reason = str(refused)
            return
        self._module = fx.GraphModule(torch.nn.Module(), graph)
        self.device = next((look.device for look in self._wiring.looks), torch.device("cpu"))
        self.key = key_of(graph_text(self._module, threads))

    def task(self, scratch: str, options: dict[str, Any]) -> tuple[Any, ...]:
        """Export the graph into a folder; return the task for a process that compiles it."""
        # zeros, because libraries check indices
        inputs = tuple(look.empty().zero_() for look in self._wiring.looks)
        source, target = Path(scratch) / f"{self.key}.graph.pt2", self.package(scratch)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(self._module, inputs, strict=False), source)
        default = str(torch.get_default_dtype()).removeprefix("torch.")
        return str(source), str(target), options, default

    def package(self, scratch: str) -> Path:
        """The path of the package that the process writes."""
        return Path(scratch) / f"{self.key}.pt2"

    def changed(self) -> fx.GraphModule:
        """Return the module that calls the library, or the module as it is if there is none."""
        path = None if self.reason else find_library(self.key)
        if path is None:
            LOGGER.info("%s runs as it is: %s", self.what, self.reason)
            return self.module
        library = load_library(path, self.device)
        module = lazy_module(self.module, self.module.graph, type(self.module).__name__)
        vars(module)["forward"] = LibraryCall(library, self._wiring, self.module.forward)
        module.meta[COMPILED] = True
        return module


def _jobs(stage: Stage, threads: int) -> Iterator[GraphToCompile]:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel):
        LOGGER.info("stage %s runs as it is: autograd drives its backward", stage.index)
        return
    if stage.calls:
        LOGGER.info("stage %s runs as it is: it calls a part of the model as it is", stage.index)
        return
    parts = {
        "forward": kernel.forward_graph,
        "backward": kernel.backward_graph,
        "input gradients": kernel.input_grad_graph,
        "weight gradients": kernel.weight_grad_graph,
    }
    for kind, buckets in kernel.buckets.items():
        parts |= {f"bucket {k} of {kind}": bucket.graph for k, bucket in enumerate(buckets)}
    for name, module in parts.items():
        if module is not None and any(n.op == "call_function" for n in module.graph.nodes):
            yield GraphToCompile(module, f"the graph of stage {stage.index} for {name}", threads)


def _make(jobs: Sequence[GraphToCompile], options: dict[str, Any]) -> None:
    """Compile the graphs that are not in the folder yet."""
    new = {job.key: job for job in jobs if job.key and find_library(job.key) is None}
    lacking = "" if can_compile() else "there is no C++ compiler; install g++, or name one in CXX"
    with TemporaryDirectory(dir=folder()) as scratch:  # beside the libraries
        tasks: list[tuple[GraphToCompile, tuple[Any, ...]]] = []
        for job in new.values():
            job.reason = lacking
            if lacking:
                continue
            try:
                tasks.append((job, job.task(scratch, options)))
            except Exception as error:  # whatever export raises for graphs that it cannot take
                job.reason = told(error).splitlines()[0]
        fork = all(job.device.type == "cpu" for job, _ in tasks)
        answers = compile_all([task for _, task in tasks], fork=fork)
        for count, (number, reason) in enumerate(answers, 1):
            job = tasks[number][0]
            LOGGER.info("compiled %s, %d of %d", job.what, count, len(tasks))
            job.reason = reason
            if not reason:
                keep_library(job.key, job.package(scratch), job.device)
    for job in jobs:
        job.reason = new[job.key].reason if job.key in new else job.reason


def keep_costs(
    traced: Traced,
    plan: Plan,
    costs: Mapping[str, NodeCost],
    functional: bool,
    threads: int,
) -> Mapping[str, NodeCost]:
    """The costs that a graph's nodes were first measured to have on this machine, so that another
    start makes the same stages, which are compiled already."""
    graph = plan.stages[0].forward
    assert graph is not None
    names = "\n".join(node.name for node in traced.graph.nodes)
    text = f"{names}\n{functional}\n{graph_text(graph, threads)}"
    made: Any = kept(text, lambda: {name: [*vars(cost).values()] for name, cost in costs.items()})
    return {name: NodeCost(*cost) for name, cost in made.items()}


_KEEP = Pass(keep_costs, "traced, plan, costs, functional, threads", "costs")
_COMPILE = Pass(compile_stages, "plan, threads, own", "plan")


@dataclass(frozen=True)
class Inductor(Extension):
    """Compile the graphs of every stage with torch's inductor: the forward, the backward and its
    halves, for each micro-batch size that occurs, in steps and in calls; see docs/memory.md.

    Results equal the model's to rounding; they are still the same for every schedule, recomputation
    and dispatch, and random numbers are those that are drawn without it. The first compilation
    takes minutes for a large model, in as many processes as there are processors, and needs a C++
    compiler, or triton on CUDA devices. Its results are kept in the folder TORCHINDUCTOR_CACHE_DIR,
    so the next start compiles nothing. What runs uncompiled, such as a stage with leaf modules, is
    in an info record of the logger "fxpipe", and the table of stages says what is compiled. It
    excludes captured graphs.
    """

    def check(self, options: Options) -> None:
        """Raise InputError if stages are captured, too."""
        if options.holds_saved:
            raise InputError(
                f"{options.holds_saved} captures the operations of a stage, and Inductor makes a "
                "library of them; leave one of them out"
            )

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """Passes that keep costs, and compile."""
        return {"measure": [("measure", _KEEP)], "compile": [("", _COMPILE)]}
