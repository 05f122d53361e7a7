"""Have torch's inductor compile the graphs of every stage, each into a library of its own.

before:  forward:  a = mm(x, w);  b = relu_(a);  return (b, x, w)
after:   the same graph, which now calls a library: it makes b; x and w are passed through

Libraries are made ahead of time (AOTInductor), in parallel processes. They are kept in inductor's
cache folder under a hash of the graph, its layouts, the number of threads, the processor and
torch's version: equal blocks share one, and a second start compiles nothing. A record beside each
library has the memory of a call. Graphs that inductor cannot compile run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.errors import told
from fxpipe.extensions.inductor.libraries import (
    Libraries,
    can_compile,
    compile_all,
)
from fxpipe.extensions.inductor.library import LibraryCall, Wiring
from fxpipe.extensions.inductor.lower_graph import CannotCompile, graph_text, lowered
from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import PEAK, GraphKernel
from fxpipe.log import LOGGER
from fxpipe.passes.differentiate.extract import shares_memory
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import is_part
from fxpipe.torchtools.kept import key_of

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
    libraries = Libraries()
    _make(jobs, libraries, {**_OPTIONS, "cpp.threads": threads})
    changed = {id(job.module): job.changed(libraries) for job in jobs}
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

    def __init__(
        self, module: fx.GraphModule, what: str, owned: Collection[str], threads: int
    ) -> None:
        """Lower the graph for inductor; if that fails, set ``reason``.

        Args:
            module: the graph.
            what: its name in messages.
            owned: the arguments whose memory nothing else holds, by name.
            threads: how many intra-op threads its library will use.
        """
        self.module = module
        self.what = what
        self.key = self.reason = ""
        self._owned = owned
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
        names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
        places = [at for at, name in enumerate(names) if name in self._owned]
        owned = [index for index, at in enumerate(self._wiring.takes) if at in places]
        default = str(torch.get_default_dtype()).removeprefix("torch.")
        return str(source), str(target), options, owned, default

    def package(self, scratch: str) -> Path:
        """The path of the package that the process writes."""
        return Path(scratch) / f"{self.key}.pt2"

    def changed(self, libraries: Libraries) -> fx.GraphModule:
        """Return the module that calls the library, or the module as it is if there is none."""
        record = None if self.reason else libraries.record(self.key)
        if record is None:
            LOGGER.info("%s runs as it is: %s", self.what, self.reason)
            return self.module
        library = libraries.load(self.key, record.suffix, self.device)
        module = lazy_module(self.module, self.module.graph, type(self.module).__name__)
        vars(module)["forward"] = LibraryCall(library, self._wiring, self.module.forward)
        module.meta[PEAK] = record.peak + sum(draw.bytes for draw in self._wiring.draws)
        return module


def _jobs(stage: Stage, threads: int) -> Iterator[GraphToCompile]:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel):
        LOGGER.info("stage %s runs as it is: autograd drives its backward", stage.index)
        return
    parts = {
        "forward": kernel.forward_graph,
        "backward": kernel.backward_graph,
        "input gradients": kernel.input_grad_graph,
        "weight gradients": kernel.weight_grad_graph,
    }
    for kind, buckets in kernel.buckets.items():
        parts |= {f"bucket {k} of {kind}": bucket.graph for k, bucket in enumerate(buckets)}
    owned: set[str] = set()
    for name, module in parts.items():
        if module is None or not any(n.op == "call_function" for n in module.graph.nodes):
            continue
        yield GraphToCompile(module, f"the graph of stage {stage.index} for {name}", owned, threads)
        if name in ("forward", "input gradients") or name.startswith("bucket"):
            owned = owned | _allocates(module.graph)


def _allocates(graph: fx.Graph) -> set[str]:
    """The names of the nodes that allocate memory."""
    return {
        node.name
        for node in graph.nodes
        if node.op == "call_function"
        and not (is_part(node) or shares_memory(node))
        and any(isinstance(x, Tensor) for x in pytree.tree_leaves(node.meta.get("val")))
    }


def _make(jobs: Sequence[GraphToCompile], libraries: Libraries, options: dict[str, Any]) -> None:
    """Compile the graphs that are not in the folder yet."""
    new = {job.key: job for job in jobs if job.key and libraries.record(job.key) is None}
    lacking = "" if can_compile() else "there is no C++ compiler; install g++, or name one in CXX"
    with libraries.scratch() as scratch:
        tasks: list[tuple[GraphToCompile, tuple[Any, ...]]] = []
        for job in new.values():
            job.reason = lacking
            if lacking:
                continue
            try:
                tasks.append((job, job.task(scratch, options)))
            except Exception as error:  # whatever export raises for graphs that it cannot take
                job.reason = told(error).splitlines()[0]
        answers = compile_all([task for _, task in tasks])
        for count, (number, answer) in enumerate(answers, 1):
            job = tasks[number][0]
            LOGGER.info("compiled %s, %d of %d", job.what, count, len(tasks))
            if answer.reason:
                job.reason = answer.reason
            else:
                libraries.keep(job.key, job.package(scratch), job.device, answer.peak)
    for job in jobs:
        job.reason = new[job.key].reason if job.key in new else job.reason
