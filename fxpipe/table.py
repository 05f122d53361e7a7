"""The table of stages that ``print(pipe)`` shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.ir.plan import Stage
from fxpipe.passes.partition.assignment import Verdict
from fxpipe.words import bytes_text

_MODULES = 4


def stage_table(
    model: nn.Module,
    compiled: Compiled | None,
    devices: Sequence[torch.device],
    verdict: Verdict | None = None,
    memory: Sequence[str] = (),
) -> str:
    """The stages, and how well they are balanced, as text.

    Args:
        model: the model.
        compiled: what is shown; None before the first call.
        devices: where the stages are.
        verdict: what the partition knows of its balance.
        memory: device → what it is predicted to hold at most.
    """
    title = f"fxpipe.Pipeline of {type(model).__name__} over {len(devices)} devices"
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
        table.add_row(
            str(stage.index),
            f"{device} ({devices[device]})",
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
    console = Console(width=130, color_system=None, file=None, record=True, quiet=False)
    with console.capture() as capture:
        console.print(table)
    text = "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
    return (
        f"{text}\nper micro-batch; {_balance(seconds, verdict)}\n"
        "memory: the most that the stage's device holds at once in a step, predicted"
    )


def _modules(stage: Stage) -> str:
    shown = ", ".join(stage.modules[:_MODULES])
    more = len(stage.modules) - _MODULES
    return shown + (f" and {more} more" if more > 0 else "")


def _milliseconds(stage: Stage, which: str) -> str:
    return "" if stage.costs is None else f"{1e3 * getattr(stage.costs, which):.2f} ms"


def _balance(seconds: Sequence[float], verdict: Verdict | None) -> str:
    """What was balanced, and how near to the best it is."""
    if not sum(seconds):
        return "nothing was measured"
    if verdict is None:
        ratio = max(seconds) * len(seconds) / sum(seconds)
        return f"the slowest stage takes {ratio:.2f} times the mean"
    loads = verdict.loads
    mean = sum(load.seconds for load in loads) / len(loads)
    what = "compute"
    if any(load.transfer for load in loads):
        what = "compute and transfers"
    proven = "the best cut"
    if verdict.gap >= 5e-4:
        proven = f"at most {100 * verdict.gap:.1f} % slower than the best cut"
    return (
        f"the slowest stage takes {verdict.slowest / mean:.2f} times the mean ({what}), proven "
        f"{proven} of those that {verdict.condition}"
    )
