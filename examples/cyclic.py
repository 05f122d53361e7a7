"""Cyclic data parallelism (Fournier and Oyallon, 2024, arXiv 2403.08837) over stages.

N micro-batches of a batch follow each other through N stages, each two tasks behind the one before.
CDP-v1, in which all of them read the weights that the batch before the last has made, is the
schedule ``2bw`` with N micro-batches. In CDP-v2 a stage reads the newest weights that it has: this
is ``pipedream`` with a step for each micro-batch, and an optimizer that updates at every N-th.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from fxpipe import Schedule
from fxpipe.extensions.simulator import Simulation, Sizes


def every(base: type[Optimizer], count: int) -> Callable[..., Optimizer]:
    """A class of optimizers that at every ``count``-th step updates with the mean of the gradients
    since the last update, as ``base`` does. In between, sums and the number of steps are state."""

    class Every(base):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            steps = 1 + max((self.state[p].pop("steps", 0) for p in parameters), default=0)
            for p in parameters:
                total = self.state[p].pop("sum", None)
                if total is not None:
                    p.grad = total if p.grad is None else total.add_(p.grad)
            if steps == count:
                for p in parameters:
                    p.grad = None if p.grad is None else p.grad / count
                return super().step(closure)
            for p in parameters:
                self.state[p]["steps"] = steps
                if p.grad is not None:
                    self.state[p]["sum"] = p.grad.clone()
            return None

    Every.__qualname__ = Every.__name__ = f"{base.__name__}Every{count}"
    return Every


def kept(schedule: Schedule, steps: int) -> list[int]:
    """What all devices together keep for backwards in each unit of time, where a stage keeps 1 of a
    micro-batch, forwards and backwards take a unit each, and everything else takes no time."""
    costs = {"F": 1, "B": 1, "U": 0}
    sizes = Sizes(saved=dict.fromkeys(range(schedule.stages), 1))
    simulation: Simulation = schedule.simulate(costs, sizes=sizes, steps=steps)
    return [
        sum(
            memory.levels[bisect_right(starts, time) - 1] if starts[0] <= time else 0
            for memory, starts in zip(simulation.memory, simulation.events.starts, strict=True)
        )
        for time in range(int(simulation.makespan))
    ]
