"""Random models: directed acyclic graphs over a pool of shared modules, buffers and inputs.

A recipe is data: hypothesis draws and shrinks it, its ``repr`` is a counterexample to paste.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

ROWS, HALF, SQUARE, ROW, SCALAR, INTS, MASK = (
    "(batch, 4)", "(batch, 2)", "(batch, 2, 2)", "(1, 4)", "()", "(batch,) int64", "(batch, 4) bool"
)  # fmt: skip
"""What kinds of values there are, by shape; float64 where nothing else is said."""

INPUTS = (ROWS, ROWS, INTS, ROW, SCALAR)
"""The kinds of a model's inputs, its values 0 to 4."""

POOL = 3
"""How many modules of a kind a model has; fewer than steps, so that some are called twice."""


class RandomModel(nn.Module):
    """Runs a recipe; returns its loss and the values that the recipe returns."""

    scale: Tensor
    average: Tensor
    count: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(POOL))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(POOL))
        self.embedding = nn.Embedding(5, 4)
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(POOL))
        self.last = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)  # never called
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("average", torch.randn(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if recipe.tied:
            self.linears[0].weight = self.linears[1].weight
        for name, parameter in self.named_parameters():
            if name.startswith(recipe.frozen):
                parameter.requires_grad_(False)
        self.double()

    def forward(
        self, x: Tensor, z: Tensor, ids: Tensor, row: Tensor, level: Tensor
    ) -> dict[str, Any]:
        values: list[Tensor] = [x, z, ids, row, level]
        for step in self.recipe.steps:
            reads = [values[index] for index in step.reads]
            values += OPERATIONS[step.name].run(self, step.which, *reads)
        loss = (self.last(values[self.recipe.end]) ** 2).mean()
        for index in self.recipe.losses:
            loss = loss + ((values[index] - 0.3) ** 2).mean()
        return {"loss": loss, "made": [values[index] for index in self.recipe.returned]}


@dataclass(frozen=True)
class Operation:
    """What a step can do.

    Attributes:
        reads: the kinds of its operands.
        makes: the kinds of the values that it appends.
        run: the model, a number that says which of its modules, and the operands → those values.
    """

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    run: Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Step:
    """One operation on earlier values, by their numbers."""

    name: str
    reads: tuple[int, ...]
    which: int = 0


@dataclass(frozen=True)
class Recipe:
    """A model.

    Attributes:
        steps: what it computes; the values of a step are numbered after those before it.
        end: the value, of kind ROWS, that its last layer takes.
        losses: more values that are part of the loss.
        returned: values that it returns beside its loss.
        frozen: prefixes of the names of parameters that are not trained.
        tied: whether two of its linear layers have one weight.
    """

    steps: tuple[Step, ...]
    end: int
    losses: tuple[int, ...]
    returned: tuple[int, ...]
    frozen: tuple[str, ...] = ()
    tied: bool = False

    @property
    def kinds(self) -> list[str]:
        """The kind of every value."""
        return [*INPUTS, *(kind for s in self.steps for kind in OPERATIONS[s.name].makes)]

    @property
    def least_rows(self) -> int:
        """The smallest micro-batch that it takes: BatchNorm needs two samples."""
        return 2 if any(step.name == "norm" for step in self.steps) else 1

    @property
    def calls(self) -> list[str]:
        """The names of the submodules that it calls, each at its first call."""
        names = [f"{CALLS[s.name]}.{s.which}" for s in self.steps if s.name in CALLS]
        return [*dict.fromkeys(names), "last"]

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        """A batch."""
        random = torch.Generator().manual_seed(seed)
        return (
            torch.randn(batch, 4, dtype=torch.float64, generator=random),
            torch.randn(batch, 4, dtype=torch.float64, generator=random),
            torch.randint(5, (batch,), generator=random),
            torch.randn(1, 4, dtype=torch.float64, generator=random),
            torch.randn((), dtype=torch.float64, generator=random),
        )

    def features(self) -> Iterator[str]:
        """What is special about it, to see what a strategy makes."""
        yield from (step.name for step in self.steps)
        made = len(INPUTS)
        last_read: dict[int, int] = {}
        reads: dict[int, int] = {}
        calls: dict[tuple[str, int], int] = {}
        for step in self.steps:
            for index in step.reads:
                last_read[index] = made
                reads[index] = reads.get(index, 0) + 1
            made += len(OPERATIONS[step.name].makes)
            key = step.name, step.which
            calls[key] = calls.get(key, 0) + 1
        if sum(place - index >= 4 for index, place in last_read.items() if index > 4) >= 2:
            yield "several long skips"
        if any(count >= 3 for index, count in reads.items() if index > 4):
            yield "a value that three steps read"
        if any(calls.get(("linear", which), 0) > 1 for which in range(POOL)):
            yield "a module called twice"
        if self.tied and calls.get(("linear", 0)) and calls.get(("linear", 1)):
            yield "two modules with one weight"
        if self.frozen:
            yield "frozen parameters"
        if len(set(self.returned)) < len(self.returned):
            yield "the same value returned twice"
        if any(4 < index < made - 3 for index in self.returned):
            yield "an early value returned"
        if any(index < len(INPUTS) for index in self.returned):
            yield "an input returned"


def _change_a_view(model: RandomModel, which: int, a: Tensor) -> list[Tensor]:
    b = a.clone()
    seen = b[:, 1:3]
    b[:, :2].mul_(2.0)
    seen.add_(a[:, 2:])
    return [b, seen]


def _average(model: RandomModel, which: int, a: Tensor) -> list[Tensor]:
    model.average.mul_(0.9).add_(a.detach().mean(0), alpha=0.1)
    return [a * model.average]


def _count(model: RandomModel, which: int, a: Tensor) -> list[Tensor]:
    model.count += 1
    return [a / model.count]


def _untracked(model: RandomModel, which: int, a: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model.linears[which](a).tanh()]


def _change(model: RandomModel, which: int, a: Tensor) -> list[Tensor]:
    a.add_(0.5)
    return [a]


def _change_a_copy(model: RandomModel, which: int, a: Tensor, b: Tensor) -> list[Tensor]:
    c = a * 1.5
    c.add_(b)
    c.relu_()
    return [c]


_R = (ROWS,)
_RR = (ROWS, ROWS)

OPERATIONS: dict[str, Operation] = {
    "linear": Operation(_R, _R, lambda m, k, a: [m.linears[k](a)]),
    "norm": Operation(_R, _R, lambda m, k, a: [m.norms[k](a)]),
    "gain": Operation(_R, _R, lambda m, k, a: [a * m.gains[k]]),
    "embed": Operation((INTS,), _R, lambda m, k, i: [m.embedding(i)]),
    "tanh": Operation(_R, _R, lambda m, k, a: [a.tanh()]),
    "gelu": Operation(_R, _R, lambda m, k, a: [nn.functional.gelu(a)]),
    "add": Operation(_RR, _R, lambda m, k, a, b: [a + b]),
    "multiply": Operation(_RR, _R, lambda m, k, a, b: [a * b.sigmoid()]),
    "cat": Operation(_RR, _R, lambda m, k, a, b: [torch.cat([a, b], 1)[:, 2:6]]),
    "chunk": Operation(_R, (HALF, HALF), lambda m, k, a: list(a.chunk(2, 1))),
    "stride": Operation(_R, (HALF,), lambda m, k, a: [a[:, ::2]]),
    "join": Operation((HALF, HALF), _R, lambda m, k, a, b: [torch.cat([a, b], 1)]),
    "transpose": Operation(_R, (SQUARE,), lambda m, k, a: [a.view(-1, 2, 2).transpose(1, 2)]),
    "reshape": Operation((SQUARE,), _R, lambda m, k, a: [a.reshape(a.shape[0], 4)]),
    "expand": Operation((ROW, ROWS), _R, lambda m, k, r, a: [r.expand(a.shape[0], 4)]),
    "row of weights": Operation((), (ROW,), lambda m, k: [m.gains[k][None]]),
    "mean": Operation(_R, (SCALAR,), lambda m, k, a: [a.mean()]),
    "scale": Operation((ROWS, SCALAR), _R, lambda m, k, a, s: [a * s]),
    "per sample": Operation(_R, _R, lambda m, k, a: [a * (2.0 / a.shape[0])]),
    "number": Operation(
        _R, _R, lambda m, k, a: [a + torch.arange(a.shape[0], dtype=a.dtype)[:, None] / 10]
    ),
    "new": Operation(_R, _R, lambda m, k, a: [a.new_full((a.shape[0], 4), 0.5)]),
    "constant": Operation(_R, _R, lambda m, k, a: [a + a.new_tensor([1.0, -1.0, 0.5, 0.0])]),
    "read a buffer": Operation(_R, _R, lambda m, k, a: [a * m.scale]),
    "write a buffer": Operation(_R, _R, _average),
    "count in a buffer": Operation(_R, _R, _count),
    "remainder": Operation((INTS,), (INTS,), lambda m, k, i: [(i * 3 + k) % 5]),
    "compare": Operation(_R, (MASK,), lambda m, k, a: [a > 0]),
    "where": Operation((MASK, *_RR), _R, lambda m, k, c, a, b: [torch.where(c, a, b)]),
    "detach": Operation(_R, _R, lambda m, k, a: [a.detach()]),
    "no_grad": Operation(_R, _R, _untracked),
    "change in place": Operation(_R, _R, _change),
    "change a copy in place": Operation(_RR, _R, _change_a_copy),
    "change a view in place": Operation(_R, (ROWS, HALF), _change_a_view),
}

CALLS = {"linear": "linears", "norm": "norms"}
"""The operations that call a submodule, and the list that holds it."""

FLOATS = (ROWS, HALF, SQUARE, SCALAR)
"""The kinds that a loss may take."""


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Models of three to twelve steps; what no step reads is part of the loss, most times."""
    kinds = list(INPUTS)
    steps: list[Step] = []
    for _ in range(draw(st.integers(3, 12))):
        possible = [name for name, one in OPERATIONS.items() if {*one.reads} <= {*kinds}]
        rare = [name for name in possible if {*OPERATIONS[name].reads} - {ROWS, ROW}]
        name = draw(st.sampled_from(possible + rare * 3))
        operation = OPERATIONS[name]
        fresh = name == "change in place"  # of an input it is an error
        choices = [_numbers(kinds, kind, len(INPUTS) if fresh else 0) for kind in operation.reads]
        if not all(choices):
            continue
        reads = tuple(draw(_late(numbers)) for numbers in choices)
        steps.append(Step(name, reads, draw(st.integers(0, POOL - 1))))
        kinds += operation.makes
    read = {index for step in steps for index in step.reads}
    sinks = [i for i in range(5, len(kinds)) if i not in read and kinds[i] in FLOATS]
    dead = draw(st.sets(st.sampled_from(sinks), max_size=1)) if sinks else set()
    names = ("linears.0", "linears.1.bias", "norms.1", "embedding", "gains")
    return Recipe(
        steps=tuple(steps),
        end=draw(_late(_numbers(kinds, ROWS, 0))),
        losses=tuple(i for i in sinks if i not in dead),
        returned=tuple(draw(st.lists(st.integers(0, len(kinds) - 1), max_size=3))),
        frozen=tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True))),
        tied=draw(st.booleans()),
    )


def _numbers(kinds: list[str], kind: str, start: int) -> list[int]:
    return [index for index in range(start, len(kinds)) if kinds[index] == kind]


def _late(numbers: list[int]) -> st.SearchStrategy[int]:
    """One of them, the later ones more often, so that models are deep as well as wide."""
    return st.sampled_from(numbers[-3:]) | st.sampled_from(numbers)
