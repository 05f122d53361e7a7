"""The table of a pipe's stages, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.formatting import bytes_text, table_text
from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.inductor import peak_of
from fxpipe.passes.partition.assignment import Verdict

_MODULES = 4
"""The most modules of a stage that are named."""


def stage_table(
    model: nn.Module,
    compiled: Compiled | None,
    places: Sequence[str],
    verdict: Verdict | None,
    memory: Sequence[str],
    replicas: int,
) -> str:
    """Return the table of the stages and a line on their balance.

    ``places`` and ``memory`` are the location and the predicted memory peak of each device.
    """
    title = f"fxpipe.Pipeline of {type(model).__name__} over {len(places)} devices"
    title += f" in {replicas} replicas" * (replicas > 1)
    if compiled is None:
        return f"{title}: not compiled yet; the first call traces it"
    plan, schedule = compiled.plan, compiled.schedule
    table = Table(
        title=f"{title}, {schedule.name}, {schedule.microbatches} micro-batches",
        title_justify="left",
    )
    for heading in ("stage", "device"):
        table.add_column(heading)
    table.add_column("modules", overflow="fold")
    for heading in ("parameters", "forward", "backward", "share", "receives", "stash", "memory"):
        table.add_column(heading, justify="right")
    counts = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    seconds = [0.0 if s.costs is None else s.costs.forward + s.costs.backward for s in plan.stages]
    for stage, work in zip(plan.stages, seconds, strict=True):
        device = schedule.placement[stage.index]
        copied = [f"+{copy} ({places[copy]})" for copy in schedule.devices_of(stage.index)[1:]]
        table.add_row(
            str(stage.index),
            "\n".join([f"{device} ({places[device]})", *copied]),
            _modules(stage),
            f"{sum(counts[argument.target] for argument in stage.parameters):,}",
            _milliseconds(stage, "forward"),
            _milliseconds(stage, "backward"),
            f"{100 * work / sum(seconds):.1f} %" if sum(seconds) else "",
            bytes_text(sum(plan.bytes_of(e) or 0 for e in plan.edges_into(stage.index))),
            bytes_text(
                sum(plan.bytes_of(e) or 0 for e in plan.edges_from(stage.index) if e.kind == "skip")
            ),
            memory[device],
        )
    return (
        f"{table_text(table, 130)}\nper micro-batch; {_balance(seconds, verdict)}\n"
        "share: of the time of all stages; receives: bytes from others; "
        "stash: bytes kept for later stages than the next\n"
        "memory: the most that the stage's device holds at once in a step, predicted"
        f"{_libraries(plan)}"
    )


def _libraries(plan: Plan) -> str:
    """A line on how many graphs of each stage inductor has compiled, if it has any."""
    graphs = [
        (stage.forward, stage.backward, stage.input_grad, stage.weight_grad)
        for stage in plan.stages
    ]
    counts = [
        f"{sum(peak_of(graph) is not None for graph in of_stage)} of "
        f"{len(of_stage) - of_stage.count(None)}"
        for of_stage in graphs
    ]
    if all(count.startswith("0 ") for count in counts):
        return ""
    return f"\ngraphs compiled by inductor, by stage: {', '.join(counts)}"


def _modules(stage: Stage) -> str:
    shown = ", ".join(stage.modules[:_MODULES])
    more = len(stage.modules) - _MODULES
    return shown + (f" and {more} more" if more > 0 else "")


def _milliseconds(stage: Stage, which: str) -> str:
    return "" if stage.costs is None else f"{1e3 * getattr(stage.costs, which):.2f} ms"


def _balance(seconds: Sequence[float], verdict: Verdict | None) -> str:
    """How the slowest stage compares with the mean and with the best cut."""
    if not sum(seconds):
        return "nothing was measured"
    if verdict is None:
        ratio = max(seconds) * len(seconds) / sum(seconds)
        return f"the slowest stage takes {ratio:.2f} times the mean"
    loads = verdict.loads
    mean = sum(load.seconds for load in loads) / len(loads)
    what = "compute and transfers" if any(load.transfer for load in loads) else "compute"
    proven = "the best cut"
    if verdict.gap >= 5e-4:
        proven = f"at most {100 * verdict.gap:.1f} % slower than the best cut"
    return (
        f"the slowest stage takes {verdict.slowest / mean:.2f} times the mean ({what}), proven "
        f"{proven} of those that {verdict.condition}"
    )
