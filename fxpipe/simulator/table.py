"""The table that ``print(simulation)`` shows."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from fxpipe.simulator.memory import PARTS
from fxpipe.simulator.simulation import Simulation
from fxpipe.text.instruction import print_instruction
from fxpipe.words import bytes_text


def simulation_table(simulation: Simulation) -> str:
    """A row a device: busy, idle by cause, and what it keeps, as text."""
    program = simulation.program
    table = Table(title=_title(simulation), title_justify="left")
    for heading in ("device", "stages"):
        table.add_column(heading)
    headings = ["busy", "warm-up", "waits for", "copies", "together", "other", "drain"]
    for heading in [*headings, "stash", "versions"]:
        table.add_column(heading, justify="right")
    if simulation.sizes is not None:
        table.add_column("peak memory, predicted", justify="right")
        peaks = peak_texts(simulation)
    end = simulation.through or 1
    for device, idle in enumerate(simulation.idle):
        held = [stage for stage, home in enumerate(program.placement) if home == device]
        row = [
            str(device),
            ", ".join(map(str, held)),
            f"{1 - idle.total / end:.1%}",
            _share(idle.warm_up, end),
            _by_device(idle.waiting, end),
            _by_device(idle.copying, end),
            _share(idle.meeting, end),
            _share(idle.other, end),
            _share(idle.drain, end),
            ", ".join(str(simulation.stash[stage]) for stage in held),
            ", ".join(str(simulation.weight_versions[stage]) for stage in held),
        ]
        if simulation.sizes is not None:
            row.append(f"{peaks[device]} at {_time(simulation, simulation.memory[device].time)}")
        table.add_row(*row)
    lines = [*_lines(table), *([] if simulation.sizes is None else _memory(simulation))]
    lines.append(
        f"makespan {_time(simulation, simulation.makespan)}, bubble {simulation.bubble:.1%}"
        + _long_run(simulation)
    )
    if simulation.through < simulation.makespan:
        when = _time(simulation, simulation.through)
        lines.append(f"shares are of the {when} until the last micro-batch is through")
    return "\n".join(lines)


def peak_texts(simulation: Simulation) -> list[str]:
    """Device → the most bytes that it is predicted to hold, as text; what stages with leaf modules
    save is not known."""
    assert simulation.sizes is not None
    unknown = {simulation.program.placement[stage] for stage in simulation.sizes.unknown}
    return [
        f"{'at least ' if device in unknown else ''}{bytes_text(memory.peak)}"
        for device, memory in enumerate(simulation.memory)
    ]


def _memory(simulation: Simulation) -> list[str]:
    """What the memory of each device is made of when it holds the most."""
    parts = [part for part in PARTS if any(each.parts[part] for each in simulation.memory)]
    table = Table(title="memory at its peak, predicted", title_justify="left")
    table.add_column("device")
    for heading in (*parts, "together"):
        table.add_column(heading, justify="right")
    table.add_column("while")
    for device, memory in enumerate(simulation.memory):
        own = simulation.program.lists[device]
        table.add_row(
            str(device),
            *(bytes_text(memory.parts[part]) for part in parts),
            bytes_text(memory.peak),
            print_instruction(own[memory.position]) if own else "",
        )
    return _lines(table)


def _lines(table: Table) -> list[str]:
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().rstrip().splitlines()]


def _title(simulation: Simulation) -> str:
    program, steps = simulation.program, simulation.steps
    what = "measured" if simulation.measured else "simulated"
    counts = f"{simulation.devices} devices, {program.microbatches} micro-batches"
    return f"{program.name}, {what}: {counts}, {steps} step{'' if steps == 1 else 's'}"


def _long_run(simulation: Simulation) -> str:
    if not simulation.window.depth or simulation.again is None:
        return ""
    steady = simulation.steady
    return (
        f"; in the long run a step takes {_time(simulation, steady.period)}, bubble "
        f"{abs(steady.bubble):.1%}"
    )


def _share(time: float, end: float) -> str:
    return f"{time / end:.1%}" if time else ""


def _by_device(times: Mapping[int, float], end: float) -> str:
    return ", ".join(f"{device}: {time / end:.1%}" for device, time in sorted(times.items()))


def _time(simulation: Simulation, time: float) -> str:
    return f"{1e3 * time:.2f} ms" if simulation.seconds else f"{time:.4g}"
