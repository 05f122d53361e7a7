"""How long it takes to offload what stages keep, and to fetch it again."""

from __future__ import annotations

import platform
import tempfile
from contextlib import suppress
from functools import cache
from statistics import mean
from time import perf_counter

import torch

from fxpipe.extensions.simulator.costs import measured_costs
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST
from fxpipe.parts import Parts

_ROUNDS = 4
"""How often a rate is measured; the quickest counts."""


def away_costs(
    plan: Plan, program: Program, sizes: Sizes, rates: tuple[float, float] | str
) -> dict[tuple[str, int], float]:
    """The seconds to store what a stage keeps of a micro-batch ("O"), and to fetch it ("P"), at
    these rates, or at those of a type of device."""
    if not program.away or not measured_costs(plan):
        return {}
    stored: dict[int, list[int]] = {}
    for (stage, _), (_, forward) in program.away.items():
        inputs = {edge.value: edge.source for edge in program.edges_into(stage)}
        held = inputs if forward.again else sizes.holds.get(stage, ())
        moved = [value for value in held if inputs.get(value) != HOST]
        size = 0 if forward.again else sizes.saved.get(stage, 0)
        size += sum(sizes.values.get(value, 0) for value in moved)
        stored.setdefault(stage, []).append(size)
    ways = zip("OP", away_rates(rates) if isinstance(rates, str) else rates, strict=True)
    return {(way, s): mean(sizes) / rate for way, rate in ways for s, sizes in stored.items()}


@cache
def away_rates(place: str) -> tuple[float, float]:
    """The bytes per second that a device of this type offloads, and that it fetches again: measured
    once on this machine for each folder of temporary files, and kept where inductor keeps things;
    without that extension, once in this process."""
    if not Parts.kept.there:
        return _measured_rates(place)
    what = f"away {place} {tempfile.gettempdir()} on {platform.node()}"
    stored, fetched = Parts.kept.find()(what, lambda: _measured_rates(place))
    return stored, fetched


def _measured_rates(place: str) -> tuple[float, float]:
    from fxpipe.extensions.offload.storing import FileMemory

    memory = _most(place)
    stored, fetched = [], []
    for _ in range(_ROUNDS):
        start = perf_counter()
        if memory.is_cpu:
            away = FileMemory(-1, [memory])
            away.wait()
            between = perf_counter()
            away.fetch()
            away.wait()
        else:
            pinned = torch.empty_like(memory, device="cpu", pin_memory=True)
            start = perf_counter()
            pinned.copy_(memory)
            between = perf_counter()
            memory.copy_(pinned)
            torch.accelerator.synchronize()
        stored.append(between - start)
        fetched.append(perf_counter() - between)
    return memory.nbytes / min(stored), memory.nbytes / min(fetched)


def _most(place: str) -> torch.Tensor:
    """32 MiB on a device, or less if it has no room for them; at least 4 KiB."""
    for power in range(25, 12, -1):
        with suppress(torch.OutOfMemoryError):
            return torch.ones(1 << power, dtype=torch.uint8, device=place)
    return torch.ones(1 << 12, dtype=torch.uint8, device=place)
