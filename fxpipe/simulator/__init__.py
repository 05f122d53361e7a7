"""The simulator: when everything in a program happens, what it waits for and what it holds."""

from __future__ import annotations

from fxpipe.simulator.costs import Link
from fxpipe.simulator.simulate import simulate, simulate_schedule
from fxpipe.simulator.simulation import Simulation, Span
from fxpipe.simulator.sizes import Sizes

__all__ = ["Link", "Simulation", "Sizes", "Span", "simulate", "simulate_schedule"]
