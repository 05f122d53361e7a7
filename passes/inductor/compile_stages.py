"""Have torch's inductor compile the graphs of every stage, each into a library of its own.

before:  forward:  a = mm(x, w);  b = relu_(a);  return (b, x, w)
after:   the same graph, whose call is one of a library: b is made by it, x and w are handed through

Libraries are made ahead of time (AOTInductor), side by side in processes of their own, and kept in
inductor's cache folder under a hash of the graph, its layouts, the number of threads, the processor
and torch's version: equal blocks share one, and a second start compiles nothing. Beside each lies
what was measured when it was made: seconds as it is and compiled, in turn, and the memory it takes.
What inductor cannot compile runs as it is, and so does, under "auto", what that makes no faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxpipe.errors import told
from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.inductor import ELSEWHERE, Compiled, TensorLayout, Wiring, peak_of
from fxpipe.log import noted
from fxpipe.passes.differentiate.extract import results
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.graph.liveness import liveness
from fxpipe.passes.inductor.libraries import (
    Libraries,
    Record,
    can_compile,
    compile_all,
    is_lasting,
    key_of,
)
from fxpipe.passes.inductor.lower_graph import CannotCompile, graph_text, lowered
from fxpipe.passes.partition.measure import Stopwatch

StageCompiler = Literal["inductor", "auto"]
"""Whether all graphs are compiled, or those that get faster by it."""

PAYS = 0.95
"""Under "auto" a graph is compiled if a call then takes at most this share of its time."""

_OPTIONS = {"layout_optimization": False}
"""Inductor's. What stages send and save keeps its layout, so that convolutions in another one take
copies: with them, the forward of a U-Net was no faster than as it is."""

_ROUNDS = 9
"""So often both ways of running a graph are timed, in turn; the least times count."""


def compile_stages(
    plan: Plan, stage_compiler: StageCompiler, threads: int, own: Collection[int]
) -> Plan:
    """Plan → Plan: the graphs of the kernels are compiled. Not in stages with leaf modules.

    What was compiled before is loaded.

    Args:
        plan: the plan.
        stage_compiler: whether all graphs are compiled, or those that get faster by it.
        threads: how many intra-op threads the libraries use.
        own: the stages that this process runs; others stay as they are.
    """
    jobs = [job for stage in plan.stages if stage.index in own for job in _jobs(stage, threads)]
    libraries = Libraries()
    _make(jobs, libraries, {**_OPTIONS, "cpp.threads": threads})
    changed = {id(job.module): job.changed(libraries, stage_compiler) for job in jobs}
    stages = (
        replace(stage, kernel=stage.kernel.mapped(lambda each: changed.get(id(each), each)))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def peaks_of(plan: Plan, own: Collection[int]) -> dict[int, list[int | None]]:
    """For the other ranks: own stage → for each of its graphs the most bytes that a call of its
    library adds, None where it runs as it is."""
    return {index: [*map(peak_of, _graphs(plan.stages[index]))] for index in own}


def take_peaks(plan: Plan, peaks: Mapping[int, Sequence[int | None]]) -> None:
    """Note what another rank has told of its stages."""
    for index, found in peaks.items():
        for graph, peak in zip(_graphs(plan.stages[index]), found, strict=True):
            graph.meta[ELSEWHERE] = peak


def _graphs(stage: Stage) -> list[fx.GraphModule]:
    found: list[fx.GraphModule] = []

    def see(graph: fx.GraphModule) -> fx.GraphModule:
        found.append(graph)
        return graph

    if isinstance(stage.kernel, GraphKernel):
        stage.kernel.mapped(see)
    return found


class Job:
    """One graph of a stage.

    Attributes:
        module: the graph with the code that runs it as it is.
        what: its name in messages.
        key: names its library; equal graphs have the same.
        reason: why it is not compiled; empty where it is, or may be.
        device: where it runs.
    """

    def __init__(
        self, module: fx.GraphModule, what: str, owned: Collection[str], threads: int
    ) -> None:
        """Make the graph that inductor gets; ``reason`` says why, if there is none.

        Args:
            module: the graph.
            what: its name in messages.
            owned: names of arguments that are in memory which nothing else holds.
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
        """Export the graph into a folder, as a task for a process that compiles it."""
        # zeros: a library checks indices
        given = tuple(look.empty().zero_() for look in self._wiring.looks)
        source, target = Path(scratch) / f"{self.key}.graph.pt2", self.package(scratch)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(self._module, given, strict=False), source)
        names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
        places = [at for at, name in enumerate(names) if name in self._owned]
        owned = [index for index, at in enumerate(self._wiring.takes) if at in places]
        default = str(torch.get_default_dtype()).removeprefix("torch.")
        return str(source), str(target), options, owned, default

    def package(self, scratch: str) -> Path:
        """Where the package of its library will be."""
        return Path(scratch) / f"{self.key}.pt2"

    def measured(self, libraries: Libraries, suffix: str, peak: int) -> Record:
        """The record of its new library."""
        values = [_example(n.meta["val"]) for n in self.module.graph.find_nodes(op="placeholder")]
        library = libraries.load(self.key, suffix, self.device)
        compiled = Compiled(library, self._wiring, self.module.forward)
        for value, node in zip(compiled([*values]), results(self.module.graph), strict=True):
            if isinstance(value, Tensor) and not TensorLayout.of(node.meta["val"]).fits(value):
                return Record(f"inductor gives {node.name!r} in another layout")
        # of this thread alone: other work on the machine counts little
        watch = Stopwatch.of(values, thread_time)
        ways: tuple[Any, ...] = self.module.forward, compiled
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for call, found in zip(ways, times, strict=True):
                given, start = [*values], watch.mark()
                call(given)
                found += watch.seconds([(start, watch.mark())])
        peak += sum(draw.bytes for draw in self._wiring.draws)
        return Record(suffix=suffix, peak=peak, seconds=(min(times[0]), min(times[1])))

    def changed(self, libraries: Libraries, which: StageCompiler) -> fx.GraphModule:
        """The module with its library, if it is to run with that."""
        record = Record(self.reason) if self.reason else libraries.record(self.key) or Record()
        (before, after), reason = record.seconds, record.reason
        if not reason and which == "auto" and after > PAYS * before:
            reason = f"compiled it takes {after / before:.2f} times as long"
        if reason:
            noted(f"{self.what} runs as it is: {reason}")
            return self.module
        library = libraries.load(self.key, record.suffix, self.device)
        own = self.module
        made = lazy_module(own, own.graph, type(own).__name__)
        vars(made)["forward"] = Compiled(library, self._wiring, own.forward, record.peak)
        return made


def _jobs(stage: Stage, threads: int) -> Iterator[Job]:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel):
        noted(f"stage {stage.index} runs as it is: autograd drives its backward")
        return
    parts = {
        "forward": kernel.forward_graph,
        "backward": kernel.backward_graph,
        "input gradients": kernel.input_grad_graph,
        "weight gradients": kernel.weight_grad_graph,
    }
    for kind, own in kernel.buckets.items():
        parts |= {f"bucket {k} of {kind}": each.graph for k, each in enumerate(own)}
    owned: set[str] = set()
    for name, module in parts.items():
        if module is None or not any(n.op == "call_function" for n in module.graph.nodes):
            continue
        yield Job(module, f"the graph of stage {stage.index} for {name}", owned, threads)
        if name in ("forward", "input gradients") or name.startswith("bucket"):
            owned = owned | _made(module.graph)


def _made(graph: fx.Graph) -> set[str]:
    """The nodes in whose memory what a graph makes lies, one for each storage."""
    live = liveness(graph)
    taken = set(live.lies_in(graph.find_nodes(op="placeholder")))
    names = set()
    for node in graph.nodes:
        if node.op == "call_function" and live.of[node] and taken.isdisjoint(live.of[node]):
            names.add(node.name)
            taken.update(live.of[node])
    return names


def _make(jobs: Sequence[Job], libraries: Libraries, options: dict[str, Any]) -> None:
    """Compile those graphs that are not in the folder yet."""
    new = {job.key: job for job in jobs if job.key and libraries.record(job.key) is None}
    lacking = "" if can_compile() else "there is no C++ compiler; install g++, or name one in CXX"
    made: list[tuple[Job, str, int]] = []
    with libraries.scratch() as scratch:
        tasks: list[tuple[Job, tuple[Any, ...]]] = []
        for job in new.values():
            job.reason = lacking
            if lacking:
                continue
            try:
                tasks.append((job, job.task(scratch, options)))
            except Exception as error:  # whatever export says to a graph that it cannot take
                job.reason = told(error).splitlines()[0]
                if is_lasting(error):
                    libraries.write(job.key, Record(job.reason))
        answers = compile_all([task for _, task in tasks])
        for count, (number, answer) in enumerate(answers, 1):
            job = tasks[number][0]
            noted(f"compiled {job.what}, {count} of {len(tasks)}")
            if not answer.reason:
                suffix = libraries.keep(job.key, job.package(scratch), job.device)
                made.append((job, suffix, answer.peak))
            elif answer.lasting:
                libraries.write(job.key, Record(answer.reason))
            else:
                job.reason = answer.reason
    for job, suffix, peak in made:  # now that nothing else runs
        libraries.write(job.key, job.measured(libraries, suffix, peak))
    for job in jobs:
        job.reason = new[job.key].reason if job.key in new else job.reason


def _example(value: Any) -> Any:
    """A value that may stand for a graph's argument."""
    if not isinstance(value, Tensor):
        return value
    found = TensorLayout.of(value).empty().zero_()
    if value.is_floating_point() and value.element_size() > 1:
        generator = torch.Generator(value.device).manual_seed(0)
        places = found.untyped_storage().nbytes() // found.element_size()
        found.as_strided([places], [1]).normal_(generator=generator)  # an expanded one shares some
    return found
