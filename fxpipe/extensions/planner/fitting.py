"""What to write where a given schedule keeps no memory limits: what "auto" takes there."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.compiler.compiled import Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.errors import FxpipeError, PartitionError
from fxpipe.extensions.planner.auto import AutoCompiler, auto_schedule
from fxpipe.extensions.planner.stages import FAMILIES, offload_of
from fxpipe.ir.recipe import find_recipe
from fxpipe.runtime.batch import MicroBatches


def fitting_advice(compiler: Compiler, micro: MicroBatches, kind: Kind) -> str:
    """The fastest schedule, micro-batches, recomputation and offloading that are predicted to keep
    the memory limits of a pipe, as text; or why there are none.

    Stages are placed as they were, or else one on each device, and cut by the names that were
    given; whatever else was given is free.
    """
    given = compiler.options
    recipe, make = auto_schedule()
    options = replace(
        given,
        recipe=recipe,
        microbatches=None,
        recompute="never",
        extensions=tuple(each for each in given.extensions if each is not offload_of(given)),
        decides=recipe.name,
    )
    auto = make(options, compiler.choice)
    assert isinstance(auto, AutoCompiler)
    alike = [n for n in FAMILIES if find_recipe(n).place(len(given.devices)) == given.placement]
    auto.families = alike or FAMILIES[:1]
    # the traces of the same model and loss
    auto.plans.front_end, auto.plans.proven = compiler.plans.front_end, compiler.plans.proven
    auto.memo.share(compiler.memo, "trace", "shapes", "output dims")
    auto.plans.sizes.share(compiler.plans.sizes)
    try:
        best = auto.best(micro, updates=kind.updates)
    except PartitionError as error:
        return f'nothing that schedule="auto" tries keeps them either: {error}'
    except FxpipeError as error:
        return f'schedule="auto" cannot plan here: {error}'
    return f"the fastest that is predicted to keep them is {best}"
