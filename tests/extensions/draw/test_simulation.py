"""Pictures of simulations: under each other, at one scale, with what takes time between devices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fxpipe.errors import InputError
from fxpipe.extensions.draw.picture import GRADIENT, Picture
from fxpipe.extensions.draw.schedule import draw_simulations
from fxpipe.extensions.simulator import Link, Simulation, simulate_schedule
from fxpipe.ir.recipe import round_robin
from fxpipe.schedules import gpipe, one_f_one_b, two_bw

TWO = one_f_one_b(2, 3)


def nodes(picture: Picture) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(picture.pipe("json"))["objects"]
    return found


def tasks(picture: Picture) -> list[tuple[str, float, float, float]]:
    """Label, left and right edge and row of each task's box, as they were drawn."""
    found = []
    for node in nodes(picture):
        if node["name"].startswith("task"):
            x, y = map(float, node["pos"].split(","))
            half = float(node["width"]) * 36
            found.append((node["label"], x - half, x + half, -y))
    return found


def shown(picture: Picture) -> set[str]:
    return {node["label"].removesuffix(r"\l") for node in nodes(picture)}


def measured(simulation: Simulation) -> Simulation:
    return replace(simulation, measured=True, seconds=True)


def test_predicted_and_measured_stand_under_each_other_at_one_scale() -> None:
    first = simulate_schedule(TWO, {"F": 0.001, "B": 0.002, "U": 0.001})
    second = measured(simulate_schedule(TWO, {"F": 0.002, "B": 0.003, "U": 0.001}))
    drawn = tasks(first.draw(second))
    count = len(first.spans)
    upper, lower = drawn[:count], drawn[count:]
    assert len(lower) == len(second.spans)
    assert max(row for *_, row in upper) < min(row for *_, row in lower)
    assert [label for label, *_ in upper] == [label for label, *_ in lower]
    # The first forward begins at 0 in both, and is twice as long below.
    (_, left, right, _), (_, left2, right2, _) = upper[0], lower[0]
    assert left == pytest.approx(left2, abs=0.2)
    assert right2 - left2 == pytest.approx(2 * (right - left), rel=0.02)
    assert {
        "predicted · 1f1b · p = 2 · m = 3 · makespan 13 ms · bubble 25.0%",
        "measured · 1f1b · p = 2 · m = 3 · makespan 21 ms · bubble 25.0%",
        "milliseconds",
    } <= shown(first.draw(second))


def test_boxes_stand_where_the_simulation_says() -> None:
    simulation = simulate_schedule(gpipe(3, 2), {("B", 1): 5})
    drawn = tasks(simulation.draw())
    start = min(left for _, left, _, _ in drawn)
    scale = (max(right for _, _, right, _ in drawn) - start) / simulation.makespan
    for span, (_, left, right, _) in zip(simulation.spans, drawn, strict=True):
        assert left == pytest.approx(start + span.start * scale, abs=0.3)
        assert right == pytest.approx(start + span.end * scale, abs=0.3)


def test_wide_simulations_are_wrapped_together() -> None:
    first = simulate_schedule(one_f_one_b(4, 48), {"F": 1.0, "B": 2.0}, links=Link(latency=0.1))
    picture = first.draw(measured(first))
    titles = [text for text in shown(picture) if text.startswith(("predicted", "measured"))]
    assert sum("continued" not in text for text in titles) == 2
    assert picture.source.count("device 2") == 2 * 4
    parts = {label for label, *_ in tasks(picture) if label}
    assert parts >= {f"{kind}{i}" for kind in "FB" for i in range(48)}
    edges = json.loads(picture.pipe("json"))["edges"]
    assert len({edge["tooltip"] for edge in edges if "tooltip" in edge}) == 2 * 3 * 48


def test_transfers_that_take_time_are_arrows() -> None:
    picture = simulate_schedule(TWO, links=Link(latency=0.5)).draw()
    edges = json.loads(picture.pipe("json"))["edges"]
    arrows = {edge["tooltip"]: edge["color"] for edge in edges if "tooltip" in edge}
    assert set(arrows) == {
        f"{kind}[{i}]" for kind in ("act:y0:0->1", "grad:y0:1->0") for i in range(3)
    }
    assert arrows["grad:y0:1->0[0]"] == GRADIENT
    assert {"value to the next stage", "gradient"} <= shown(picture)
    without = simulate_schedule(TWO).draw()
    assert "gradient" not in shown(without)


def test_versions_and_batches_are_told_where_batches_overlap() -> None:
    picture = two_bw(2, 2).simulate(steps=3).draw()
    labels = {label for label, *_ in tasks(picture)}
    assert {r"F0\nb0\nv0", r"F0\nb1\nv0", r"F0\nb2\nv1"} <= labels
    assert "predicted · 2bw · p = 2 · m = 2 · 3 steps and flush" in picture.source


def test_stages_are_told_where_a_device_holds_several() -> None:
    schedule = gpipe.placed(round_robin(2))(2, 2)
    labels = {label for label, *_ in tasks(schedule.simulate().draw())}
    assert {r"F0\n@0", r"F0\n@2", r"B1\n@3"} <= labels


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InputError, match="no simulation"):
        draw_simulations()
