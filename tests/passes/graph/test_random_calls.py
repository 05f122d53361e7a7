"""Random models, called in random ways: inputs, outputs, losses and state equal the plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import PartitionError
from fxpipe.compiler.objective import Objective
from tests.helpers.profiles import DEEP
from tests.helpers.random_models import ROW, SCALAR, RandomModel, Recipe, recipes
from tests.oracles import loop

ROUNDING = 1e-9
"""How far results may differ, relative to the greatest: the whole batch is summed otherwise."""


@dataclass(frozen=True)
class Layout:
    """How a model is called, and what is around it.

    Attributes:
        turned: whether rows are columns: the batch is the last dimension of inputs and outputs.
        nest: how the inputs nest: "flat", "dict", "list" or "keyword".
        checkpointed: whether the model runs inside of ``torch.utils.checkpoint``.
        deferred: whether BatchNorm's statistics are updated once a step.
    """

    turned: bool
    nest: str
    checkpointed: bool
    deferred: bool

    @property
    def dims(self) -> dict[str, int | None]:
        """For ``batch_dims``."""
        last = -1 if self.turned else 0
        match self.nest:
            case "dict":
                dims = {"first['x']": last, "first['z']": last, "first['row']": None}
            case "list":
                dims = {"first[0]": last, "first[1]": last, "first[3]": None}
            case _:
                dims = {"first": last, "z": last, "row": None}
        return {name: dim for name, dim in dims.items() if dim != 0}


class Inputs(NamedTuple):
    x: Tensor
    z: Tensor
    ids: Tensor
    row: Tensor
    level: Tensor


class Called(nn.Module):
    """A random model behind a random call."""

    def __init__(self, inner: RandomModel, layout: Layout) -> None:
        super().__init__()
        self.inner, self.layout = inner, layout
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(
        self,
        first: Any,
        z: Tensor | None = None,
        ids: Tensor | None = None,
        row: Tensor | None = None,
        level: Tensor | None = None,
        *,
        scale: float = 1.0,
        nothing: Any = None,
    ) -> dict[str, Any]:
        if self.layout.nest == "dict":
            given = Inputs(**first)
        elif self.layout.nest == "list":
            given = Inputs(*first)
        else:
            assert z is not None and ids is not None and row is not None and level is not None
            given = Inputs(first, z, ids, row, level)
        x, other = (given.x.T, given.z.T) if self.layout.turned else (given.x, given.z)
        x = x * self.gain
        rest = (other, given.ids, given.row, given.level)
        if self.layout.checkpointed:
            found: Any = checkpoint(self.inner, x, *rest, use_reentrant=False)
        else:
            found = self.inner(x, *rest)
        made = [self._turned(value) for value in found["made"]]
        return {
            "loss": found["loss"],
            "made": (made, [*made[:1]]),
            "same": {"scale": scale, "nothing": nothing, "row": given.row},
            "samples": given.ids.shape[0],
        }

    def _turned(self, value: Tensor) -> Tensor:
        return value.transpose(0, -1) if self.layout.turned and value.dim() > 1 else value


layouts = st.builds(
    Layout,
    st.booleans(),
    st.sampled_from(["flat", "dict", "list", "keyword"]),
    st.booleans(),
    st.booleans(),
)


def call_of(layout: Layout, given: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs of a batch, or of a micro-batch."""
    if layout.turned:
        given = given._replace(x=given.x.T, z=given.z.T)
    options: dict[str, Any] = {"scale": 2.5, "nothing": None}
    match layout.nest:
        case "dict":
            return (given._asdict(),), options
        case "list":
            return (list(given),), options
        case "keyword":
            rest = given._asdict()
            return (), {"first": rest.pop("x"), **rest, **options}
        case _:
            return tuple(given), options


def split(given: Inputs, microbatches: int) -> list[Inputs]:
    """The micro-batches, rows first."""
    columns = [value.tensor_split(microbatches) for value in given[:3]]
    rest = given.row, given.level
    return [Inputs(x, z, ids, *rest) for x, z, ids in zip(*columns, strict=True)]


OBJECTIVES = {"mean": Objective(), "sum": Objective(reduction="sum")}


def weights_of(objective: str, parts: list[Inputs]) -> list[float]:
    """What the micro-batches' losses are multiplied by, by their definition."""
    if objective == "sum":
        return [1.0] * len(parts)
    counts = [
        float((part.ids < 2).sum()) if objective == "weighted" else float(len(part.ids))
        for part in parts
    ]
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


class Expected(NamedTuple):
    loss: Tensor
    outputs: list[dict[str, Any]]
    buffers: dict[str, Tensor]


def train(alone: Called, parts: list[Inputs], weights: list[float]) -> Expected:
    """The plain loop; it leaves gradients and, but for what is deferred, buffers in ``alone``."""
    before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    seen: defaultdict[str, list[list[Tensor]]] = defaultdict(list)
    norms = {n: m for n, m in alone.named_modules() if isinstance(m, nn.BatchNorm1d)}
    outputs: list[dict[str, Any]] = []
    total = torch.zeros((), dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        here: defaultdict[str, list[Tensor]] = defaultdict(list)
        hooks = [
            norm.register_forward_pre_hook(
                lambda module, args, name=name, here=here: here[name].append(
                    args[0].detach().clone()  # as it is changed in place afterwards
                )
            )
            for name, norm in norms.items()
        ]
        args, kwargs = call_of(alone.layout, part)
        output = alone(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        for name, calls in here.items():
            seen[name].append(calls)
        if weight:
            (output["loss"] * weight).backward()
            total += output["loss"].detach() * weight
        outputs.append(output)
    after = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    if alone.layout.deferred:
        for name, calls_of_parts in seen.items():
            norm = norms[name]
            mean, variance = before[f"{name}.running_mean"], before[f"{name}.running_var"]
            for same_call in zip(*calls_of_parts, strict=True):
                rows = torch.cat(same_call)
                assert norm.momentum is not None
                mean = mean + norm.momentum * (rows.mean(0) - mean)
                variance = variance + norm.momentum * (rows.var(0) - variance)
                before[f"{name}.num_batches_tracked"] += 1
            after[f"{name}.running_mean"], after[f"{name}.running_var"] = mean, variance
            count = f"{name}.num_batches_tracked"
            after[count] = before[count]
        with torch.no_grad():
            for name, buffer in alone.named_buffers():
                buffer.copy_(after[name])
    return Expected(total, outputs, after)


def assert_joined(recipe: Recipe, layout: Layout, ours: Any, expected: Expected) -> None:
    """What a step returns beside its loss."""
    assert ours["samples"] == sum(output["samples"] for output in expected.outputs)
    assert (ours["same"]["scale"], ours["same"]["nothing"]) == (2.5, None)
    sizes = [output["samples"] for output in expected.outputs]
    for place, index in enumerate(recipe.returned):
        parts = [output["made"][0][place].detach() for output in expected.outputs]
        kind = recipe.kinds[index]
        if kind == ROW:
            continue  # of one row: the batch's, or shared, as random models have it
        if kind == SCALAR:
            whole = sum(part * (n / sum(sizes)) for part, n in zip(parts, sizes, strict=True))
            torch.testing.assert_close(ours["made"][0][place], whole, rtol=1e-9, atol=1e-9)
        else:
            dim = parts[0].dim() - 1 if layout.turned else 0
            whole = torch.cat(parts, dim)
            torch.testing.assert_close(ours["made"][0][place], whole, rtol=1e-9, atol=1e-9)
        if place == 0:
            assert torch.equal(ours["made"][1][0], ours["made"][0][0])


class Drawn(NamedTuple):
    """A model, how it is called and run, and how many samples more than the least batches have."""

    recipe: Recipe
    layout: Layout
    devices: int
    schedule: str
    microbatches: int
    more: list[int]


drawn = st.builds(
    Drawn,
    recipes(),
    layouts,
    st.integers(1, 3),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 7), min_size=2, max_size=3),
)

tried = settings(
    max_examples=400 if DEEP else 3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.timeout(0 if DEEP else 900)
@tried
@given(drawn)
def test_a_random_call_equals_the_loop(call: Drawn) -> None:
    assert_equals_the_loop(call, OBJECTIVES)


def assert_equals_the_loop(call: Drawn, objectives: Mapping[str, Objective]) -> None:
    """Compare a pipe with the loop, for each of these ways to weigh micro-batches."""
    recipe, layout, devices, schedule, microbatches, more = call
    torch.manual_seed(0)
    if {"write a buffer", "count in a buffer"} & {step.name for step in recipe.steps}:
        # in eager mode a checkpoint reads there what it has written itself
        layout = replace(layout, checkpointed=False)
    model = Called(RandomModel(recipe), layout)
    # in eager mode a checkpoint that recomputes updates BatchNorm's statistics once more
    alone = Called(copy.deepcopy(model.inner), replace(layout, checkpointed=False))
    least = 2 * microbatches  # of 1 sample PyTorch's BatchNorm makes an error
    batches = [Inputs(*recipe.inputs(least + count, seed)) for seed, count in enumerate(more)]
    try:
        trial = copy.deepcopy(alone)
        for given in batches:
            args, kwargs = call_of(layout, given)
            trial(*args, **kwargs)["loss"].backward()
            if any(tensor._version for tensor in given):
                reject()
    except RuntimeError:
        event("refused by PyTorch")
        reject()
    pipe = fxpipe.compile(
        model,
        ["cpu"] * devices,
        microbatches=microbatches,
        schedule=schedule,
        batch_dims=layout.dims,
        extensions=["deferred_batchnorm"] if layout.deferred else [],
    )
    with pipe:
        for given in batches:
            for name, objective in objectives.items():
                parts = split(given, microbatches)
                weights = weights_of(name, parts)
                if not any(weights):
                    event("a batch of weight 0")
                    continue
                object.__setattr__(pipe._options, "objective", objective)  # the graph is the same
                for known in pipe._compiler.memo.values("call"):
                    known.compiled.done.discard("weighed")  # no pipe changes its objective
                loop.clear(model, alone)
                args, kwargs = call_of(layout, given)
                try:
                    loss, output = pipe.step(*args, return_output=True, **kwargs)
                except PartitionError:
                    event("a cut that is refused")
                    return
                event(f"{name} {'deferred' if layout.deferred else 'in order'}")
                expected = train(alone, parts, weights)
                torch.testing.assert_close(loss, expected.loss, rtol=1e-9, atol=1e-9)
                assert_joined(recipe, layout, output, expected)
                loop.assert_same(dict(model.named_buffers()), expected.buffers, ROUNDING)
                loop.assert_same(loop.gradients(model), loop.gradients(alone), ROUNDING)
