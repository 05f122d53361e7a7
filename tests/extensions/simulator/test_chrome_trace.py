"""Traces for Perfetto: every task and transfer once, and memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.extensions.simulator import Link, Simulation, Sizes, simulate_schedule
from fxpipe.extensions.simulator.report import chrome_trace
from fxpipe.schedules import gpipe, one_f_one_b, two_bw, zb_v


def events(simulation: Simulation, phase: str) -> list[dict[str, Any]]:
    found = chrome_trace(simulation)["traceEvents"]
    return [event for event in found if event["ph"] == phase]


def tasks(simulation: Simulation) -> list[dict[str, Any]]:
    return [event for event in events(simulation, "X") if event["cat"] != "transfer"]


@given(
    st.sampled_from([gpipe, one_f_one_b, zb_v]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([0, 0.25, 3]),
)
def test_every_task_is_a_slice_and_so_is_every_transfer_that_takes_time(
    recipe: Any, p: int, m: int, latency: float
) -> None:
    simulation = simulate_schedule(recipe(p, m), links=Link(latency=latency))
    slices = tasks(simulation)
    assert [(e["tid"], e["ts"], e["dur"]) for e in slices] == [
        (s.device, pytest.approx(1000 * s.start), pytest.approx(1000 * s.time))
        for s in simulation.spans
    ]
    moves = [e for e in events(simulation, "X") if e["cat"] == "transfer"]
    assert len(moves) == sum(t.end > t.start for t in simulation.transfers)


def test_a_transfer_is_a_slice_of_its_link() -> None:
    simulation = simulate_schedule(one_f_one_b(2, 1), links=Link(latency=2))
    moves = [e for e in events(simulation, "X") if e["cat"] == "transfer"]
    assert [(e["name"], e["ts"], e["dur"]) for e in moves] == [
        ("act:y0:0->1[0]", 1000, 2000),
        ("grad:y0:1->0[0]", 6000, 2000),
    ]


def test_devices_are_threads_and_simulations_processes() -> None:
    predicted = simulate_schedule(gpipe(2, 1), {"F": 0.01}, links=Link(latency=0.001))
    measured = replace(predicted, measured=True, seconds=True)
    trace = chrome_trace(predicted, measured)["traceEvents"]
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in trace if e["name"].endswith("_name")}
    assert names == {
        (pid, tid, name)
        for pid, what in ((1, "predicted: gpipe"), (2, "measured: gpipe"))
        for tid, name in (
            (0, what),
            (0, "device 0"),
            (1, "device 1"),
            (2, "device 0 to 1"),
            (3, "device 1 to 0"),
        )
    }
    assert Counter(e["pid"] for e in trace if e["ph"] == "X")[1] == len(predicted.spans) + 2
    # Beside a measured one, all times are seconds.
    assert next(e for e in trace if e["ph"] == "X")["dur"] == pytest.approx(10_000)


def test_a_slice_says_what_it_is() -> None:
    simulation = simulate_schedule(two_bw(2, 2), steps=2)
    found = {e["name"]: e for e in tasks(simulation)}
    late = found["F1@0 of batch 1"]
    assert late["cat"] == "forward"
    assert late["args"] == {"stage": 0, "batch": 1, "microbatch": 1, "version": 0}
    assert found["U@1 of batch 0"]["args"] == {"stage": 1, "batch": 0, "reads": 0, "writes": 1}


def test_memory_is_a_counter_of_each_device() -> None:
    sizes = Sizes(values={"x": 8, "y0": 16, "loss": 4}, saved={0: 100, 1: 200})
    simulation = simulate_schedule(gpipe(2, 2), sizes=sizes)
    counters = events(simulation, "C")
    peaks: dict[int, int] = {}
    for event in counters:
        peaks[event["tid"]] = max(peaks.get(event["tid"], 0), event["args"]["bytes"])
    assert peaks == {device: memory.peak for device, memory in enumerate(simulation.memory)}
    assert not events(simulate_schedule(gpipe(2, 2)), "C")


def test_the_file_is_json(tmp_path: Path) -> None:
    simulation = simulate_schedule(gpipe(2, 2))
    simulation.trace(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == chrome_trace(simulation)
    with pytest.raises(InputError, match=r"cannot be written.*No such file"):
        simulation.trace(tmp_path / "nowhere" / "trace.json")
