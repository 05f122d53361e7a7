"""Simulations and measured runs as a table, and as a trace for Perfetto and chrome://tracing.

The trace has Chrome's "Trace Event Format" (Google, 2016). Each simulation is a process. Each
device is a thread in it, and so is each link on which transfers take time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fxpipe.extensions.simulator.memory import PARTS
from fxpipe.extensions.simulator.simulation import Simulation, task_of
from fxpipe.extensions.tables import SERIAL, first_time, plain_table, table_text, wrapped
from fxpipe.formatting import byte_unit, bytes_text, plural
from fxpipe.ir.task import KINDS
from fxpipe.text.program import print_instruction

LEGEND = (
    "bubble: the share of the devices' time that is idle until the last micro-batch is through. By "
    "cause: before the first task (warm-up), for another device's task (waits for), for transfers "
    "(copies), for all devices (together), for other replicas (sums), the rest in between (other), "
    "after the last task (drain). kept: the most micro-batches kept for backward; versions: of "
    "the weights"
)
"""What the columns of the table mean, told by the first table of a process. Empty columns are left
out."""

Event = dict[str, Any]


def simulation_table(simulation: Simulation) -> str:
    """The table as text: each device's busy time, its idle time by cause, and what it keeps."""
    program = simulation.program
    headings = ["device", "stages", "busy", "warm-up", "waits for", "copies", "together", "sums"]
    headings += ["other", "drain", "kept", "versions"]
    rows: list[list[str]] = []
    end = simulation.through or 1
    single = max(simulation.weight_versions, default=1) <= 1
    for device, idle in enumerate(simulation.idle):
        held = program.held_by(device)
        shares = [
            _share(idle.warm_up, end),
            _by_device(idle.waiting, end),
            _by_device(idle.copying, end),
            *(_share(time, end) for time in (idle.meeting, idle.summing, idle.other, idle.drain)),
        ]
        stages = ", ".join(map(str, held))
        kept = ", ".join(str(simulation.kept[stage]) for stage in held)
        versions = ", ".join(str(simulation.weight_versions[stage]) for stage in held)
        row = [str(device), stages, f"{1 - idle.total / end:.1%}", *shares, kept]
        rows.append([*row, "" if single else versions])
    table = plain_table()
    shown = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    for at in shown:
        table.add_column(headings[at], justify="left" if at < 2 else "right")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    lines = [wrapped(_title(simulation)), *[SERIAL] * simulation.serial, table_text(table)]
    if simulation.sizes is not None:
        lines += ["", _memory(simulation), ""]
    makespan, bubble = _time(simulation, simulation.makespan), f"{simulation.bubble:.1%}"
    lines.append(wrapped(f"makespan {makespan}, bubble {bubble}{_long_run(simulation)}"))
    if simulation.through < simulation.makespan:
        when = _time(simulation, simulation.through)
        lines.append(f"shares are of the {when} until the last micro-batch is through")
    if first_time(LEGEND):
        lines.append(wrapped(LEGEND))
    if program.replicas > 1:
        lines.append(wrapped(_sums(simulation)))
    return "\n".join(lines)


def _memory(simulation: Simulation) -> str:
    """What the memory of each device is made of when it holds the most."""
    parts = [part for part in PARTS if any(memory.parts[part] for memory in simulation.memory)]
    fullest = max(range(simulation.devices), key=lambda at: simulation.memory[at].peak)
    most = simulation.memory[fullest]
    size, unit = byte_unit(most.peak)
    table = plain_table(gap=1)
    for heading in ("device", "peak", *parts):
        table.add_column(heading, justify="right")
    for device, memory in enumerate(simulation.memory):
        texts = [
            f"{count / size:.1f}"
            for count in (memory.peak, *(memory.parts[part] for part in parts))
        ]
        table.add_row(str(device), *texts)
    list_ = simulation.program.lists[fullest]
    when = f" at {_time(simulation, most.time)}, in: {print_instruction(list_[most.position])}"
    return "\n".join(
        [
            f"memory at its peak, predicted, in {unit}",
            table_text(table),
            wrapped(f"device {fullest} holds the most{when if list_ else ''}"),
        ]
    )


def _title(simulation: Simulation) -> str:
    program = simulation.program
    what = "measured" if simulation.measured else "simulated"
    counts = f"{simulation.devices} devices, {program.microbatches} micro-batches"
    if program.replicas > 1:
        counts += f", {program.replicas} replicas"
    return f"{program.name}, {what}: {counts}, {plural(simulation.steps, 'step')}"


def _sums(simulation: Simulation) -> str:
    """How much of the sums over the replicas hides, and the bytes that they take."""
    replicas = simulation.program.replicas
    what = "sum gradients" + " and gather weights" * (
        "gather_weights" in simulation.program.opcodes
    )
    text = f"{simulation.hidden:.1%} of the time in which {replicas} replicas {what} hides"
    if simulation.sizes is None:
        return text
    most = max(simulation.summed(replicas - 1)) // simulation.steps
    return f"{text}; a device sends at most {bytes_text(most)} for them a step"


def _long_run(simulation: Simulation) -> str:
    if not simulation.window.depth or simulation.again is None:
        return ""
    steady = simulation.steady
    return (
        f"; in the long run a step takes {_time(simulation, steady.period)}, bubble "
        f"{steady.bubble:.1%}"
    )


def _share(time: float, end: float) -> str:
    return f"{time / end:.1%}" if time else ""


def _by_device(times: Mapping[int, float], end: float) -> str:
    counted = {device: time for device, time in times.items() if f"{time / end:.1%}" != "0.0%"}
    most = sorted(sorted(counted, key=counted.__getitem__)[-_NAMED:])
    shares = [f"{device}: {counted.pop(device) / end:.1%}" for device in most]
    if counted:
        shares.append(f"others: {sum(counted.values()) / end:.1%}")
    return ", ".join(shares)


_NAMED = 4
"""The most devices that are named in one cell."""


def _time(simulation: Simulation, time: float) -> str:
    return f"{1e3 * time:.2f} ms" if simulation.seconds else f"{time:.4g}"


def chrome_trace(*simulations: Simulation) -> dict[str, Any]:
    """The trace of simulations side by side, as a JSON object.

    Their times count as seconds if one of them is in seconds, otherwise as milliseconds.
    """
    scale = 1e6 if any(simulation.seconds for simulation in simulations) else 1e3
    events = [
        {"pid": process, **event}
        for process, simulation in enumerate(simulations, start=1)
        for event in _events(simulation, scale)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(simulation: Simulation, scale: float) -> Iterator[Event]:
    """The events of one simulation, whose times are multiplied by ``scale``."""
    ways = sorted({(t.source, t.target) for t in simulation.transfers if t.end > t.start})
    threads = [f"device {device}" for device in range(simulation.devices)]
    for source, target in ways:
        to = "other replicas" if source == target else str(target)
        threads.append(f"device {source} to {to}")
    what = "measured" if simulation.measured else "predicted"
    title = f"{what}: {simulation.program.name}"
    yield {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": title}}
    for thread, name in enumerate(threads):
        of: Event = {"ph": "M", "tid": thread}
        yield {**of, "name": "thread_name", "args": {"name": name}}
        yield {**of, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span in simulation.spans:
        task = task_of(span.instruction)
        known = {name: getattr(span.instruction, name, None) for name in _TOLD}
        args = {name: value for name, value in known.items() if value is not None}
        kind = KINDS[task.kind].name if task.kind in KINDS else task.kind
        name = str(replace(task, batch=0))
        if simulation.steps > 1:
            name += f" of batch {task.batch}"
        yield _slice(span.device, name, kind, span.start * scale, span.end * scale, args)
    for transfer in simulation.transfers:
        start, end = transfer.start * scale, transfer.end * scale
        if end > start:
            thread = simulation.devices + ways.index((transfer.source, transfer.target))
            yield _slice(thread, str(transfer.buffer), "transfer", start, end, {})
    for device, memory in enumerate(simulation.memory if simulation.sizes is not None else ()):
        before: int | None = None
        for start, level in zip(simulation.events.starts[device], memory.levels, strict=True):
            if level != before:
                name = f"memory of device {device}"
                of = {"ph": "C", "tid": device, "name": name, "ts": start * scale}
                yield {**of, "args": {"bytes": level}}
            before = level


_TOLD = ("stage", "batch", "microbatch", "version", "reads", "writes")
"""What a slice tells of its instruction."""


def _slice(
    thread: int, name: str, kind: str, start: float, end: float, args: dict[str, Any]
) -> Event:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "tid": thread, "name": name, "cat": kind, **times, "args": args}
