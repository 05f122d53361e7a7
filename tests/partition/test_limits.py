"""Cuts under all that a partition can ask for, against a brute-force oracle."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import PartitionError
from fxpipe.passes.partition.assignment import in_order
from fxpipe.passes.partition.atoms import Footprint, atoms_of
from fxpipe.passes.partition.balance import balance
from fxpipe.passes.partition.solve import SLACK
from fxpipe.passes.partition.work import StageDevices, weigh
from tests.partition.test_partition import Recipe, built, every_assignment, is_run, recipes


@given(recipes(), st.data())
def test_links_limits_and_speeds_hold_at_once(recipe: Recipe, data: st.DataObject) -> None:
    traced, costs = built(recipe)
    stages = range(recipe.stages)
    link = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    machine = StageDevices(
        speeds=tuple(data.draw(st.sampled_from([1.0, 2.0])) for _ in stages),
        limits=tuple(data.draw(st.sampled_from([15.0, 30.0, math.inf])) for _ in stages),
        peaks=tuple(reversed(range(1, recipe.stages + 1))),
        per_byte=tuple(tuple(link * (a != b) for b in stages) for a in stages),
    )
    footprint = Footprint({"p": 6, "q": 3}, {node.name: 2 for node in in_order(traced)})
    alone = atoms_of(traced, costs, footprint, views=False)
    order = [n[0].name for n in atoms_of(traced, costs, footprint).nodes]
    slowest_of: dict[tuple[int, ...], float] = {}
    runs: list[float] = []
    for candidate in every_assignment(traced, recipe.stages):
        stage_of = tuple(candidate[nodes[0].name] for nodes in alone.nodes)
        division = weigh(alone.work, machine, stage_of)
        if division.fits(machine):
            slowest_of[stage_of] = division.slowest
            runs += [division.slowest] if is_run(candidate, order) else []
    try:
        ours = balance(traced, recipe.stages, costs, machine=machine, footprint=footprint)
    except PartitionError:
        assert not runs
        return
    chosen = tuple(ours.nodes[nodes[0].name] for nodes in alone.nodes)
    assert chosen in slowest_of
    if runs and not link:
        assert slowest_of[chosen] <= min(runs) * (1 + SLACK) + 1e-9
