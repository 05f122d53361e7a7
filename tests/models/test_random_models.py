"""Random models under random cuts and schedules equal the plain loop."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpipe import B, F, InputError, PartitionError, U
from fxpipe.compiler import passes
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.front_end import Call, FrontEnd
from fxpipe.compiler.memo import Memo
from fxpipe.compiler.options import Options
from fxpipe.compiler.timetable import Timetable
from fxpipe.engine import Engine
from fxpipe.ir.recipe import Recipe as Schedules
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.task import Task
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment, compute_nodes, place_like
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.options import read_partition
from fxpipe.passes.runner import Pass
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.choice import ThreadChoice
from tests.helpers.profiles import DEEP
from tests.helpers.random_models import OPERATIONS, ROW, SCALAR, RandomModel, Recipe, recipes
from tests.oracles import loop

ROUNDING = 1e-10
"""How far gradients may differ, relative to the greatest, where three or more meet in a sum."""

WANTED = {
    *OPERATIONS,
    "several long skips",
    "a value that three steps read",
    "a module called twice",
    "two modules with one weight",
    "frozen parameters",
    "the same value returned twice",
    "an early value returned",
    "an input returned",
}
"""The features that models must have, now and then."""


def hasty(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Like 1F1B, with two more forwards ahead than it needs."""
    ahead = min(devices - device + 2, microbatches)
    for i in range(microbatches + ahead):
        if i < microbatches:
            yield F(i)
        if i >= ahead:
            yield B(i - ahead)
    yield U()


SCHEDULES = {
    "gpipe": find_recipe("gpipe"),
    "1f1b": find_recipe("1f1b"),
    "hasty": Schedules("hasty", hasty),
}


@dataclass(frozen=True)
class Run:
    """One training step of a compiled model."""

    schedule: str
    microbatches: int
    more: int
    seed: int

    def batch(self, recipe: Recipe) -> int:
        """How many samples: at least as many as the model needs in each micro-batch."""
        return self.microbatches * recipe.least_rows + self.more


@dataclass(frozen=True)
class Cut:
    """How a model is cut into stages.

    Attributes:
        stages: how many there are.
        seed: of a random assignment, or of the choice of names.
        how: "auto" for what fxpipe takes by itself, "nodes" for a random assignment of nodes,
            "names" for the names of submodules.
    """

    stages: int
    seed: int
    how: str

    def partition(self, recipe: Recipe) -> str | list[str]:
        """What the compiler is given."""
        names = recipe.calls
        if self.how != "names" or len(names) < self.stages - 1:
            return "auto"
        chosen = sorted(random.Random(self.seed).sample(range(len(names)), self.stages - 1))
        return [names[place] for place in chosen]

    def assign(self, traced: Traced, stages: int, costs: Mapping[str, NodeCost]) -> Assignment:
        """Stages grow along the graph, with jumps; what must be together is put together."""
        draw = random.Random(self.seed)
        nodes = compute_nodes(traced.graph)
        wishes = {
            node.name: place * stages // len(nodes) + draw.choice((-1, 0, 0, 1))
            for place, node in enumerate(nodes)
        }
        inside = {name: min(max(stage, 0), stages - 1) for name, stage in wishes.items()}
        return place_like(traced, traced, Assignment(stages, inside))

    def applied(self) -> AbstractContextManager[object]:
        """While it is entered, the compiler assigns nodes as this says."""
        return (
            patch.dict(
                passes.LISTS,
                partition=(Pass(self.assign, "traced, stages, costs", "assignment"),),
            )
            if self.how == "nodes"
            else nullcontext()
        )


runs = st.builds(
    Run, st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(0, 7), st.integers(0, 99)
)
cuts = st.builds(
    Cut, st.integers(1, 4), st.integers(0, 2**16), st.sampled_from(["auto", "nodes", "names"])
)


class Remembering(FrontEnd):
    """Traces a model once for several cuts: a graph does not depend on where it is cut."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, Memo())
        self.memory: dict[Any, Traced] = {}

    def trace(self, call: Call, *, free: Sequence[tuple[int, ...]] = ()) -> Traced:
        key = self.reads.key(call.batch), call.size, call.with_loss, bool(free)
        if key not in self.memory:
            self.memory[key] = super().trace(call, free=free)
        return self.memory[key]


@pytest.mark.timeout(0 if DEEP else 900)
@settings(
    max_examples=100 if DEEP else 3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    recipes(),
    st.lists(cuts, min_size=4 if DEEP else 2, max_size=4 if DEEP else 2),
    st.lists(runs, min_size=3, max_size=3),
)
def test_a_random_model_equals_the_loop(
    recipe: Recipe, several: list[Cut], steps: list[Run]
) -> None:
    torch.manual_seed(0)
    model = RandomModel(recipe)
    alone = copy.deepcopy(model)
    most = [most_gradients_in_a_sum(alone, recipe, step) for step in steps]
    for feature in sorted(set(recipe.features())):
        event(feature)
    front_end = Remembering(options_of(model, several[0], recipe, steps[0]))
    for cut in several:
        options = options_of(model, cut, recipe, steps[0])
        compiler = Compiler(options, ThreadChoice(cut.stages, "device"))
        compiler.plans.front_end = front_end
        with cut.applied():
            for step, count in zip(steps, most, strict=True):
                event("bit for bit" if count < 3 else "within rounding")
                bound = 0.0 if count < 3 else ROUNDING
                try:
                    for name in SCHEDULES if DEEP else (step.schedule,):
                        run = replace(step, schedule=name)
                        compare(model, alone, compiler, options, recipe, run, bound)
                except PartitionError:
                    event("a cut that is refused")
                    break
                except InputError as error:
                    if "take different ways" not in str(error):
                        raise
                    event("a single sample that has another backward")


def options_of(model: RandomModel, cut: Cut, recipe: Recipe, step: Run) -> Options:
    """What a pipe over CPU devices is to be."""
    devices = (torch.device("cpu"),) * cut.stages
    return Options(
        model=model,
        devices=devices,
        torch_devices=devices,
        recipe=SCHEDULES[step.schedule],
        partition=read_partition(cut.partition(recipe)),
    )


def compare(
    model: RandomModel,
    alone: RandomModel,
    compiler: Compiler,
    options: Options,
    recipe: Recipe,
    step: Run,
    bound: float,
) -> None:
    """One step of each, from the same state."""
    batch = step.batch(recipe)
    inputs = recipe.inputs(batch, step.seed)
    loop.clear(model, alone)
    options = replace(options, recipe=SCHEDULES[step.schedule], microbatches=step.microbatches)
    compiler.timetable = Timetable(options)
    compiler.memo.forget("call", "program")
    pipe = Pipeline(options, compiler, Engine(options, compiler.choice))
    try:
        loss, output = pipe.step(*inputs, return_output=True)
    finally:
        pipe.close()
    expected = loop.train(alone, step.microbatches, *inputs)
    assert torch.equal(loss, expected.loss)
    for place, index in enumerate(recipe.returned):
        if index < len(inputs):
            assert torch.equal(output["made"][place], inputs[index]), f"output {place}"
        elif recipe.kinds[index] != ROW or batch > step.microbatches:
            parts = [part["made"][place] for part in expected.outputs]
            made = joined(recipe.kinds[index], parts, expected.sizes)
            assert torch.equal(output["made"][place], made), f"output {place}"
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
    loop.assert_same(loop.gradients(model), loop.gradients(alone), bound)


def joined(kind: str, parts: list[Tensor], sizes: list[int]) -> Tensor:
    """A value of the whole batch from those of the micro-batches."""
    if kind == ROW:
        return parts[0]
    if kind != SCALAR:
        return torch.cat(parts)
    shares = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
    return sum(shares[1:], start=shares[0])


def most_gradients_in_a_sum(model: RandomModel, recipe: Recipe, step: Run) -> int:
    """How many gradients autograd adds for the value of which it adds the most.

    Rejects a recipe that changes a value in place which backward needs, or an input.
    """
    inputs = recipe.inputs(step.batch(recipe), step.seed)
    try:
        loss = copy.deepcopy(model)(*inputs)["loss"]
        loss.backward(retain_graph=True)
    except RuntimeError:
        event("refused by PyTorch")
        reject()
    assume(not any(tensor._version for tensor in inputs))
    arriving = Counter[tuple[Any, int]]()
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        for source, output in todo.pop().next_functions:
            if source is not None:
                arriving[source, output] += 1
                todo += [source] if source not in seen else []
                seen.add(source)
    return max(arriving.values())


@pytest.mark.deep
def test_no_feature_of_random_models_is_rare() -> None:
    seen = Counter[str]()

    @settings(max_examples=800, database=None, phases=[Phase.generate], derandomize=True)
    @given(recipes())
    def gather(recipe: Recipe) -> None:
        seen.update(set(recipe.features()))

    gather()
    assert {name for name in WANTED if seen[name] < 3} == set()
