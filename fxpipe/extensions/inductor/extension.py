"""The extension that compiles stages with torch's inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.extend import Extension
from fxpipe.extensions.inductor.compile_stages import compile_stages
from fxpipe.extensions.inductor.libraries import kept
from fxpipe.extensions.inductor.lower_graph import graph_text
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.runner import Pass


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


_KEEP = Pass(
    keep_costs, "traced, plan, costs, functional, threads", "costs", when="not under_autograd"
)
_COMPILE = Pass(compile_stages, "plan, threads, own", "plan")


@dataclass(frozen=True)
class Inductor(Extension):
    """Compile the graphs of every stage with torch's inductor: the forward, the backward and its
    halves, for each micro-batch size that occurs, in steps and in calls; see docs/compiled.md.

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
