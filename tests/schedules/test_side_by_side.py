"""Stages side by side: tasks wait for the stages that feed theirs, and for no others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import InputError, ParseError, Recipe, Schedule, Task, VerificationError
from fxpipe.ir.recipe import fixed
from fxpipe.ir.value import HOST, Edge
from fxpipe.ir.walk import needs_of
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.helpers.faults import faults_of
from tests.helpers.plans import both, chain, chain_program, plan_of
from tests.oracles import loop

COSTS = {"F": 1, "B": 2, "U": 0}

VOCABULARY = """\
schedule vocabulary stages=4 microbatches=2 delay=0
place 0 2 | 1 3
edges 0->1 1->2 1->3
0: F0@0 F1@0 F0@2 F1@2 B0@2 B0@0 B1@2 B1@0 U@0 U@2
1: F0@1 F0@3 F1@1 F1@3 B0@3 B0@1 B1@3 B1@1 U@1 U@3
"""
"""Two stages, and two shards of an output layer, one on each device."""

TOWERS = (0, 1), (1, 3), (2, 3)
"""An image encoder of two stages, a text encoder of one, and a head."""


def reachable(stages: int, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """All pairs of stages with a way from the first to the second."""
    found = {*edges}
    for by, source, target in product(range(stages), repeat=3):
        if (source, by) in found and (by, target) in found:
            found.add((source, target))
    return found


def edges_of(schedule: Schedule) -> Sequence[tuple[int, int]]:
    chained = tuple(pairwise(range(schedule.stages)))
    return chained if schedule.edges is None else schedule.edges


def orders(schedule: Schedule, ways: set[tuple[int, int]]) -> dict[Task, set[Task]]:
    """Each F or B → the tasks that must come before it."""
    rows = [[task for task in row if task.kind != "U"] for row in schedule.rows]
    before: dict[Task, set[Task]] = {task: set() for row in rows for task in row}
    for one, then in (pair for row in rows for pair in pairwise(row)):
        before[then].add(one)
    for i, s in product(range(schedule.microbatches), range(schedule.stages)):
        before[Task("B", i, s)].add(Task("F", i, s))
    for i, (source, target) in product(range(schedule.microbatches), ways):
        before[Task("F", i, target)].add(Task("F", i, source))
        before[Task("B", i, source)].add(Task("B", i, target))
    return before


def ends_of(before: dict[Task, set[Task]]) -> dict[Task, int] | None:
    """Each task → when it ends, as early as it can; None if they wait in a circle."""
    ends: dict[Task, int] = {}
    try:
        for task in TopologicalSorter(before).static_order():
            ends[task] = max((ends[each] for each in before[task]), default=0) + COSTS[task.kind]
    except CycleError:
        return None
    return ends


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Drawn edges, places and orders of tasks, some of which are exchanged or of another order."""
    stages, devices = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    m = draw(st.integers(1, 3))
    pairs = list(combinations(range(stages), 2))
    edges = tuple(draw(st.sets(st.sampled_from(pairs), min_size=len(pairs) // 3))) if pairs else ()
    placement = tuple(draw(st.integers(0, devices - 1)) for _ in range(stages))
    keys = [(kind, i, s) for kind in "FB" for i in range(m) for s in range(stages)]
    start = {key: draw(st.integers(0, 6)) for key in keys}
    for i in range(m) if draw(st.integers(0, 4)) else ():  # right, but for what is exchanged
        for s in range(stages):
            before = [start["F", i, source] for source, target in edges if target == s]
            before += [start["F", i - 1, s]] if i else []
            start["F", i, s] = max([start["F", i, s], *(at + 1 for at in before)])
        for s in reversed(range(stages)):
            before = [start["B", i, target] for source, target in edges if source == s]
            before += [start["F", i, s]]
            start["B", i, s] = max([start["B", i, s], *(at + 1 for at in before)])
    rows: list[list[Task]] = [[] for _ in range(devices)]
    for key in sorted(keys, key=lambda key: (start[key], key)):
        rows[placement[key[2]]].append(Task(*key))
    for row in rows[: draw(st.integers(0, 1))]:
        if row:
            moved = row.pop(draw(st.integers(0, len(row) - 1)))
            row.insert(draw(st.integers(0, len(row))), moved)
    for s, home in enumerate(placement):
        rows[home].append(Task("U", None, s))
    return Schedule("drawn", m, placement, tuple(map(tuple, rows)), edges=edges)


@given(schedules())
def test_a_schedule_is_accepted_exactly_when_its_stages_can_wait_for_those_that_feed_them(
    schedule: Schedule,
) -> None:
    ends = ends_of(orders(schedule, reachable(schedule.stages, edges_of(schedule))))
    ascending = all(
        [t.microbatch for t in row if (t.kind, t.stage) == ("F", s)]
        == [*range(schedule.microbatches)]
        for s, row in enumerate(schedule.rows[home] for home in schedule.placement)
    )
    assert Schedule.parse(str(schedule)) == schedule
    try:
        schedule.verify()
    except VerificationError:
        assert ends is None or not ascending
    else:
        assert ends is not None
        assert ascending
        chain_program(schedule).verify()


@given(schedules())
def test_a_task_waits_for_all_stages_from_which_there_is_a_way_to_its_own(
    schedule: Schedule,
) -> None:
    ways = reachable(schedule.stages, edges_of(schedule))
    needs = needs_of(schedule)
    every = range(schedule.stages)
    for stage, kind in product(every, "FB"):
        found: set[Any] = set()
        left: list[Any] = [(kind, 0, stage)]
        while left:
            left += [key for key in needs(left.pop()) if key not in found]
            found.update(left)
        own = {("F", s) for s in every if (s, stage) in ways}
        if kind == "B":
            later = {s for s in every if (stage, s) in ways}
            feeding = {s for s in every for other in {stage, *later} if (s, other) in ways}
            own = {("B", s) for s in later} | {("F", s) for s in {stage, *later, *feeding}}
        assert {(letter, s) for letter, _, s in found} == own
    assert {(s, t) for s in every for t in schedule.behind[s]} == ways


def test_a_slice_comes_after_the_one_before_and_after_the_stages_that_feed_it() -> None:
    schedule = replace(seq1f1b(2)(3, 2), edges=((0, 2), (1, 2)))
    assert schedule.verify().beside[0] == {0: [], 1: [], 2: [0, 1], 3: [0], 4: [1], 5: [2, 3, 4]}
    assert schedule.behind[0] == {2, 3, 5}


def test_edges_that_are_a_chain_are_none() -> None:
    assert replace(one_f_one_b(3, 2), edges=((1, 2), (0, 1), (0, 1))) == one_f_one_b(3, 2)
    assert replace(seq1f1b(2)(3, 2), edges=((0, 1), (1, 2))) == seq1f1b(2)(3, 2)
    apart = replace(one_f_one_b(2, 2), edges=())
    assert str(apart).splitlines()[2] == "edges -"
    assert Schedule.parse(str(apart)) == apart != one_f_one_b(2, 2)
    assert fixed(apart)(2, 2) == apart


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("edges", "line 3, column 6: expected a blank and pairs, such as edges 1->2"),
        ("edges 0-1", "line 3, column 8: expected '->', got '-1'"),
        (
            "edges 0->",
            "line 3, column 10: expected the second number of a pair, such as edges 1->2",
        ),
        (
            "edges 0->1 -",
            "line 3, column 12: expected a number of a pair, such as edges 1->2, or '-'",
        ),
        ("edges - 0->1", "line 3, column 9: unexpected '0->1'"),
    ],
)
def test_edges_that_cannot_be_are_refused_where_they_stand(line: str, message: str) -> None:
    text = f"schedule a stages=2 microbatches=1 delay=0\nplace 0 | 1\n{line}\n0: F0\n1: F0\n"
    with pytest.raises(ParseError) as caught:
        Schedule.parse(text)
    assert str(caught.value).startswith(message)


def test_edges_of_other_stages_are_refused() -> None:
    for edges in ((1, 0),), ((0, 5),):
        (fault,) = faults_of(replace(one_f_one_b(2, 2), edges=edges))
        assert fault.what == f"its edges have {edges[0]}"
    wrong: list[Any] = [3, (0, 1), ((0, 1, 1),)]
    for edges in wrong:
        with pytest.raises(InputError, match=r"edges of a schedule is .*; give pairs of stages"):
            replace(one_f_one_b(2, 2), edges=edges)
    with pytest.raises(InputError, match="edges='ab' gives no pairs of stages"):
        replace(one_f_one_b, edges="ab")(2, 2)  # type: ignore[arg-type]


def test_a_recipe_has_edges_by_the_number_of_devices() -> None:
    recipe = replace(
        gpipe, edges=lambda devices, microbatches: [(s, devices - 1) for s in range(devices - 1)]
    )
    assert recipe(4, 2).verify().edges == ((0, 3), (1, 3), (2, 3))
    assert recipe(2, 2).edges is None


def test_a_plan_that_needs_an_order_which_the_schedule_has_not_is_refused() -> None:
    plan = plan_of(
        3,
        Edge(HOST, 0, "x"),
        *both(0, 1, "a"),
        *both(1, 2, "b"),
        *both(2, HOST, "loss"),
    )
    message = r"stage 0 sends a to stage 1, and the edges of schedule '1f1b' let neither wait"
    with pytest.raises(InputError, match=message):
        Lower(plan)(replace(one_f_one_b(3, 2), edges=((0, 2), (1, 2))).verify())
    skipping = replace(plan, edges=(*plan.edges, Edge(0, 2, "a")))
    assert Lower(skipping)(one_f_one_b(3, 2)).edges == skipping.edges  # 0 is before 2 by way of 1


def test_a_plan_has_edges_between_stages_unless_each_feeds_the_next() -> None:
    assert chain(3).stage_edges is None
    edges = (Edge(HOST, 0, "x"), Edge(HOST, 1, "x"), Edge(0, 2, "a"), Edge(1, 2, "b"))
    assert plan_of(3, *edges, Edge(2, HOST, "loss")).stage_edges == ((0, 2), (1, 2))


class Head(nn.Module):
    """Joins what the encoders give."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.out(torch.cat([image, words.mean(1)], 1))
        return out


class Towers(nn.Module):
    """An image encoder and a text encoder, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh())
        self.head = Head()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.image(image), self.text(words))
        return out


def early_text(device: int, devices: int, microbatches: int) -> Any:
    """1F1B, but for the text encoder, which runs all of its forwards first."""
    if device == 2:
        yield from gpipe.tasks(device, devices, microbatches, stages=[device])
    else:
        yield from one_f_one_b.tasks(device, devices, microbatches)


@pytest.mark.models
@pytest.mark.parametrize(
    "recipe",
    [one_f_one_b, replace(one_f_one_b, edges=TOWERS), Recipe("text", early_text, edges=TOWERS)],
    ids=["a chain", "edges", "text first"],
)
def test_two_towers_train_as_the_loop(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = Towers()
    x, words, y = torch.randn(8, 3, 3, 3), torch.randint(11, (8, 5)), torch.randn(8, 4)
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 4, x, words, loss=mse_loss, target=y)
    with fxpipe.compile(
        model,
        ["cpu"] * 4,
        schedule=recipe,
        microbatches=4,
        partition=["image.3", "text", "head"],
        loss=mse_loss,
    ) as pipe:
        assert torch.equal(pipe.step(x, words, target=y), expected.loss)
        loop.assert_same(loop.gradients(model), loop.gradients(alone))
        assert pipe.plan.stage_edges == pipe.schedule.edges == TOWERS
        assert Schedule.parse(str(pipe.schedule)) == pipe.schedule


@pytest.mark.models
def test_a_model_whose_towers_feed_each_other_is_refused_by_name() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    options: dict[str, Any] = {"partition": ["1", "2", "3"], "loss": mse_loss, "microbatches": 2}
    recipe = replace(one_f_one_b, edges=TOWERS)
    with fxpipe.compile(layers, ["cpu"] * 4, schedule=recipe, **options) as pipe:
        message = r"stage 1 sends \w+ to stage 2, .*; add \(1, 2\) to them, or cut the model"
        with pytest.raises(InputError, match=message):
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
