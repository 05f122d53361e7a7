"""Measure how time and memory of simulations grow with the number of instructions.

Run it with ``python -m benchmarks.simulating``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from functools import partial
from statistics import median

from benchmarks.machine import describe
from benchmarks.report import Figure, Report, timed
from fxpipe.extensions.simulator import Link, Simulation, Sizes, simulate
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe

DEVICES = 16
SIZES = (10_000, 100_000, 1_000_000)
"""Instructions, about."""


OTHER = {"F": 2, "B": 3}
"""The costs of a further simulation of the same program."""


def program_of(instructions: int) -> Program:
    """1F1B over 16 devices, with as many micro-batches as it takes."""
    recipe = find_recipe("1f1b")
    each = sum(map(len, chain_program(recipe(DEVICES, 64)).lists)) / 64
    return chain_program(recipe(DEVICES, round(instructions / each)))


def simulated(program: Program) -> Simulation:
    """With times, links and bytes of its own for each stage."""
    stages = range(DEVICES)
    costs = {(letter, s): time + s / 100 for s in stages for letter, time in (("F", 1), ("B", 2))}
    sizes = Sizes({edge.value: 1 << 20 for edge in program.edges}, dict.fromkeys(stages, 1 << 24))
    return simulate(program, costs, links=Link(1e-3, 1e9), sizes=sizes)


def figures_of(simulation: Simulation) -> None:
    """All that it tells."""
    _ = simulation.makespan, simulation.bubble, simulation.idle, simulation.kept
    _ = simulation.weight_versions


def memory(program: Program) -> float:
    """Bytes an instruction of a simulation, at its peak, besides the program."""
    gc.collect()
    tracemalloc.start()
    simulated(program)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / sum(map(len, program.lists))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time simulations of large programs.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    machine = describe()

    figures = []
    for size in SIZES:
        program = program_of(size)
        count = sum(map(len, program.lists))
        name = f"{count:,} instructions"
        runs = [timed(partial(simulated, program)) for _ in range(rounds)]
        seconds = median(second for _, second in runs)
        found = runs[-1][0]
        figures += [
            Figure(f"{name}, simulated", seconds, "s"),
            Figure(f"{name}, simulated, each", 1e6 * seconds / count, "µs"),
            Figure(f"{name}, with other costs", timed(partial(found.with_costs, OTHER))[1], "s"),
            Figure(f"{name}, all figures but memory", timed(partial(figures_of, found))[1], "s"),
            Figure(
                f"{name}, memory of every device", timed(partial(getattr, found, "memory"))[1], "s"
            ),
            Figure(f"{name}, held at most, each", memory(program), "B"),
        ]
    settings = {
        "schedule": f"1f1b over {DEVICES} devices, a chain of stages",
        "rounds": rounds,
        "what it is given": "a time for each stage, a link of 1e9 B a unit, bytes of all values",
    }
    title = "Simulating programs"
    Report("simulating", title, settings, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
