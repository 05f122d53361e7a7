"""What the page of schedules shows: each schedule of the library, for some numbers of devices,
micro-batches and stages a device, simulated with some times of tasks and of links."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.extensions.simulator.simulation import task_of
from fxpipe.ir.recipe import RECIPES, Recipe, round_robin
from fxpipe.ir.schedule import Schedule

UNIT = 240
"""The forward of all stages of a device, in the unit of the page's numbers; what it saves, too."""

TIMES = {
    "a backward takes 2 forwards": (1, 1, 1.0),
    "a backward takes 3 (it recomputes)": (2, 1, 1.0),
    "2, and the last stage takes 1.5 times as long": (1, 1, 1.5),
}
"""Times of tasks: gradients of inputs and of weights in forwards, and the last stage's factor."""

LINKS = {"no time": 0, "a quarter of a forward": 0.25, "a forward": 1}
"""Latencies of links in forwards."""

STAGES = (2, 3, 4)
"""Stages a device, where a schedule leaves that open."""

STEPS = 3
"""Of schedules whose batches overlap."""


def every_run(devices: Sequence[int], microbatches: Sequence[int]) -> dict[str, Any]:
    """All that the page knows, as dicts, lists, numbers and strings. Times are in ``UNIT`` a
    forward, memory in ``UNIT`` for what the stages of a device save of a micro-batch."""
    plans = [
        plan
        for name, recipe in sorted(RECIPES.items())
        if name != "inference"
        for plan in _plans(recipe, devices, microbatches)
    ]
    return {"unit": UNIT, "times": [*TIMES], "links": [*LINKS], "plans": plans}


def _plans(
    recipe: Recipe, devices: Sequence[int], microbatches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """What is known of a recipe, where its schedule is valid."""
    usual = recipe.stages(1)
    open_ = usual > 1 and recipe.placement(2) == round_robin(usual)(2)
    for v in STAGES if open_ else [usual]:
        made = replace(recipe, placement=round_robin(v)) if v != usual else recipe
        for p in devices:
            for m in microbatches:
                try:
                    schedule = made(p, m).verify()
                except FxpipeError:  # it is for other numbers
                    continue
                yield _plan(recipe, schedule, v, as_named=v == usual)


def _plan(recipe: Recipe, schedule: Schedule, v: int, *, as_named: bool) -> dict[str, Any]:
    name, p, m = recipe.name, schedule.devices, schedule.microbatches
    stages, each = range(len(schedule.placement)), UNIT // v
    saved, deferred = dict.fromkeys(stages, each), dict.fromkeys(stages, each // 2)
    sizes = fxpipe.Sizes(saved=saved, deferred=deferred)
    first = schedule.simulate(sizes=sizes, steps=STEPS if schedule.overlaps else 1)
    links = [fxpipe.Link(latency=latency * UNIT) for latency in LINKS.values()]
    runs = []
    for inputs, weights, last in TIMES.values():
        costs: dict[Any, float] = {"U": each // 4}
        for letter, time in (("F", 1), ("B", inputs + weights), ("I", inputs), ("W", weights)):
            costs |= {letter: each * time, (letter, stages[-1]): each * time * last}
        runs.append([_run(first.with_costs(costs, links=link, sizes=sizes)) for link in links])
    text = f'"{name}"' if as_named else f'fxpipe.Schedule.parse("""\n{schedule}""")'
    line = (
        f"pipe = fxpipe.compile(model, devices={p}, microbatches={m}, loss=loss, schedule={text})"
    )
    shown = f"\n# fxpipe schedule {name} -p {p} -m {m} --draw {name}.svg\n\n{schedule}"
    tasks = [(span.device, str(task_of(span.instruction))) for span in first.spans]
    return {
        **{"name": name, "p": p, "m": m, "v": v, "runs": runs},
        "does": (inspect.getdoc(recipe.tasks) or "").partition("\n\n")[0].replace("\n", " "),
        "copy": line + (shown if as_named else ""),
        "rows": [[task for own, task in tasks if own == device] for device in range(p)],
    }


def _run(simulation: Any) -> dict[str, Any]:
    """Figures, and of each device its tasks in order: since the one before, how long, and what is
    saved meanwhile."""
    rows: list[list[int]] = [[] for _ in range(simulation.devices)]
    ends = [0] * simulation.devices
    for device, start, end, _, position in simulation.spans:
        level = simulation.memory[device].levels[position]
        rows[device] += [round(start) - ends[device], round(end) - round(start), level]
        ends[device] = round(end)
    return {
        "step": float(simulation.step_time) / UNIT,
        "bubble": float(simulation.bubble),
        "peak": max(memory.peak for memory in simulation.memory) / UNIT,
        "versions": [*simulation.weight_versions],
        "busy": [float(busy / simulation.makespan) for busy in simulation.busy],
        "rows": rows,
    }
