"""Pairs: a forward and a backward that run together, from the language to a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe import B, F, Pair, ParseError, Schedule, Task, U, W
from fxpipe.ir.recipe import Recipe, find_recipe, fixed
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules.one_f_one_b import grouped
from tests.helpers.faults import faults_of
from tests.helpers.plans import add_reduce, end_with_flush
from tests.oracles.small_simulator import HALVES, busy, makespan, simulate

TABLES = (Path(__file__).parents[1] / "published" / "schedules.txt").read_text().split("\n\n")
DUALPIPE = [table for table in TABLES if table.startswith("# DualPipe, ")]


def _paired(device: int, devices: int, microbatches: int) -> Iterator[Task | Pair]:
    """1F1B with one more forward ahead, whose forwards run together with backwards."""
    ahead = min(devices - device + 1, microbatches)
    yield from map(F, range(ahead))
    for i in range(microbatches):
        yield F(i + ahead) & B(i) if i + ahead < microbatches else B(i)
    yield U()


paired = Recipe("pairs in 1f1b", _paired)  # not registered: other tests list the library


@st.composite
def pairings(draw: st.DrawFn) -> Schedule:
    """A schedule of the library, some of whose neighbours are made pairs."""
    name = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "dualpipe-v", "interleaved-1f1b"]))
    schedule = find_recipe(name)(draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    neighbours = [
        then
        for row in schedule.rows
        for first, then in pairwise(row)
        if first.kind == "F" and then.kind in "BIW" and first.microbatch != then.microbatch
    ]
    chosen = draw(st.sets(st.sampled_from(neighbours))) if neighbours else set()
    return replace(schedule, paired=frozenset(chosen))


def runs(schedule: Schedule) -> bool:
    try:
        simulate(schedule, HALVES)
    except AssertionError:
        return False
    return True


def test_a_generator_and_a_text_make_the_same_pairs() -> None:
    text = """\
schedule "pairs in 1f1b" stages=2 microbatches=4 delay=0
place 0 | 1
0: F0 F1 F2 F3&B0 B1 B2 B3 U
1: F0 F1 F2&B0 F3&B1 B2 B3 U
"""
    schedule = paired(2, 4).verify()
    assert str(schedule) == text
    assert Schedule.parse(text) == schedule
    assert fixed(schedule)(2, 4) == schedule
    assert schedule != replace(schedule, paired=frozenset())


@given(pairings())
def test_pairs_are_read_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@given(pairings())
def test_pairs_are_refused_exactly_where_devices_would_wait_for_one_another(
    schedule: Schedule,
) -> None:
    try:
        schedule.verify()
    except fxpipe.VerificationError:
        assert not runs(schedule)
    else:
        assert runs(schedule)


def test_what_is_no_pair_is_named() -> None:
    head = "schedule wrong stages=1 microbatches=3 delay=0\nplace 0\n"
    faults = faults_of(Schedule.parse(head + "0: F0&B0 F1 B1&F2 B2 U"))
    assert [(f.position, f.subject, f.what) for f in faults] == [
        (1, "F0@0&B0@0", "they would start together, and the backward needs the forward"),
        (4, "B1@0&F2@0", "a pair is a forward with a backward behind it"),
    ]
    first = Schedule("wrong", 1, (0,), ((F(0, 0), B(0, 0), U(0)),), paired=frozenset({F(0, 0)}))
    assert "a pair is a forward" in str(faults_of(first)[0])
    away = replace(first, paired=frozenset({W(0, 0)}))
    assert "W0@0 is in paired and in no row" in str(faults_of(away)[0])
    for row, column in ("F0&", 7), ("F0& B1", 7), ("F0&B1&F2", 9), ("F0&B1F2", 9):
        with pytest.raises(ParseError, match=f"line 3, column {column}"):
            Schedule.parse(head + f"0: {row}")


@given(pairings())
def test_passes_leave_pairs_whole(schedule: Schedule) -> None:
    if not runs(schedule):
        return
    for changed in (
        add_recompute(schedule, "always"),
        add_reduce(schedule),
    ):
        assert changed.verify().paired == schedule.paired
    assert not end_with_flush(schedule).paired


def test_a_late_update_of_replicas_leaves_pairs_whole() -> None:
    for m, ahead in product(range(2, 8), range(1, 3)):
        rows: list[list[Task]] = [[], []]
        for i in range(m):
            batch, j = divmod(i - ahead, m)
            rows[0] += [F(i, 0), B(j, 0, batch=batch)]
            rows[0] += [U(0, batch=batch)] if j == m - 1 else []
            rows[1] += [F(i, 1), B(i, 1)]
        then = frozenset(task for task in rows[0] if task.kind == "B")
        window = Schedule("w", m, (0, 1), (tuple(rows[0]), (*rows[1], U(1))), 1, paired=then)
        assert add_reduce(window.verify()).verify().paired == then


def published(table: str) -> Schedule:
    """A published schedule with the pairs that stand in its comments."""
    text = table
    for device, pairs in re.findall(r"# overlapped pairs of (\d+): (.*)", table):
        row = re.search(rf"^{device}: .*$", text, re.MULTILINE)
        assert row is not None
        joined = row[0]
        for pair in pairs.split():
            assert pair.replace("+", " ") + " " in joined
            joined = joined.replace(pair.replace("+", " ") + " ", pair.replace("+", "&") + " ")
        text = text.replace(row[0], joined)
    return Schedule.parse(text)


INTERLEAVED = [t for t in TABLES if "ep-overlap" in t or "kimik2-fused" in t]


@pytest.mark.parametrize("table", INTERLEAVED, ids=lambda table: published(table).name)
def test_overlapped_interleaving_is_as_megatrons_and_kimis(table: str) -> None:
    schedule = published(table)
    size = re.search(r"-g(\d+)-", schedule.name)
    own = grouped(int(size[1]) if size else schedule.devices, pairs=True)
    made = own(schedule.devices, schedule.microbatches).verify()
    assert made.paired
    assert replace(made, name=schedule.name) == schedule


def test_groups_in_pairs_are_valid_for_any_size() -> None:
    for v, p, m in product((2, 3), range(1, 5), range(4, 10)):
        for size in range(p, m + 1):
            if not 0 < m % size < p:
                grouped(size, v, pairs=True)(p, m).verify()


@pytest.mark.parametrize("table", DUALPIPE, ids=lambda table: published(table).name)
@pytest.mark.parametrize(("f", "w"), [(1, 1), (3, 2)])
def test_dualpipes_published_idle_time_comes_out(table: str, f: int, w: int) -> None:
    """It is exact where a pair takes as long as its tasks, and else no less."""
    schedule, b = published(table).verify(), f + w
    p = schedule.devices
    for both in (b, f + b):
        takes = {"F": f, "B": b, "I": f, "W": w, "F&B": both, "A": 0, "U": 0}
        ran = simulate(schedule, takes)
        idles = makespan(ran) - max(busy(ran, device) for device in range(p))
        formula = (p // 2 - 1) * (both + b - 3 * w)
        assert idles == formula if both == f + b else idles <= formula
    assert schedule.kept().devices == (p + 1,) * p


@pytest.mark.models
def test_a_step_with_pairs_leaves_the_weights_of_one_without() -> None:
    torch.set_num_threads(1)
    weights = []
    for schedule in paired(2, 4), replace(paired(2, 4), paired=frozenset()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        with fxpipe.compile(
            model,
            2,
            schedule=schedule,
            microbatches=4,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ) as pipe:
            losses = [float(pipe.step(x, target=y)) for _ in range(3)]
        weights.append((losses, [p.detach().clone() for p in model.parameters()]))
    (one, first), (other, second) = weights
    assert one == other
    assert all(map(torch.equal, first, second))
