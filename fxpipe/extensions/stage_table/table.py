"""The table of a pipe's stages, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.extensions.shown import is_serial, predicted_peaks
from fxpipe.extensions.tables import (
    SERIAL,
    count_text,
    first_time,
    plain_table,
    runs,
    table_text,
    wrapped,
)
from fxpipe.formatting import bytes_text
from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import is_compiled
from fxpipe.passes.partition.work import StageLoad
from fxpipe.pipeline import Pipeline

_MODULES = 12
"""The most modules of a stage that are named, where runs of numbers count once."""

_HEAVY = 1.2
"""A stage that takes this many times the mean is marked: without it, a step with many micro-batches
would be a sixth shorter."""

_LEGEND = (
    "times are of one micro-batch; share: of the time of all stages; receives: bytes from other "
    "stages; skips: bytes sent to later stages than the next; memory: the most that the stage's "
    "device holds at once in a step, predicted"
)


def pipeline_table(pipe: Pipeline) -> str:
    """The table of a pipe."""
    shown, engine, options = pipe._calls.shown, pipe._engine, pipe._options
    places = options.group.places or [*map(str, pipe.devices)]
    peaks = None  # nothing is known of the memory of a pipe that has ended
    if shown is not None and not engine.progress.ended:
        peaks = predicted_peaks(engine, shown)
    serial = shown is not None and is_serial(engine, shown)
    loads = pipe._compiler.loads
    return stage_table(options.model, shown, places, loads, peaks, options.replicas, serial)


def stage_table(
    model: nn.Module,
    compiled: Compiled | None,
    places: Sequence[str],
    loads: Sequence[StageLoad],
    peaks: Sequence[int] | None,
    replicas: int,
    serial: bool,
) -> str:
    """Return the table of the stages, their modules, and a line on their balance.

    ``places`` are the locations of the devices, ``loads`` those of the stages, or empty, ``peaks``
    the bytes that devices are predicted to hold at most, if that is known, and ``serial`` says
    whether one thread runs all devices. What the columns mean is
    told by the first table of a process.
    """
    title = f"fxpipe.Pipeline of {type(model).__name__} over {len(places)} devices"
    title += f" in {replicas} replicas" * (replicas > 1)
    if compiled is None:
        return f"{title}: not compiled yet; the first call traces it"
    plan, schedule = compiled.plan, compiled.schedule
    table = plain_table()
    for heading in ("stage", "params", "forward", "backward", "share", "receives", "skips"):
        table.add_column(heading, justify="right")
    table.add_column("memory", justify="right")
    counts = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    seconds = [0.0 if s.costs is None else s.costs.forward + s.costs.backward for s in plan.stages]
    busy = [load.seconds for load in loads] or seconds
    heavy = _HEAVY * sum(busy) / len(busy)
    prefix = _common([name for stage in plan.stages for name in stage.modules])
    modules = []
    for stage, work, load in zip(plan.stages, seconds, busy, strict=True):
        at = stage.index
        share = f"{100 * work / sum(seconds):.1f} %" if sum(seconds) else "–"
        into = sum(plan.bytes_of(edge) or 0 for edge in plan.edges_into(at))
        skips = [edge for edge in plan.edges_from(at) if edge.kind == "skip"]
        table.add_row(
            str(at),
            count_text(sum(counts[argument.target] for argument in stage.parameters)),
            _milliseconds(stage, "forward"),
            _milliseconds(stage, "backward"),
            f"> {share}" if load > heavy else share,
            bytes_text(into),
            bytes_text(sum(plan.bytes_of(edge) or 0 for edge in skips)),
            "–" if peaks is None else bytes_text(peaks[schedule.placement[at]]),
        )
        on = " and ".join(f"{device} ({places[device]})" for device in schedule.devices_of(at))
        modules.append(wrapped(f"{at} on device {on}: {_modules(stage, prefix)}", "   "))
    under = f" (of {prefix[:-1]})" if prefix else ""
    lines = [
        wrapped(f"{title}, {schedule.name}, {schedule.microbatches} micro-batches"),
        *[SERIAL] * serial,
        table_text(table),
        f"stages and their modules{under}",
        *modules,
        wrapped(_balance(busy, loads)),
        *_libraries(plan),
    ]
    if first_time(_LEGEND):
        lines.append(wrapped(_LEGEND))
    return "\n".join(lines)


def _common(names: Sequence[str]) -> str:
    """The longest ``"a.b."`` that all names begin with; no name is left empty by it."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    same = takewhile(lambda column: len({*column}) == 1, columns)
    return "".join(f"{column[0]}." for column in same)


def _libraries(plan: Plan) -> list[str]:
    """A line on how many graphs of each stage run compiled, if any do."""
    graphs = [
        (stage.forward, stage.backward, stage.input_grad, stage.weight_grad)
        for stage in plan.stages
    ]
    counts = [
        f"{sum(map(is_compiled, of_stage))} of {len(of_stage) - of_stage.count(None)}"
        for of_stage in graphs
    ]
    if all(count.startswith("0 ") for count in counts):
        return []
    return [f"compiled graphs, by stage: {', '.join(counts)}"]


def _modules(stage: Stage, prefix: str) -> str:
    names = runs(name.removeprefix(prefix) for name in stage.modules)
    more = len(names) - _MODULES
    shown = ", ".join(names[:_MODULES]) + (f" and {more} more" if more > 0 else "")
    return shown or "none as a whole"


def _milliseconds(stage: Stage, which: str) -> str:
    if stage.costs is None:
        return "–"
    milliseconds = 1e3 * getattr(stage.costs, which)
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.2f} ms"


def _balance(busy: Sequence[float], loads: Sequence[StageLoad]) -> str:
    """How the slowest stage compares with the mean."""
    if not sum(busy):
        return "–: not measured yet; pipe.simulate() measures it"
    ratio = max(busy) * len(busy) / sum(busy)
    mark = "> " if ratio > _HEAVY else ""
    transfers = " (compute and transfers)" if any(load.transfer for load in loads) else ""
    return f"{mark}the slowest stage takes {ratio:.2f} times the mean{transfers}"
