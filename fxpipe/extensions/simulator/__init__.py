"""The simulator: when everything in a program happens, what it waits for and what it holds."""

from __future__ import annotations

from fxpipe.extensions.simulator.costs import Link, Time
from fxpipe.extensions.simulator.simulate import simulate, simulate_schedule
from fxpipe.extensions.simulator.simulation import Simulation, Span
from fxpipe.extensions.simulator.sizes import Sizes

__all__ = ["Link", "Simulation", "Sizes", "Span", "Time", "simulate", "simulate_schedule"]
