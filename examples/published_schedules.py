"""Schedules of papers that are not in the library, each as short as its rules.

SlimPipe (arXiv 2504.14519), MEPipe (EuroSys 2025) and SPPO (arXiv 2503.10377) cut sequences into n
slices; a pipe runs them with ``extensions=[fxpipe.Slices(dim=1)]``. HelixPipe (arXiv 2507.00394)
runs a layer's attention elsewhere than the layer; BPipe (ICML 2023) balances memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest

from fxpipe import B, F, I, O, P, Recipe, Task, U, W, round_robin
from fxpipe.schedules import one_f_one_b


def slimpipe(n: int, v: int = 1) -> Recipe:
    """1F1B of slices, with v stages of the model on each device. If v is more than 1, n is a
    multiple of their number p."""

    def tasks(
        device: int, devices: int, microbatches: int, *, stages: Sequence[int]
    ) -> Iterator[Task]:
        own = [[(c * v + k) * devices + device for c in range(n)] for k in range(v)]
        down = [stage for slices in own for stage in slices]
        up = [stage for slices in reversed(own) for stage in reversed(slices)]
        forwards = [F(i, stage) for i in range(microbatches) for stage in down]
        ahead = v * n + 2 * (devices - 1 - device)
        yield from forwards[:ahead]
        backwards = (B(i, stage) for i in range(microbatches) for stage in up)
        for backward, forward in zip_longest(backwards, forwards[ahead:]):
            yield backward
            if forward is not None:
                yield forward
        yield from map(U, stages)

    return Recipe(f"slimpipe-{n}-{v}", tasks, placement=round_robin(n * v), slices=n)


def mepipe(n: int, later: int) -> Recipe:
    """The same with backwards in halves; weight gradients wait until ``later`` others do."""

    def tasks(
        device: int, devices: int, microbatches: int, *, stages: Sequence[int]
    ) -> Iterator[Task]:
        waiting: list[Task] = []
        for task in slimpipe(n).tasks(device, devices, microbatches, stages=stages):
            if task.kind == "U":
                yield from waiting
                waiting = []
            if task.kind != "B":
                yield task
                continue
            yield I(task.microbatch, task.stage)
            waiting.append(W(task.microbatch, task.stage))
            if len(waiting) > later:
                yield waiting.pop(0)

    return Recipe(f"mepipe-{n}", tasks, placement=round_robin(n), slices=n)


def sppo(n: int) -> Recipe:
    """1F1B of slices, of which the first half is offloaded where it waits for long."""

    def tasks(
        device: int, devices: int, microbatches: int, *, stages: Sequence[int]
    ) -> Iterator[Task]:
        row = [*slimpipe(n).tasks(device, devices, microbatches, stages=stages)]
        at = {(task.kind, task.microbatch, task.stage): place for place, task in enumerate(row)}
        moves: dict[int, list[Task]] = {}
        for task in row:
            if task.kind == "B" and task.stage < n // 2 * devices:
                key = task.microbatch, task.stage
                forward, backward = at["F", *key], at["B", *key]
                if backward - forward >= 4:
                    moves.setdefault(forward + 1, []).append(O(*key))
                    moves.setdefault(backward - 1, []).append(P(*key))
        for place, task in enumerate(row):
            yield from moves.get(place, ())
            yield task

    return Recipe(f"sppo-{n}", tasks, placement=round_robin(n), slices=n)


def helixpipe(layers: int) -> Recipe:
    """All forwards, then all backwards; layer l is the stages 3l, 3l + 1 and 3l + 2, of which the
    second, its attention, runs for micro-batch i on device i mod p, and the others at home."""

    def placement(devices: int) -> tuple[int | tuple[int, ...], ...]:
        found: list[int | tuple[int, ...]] = []
        for layer in range(layers):
            home = layer * devices // layers
            ring = tuple((home + k) % devices for k in range(devices))
            found += [home, ring, home]
        return tuple(found)

    @lru_cache
    def rows(devices: int, microbatches: int) -> list[list[Task]]:
        rows: list[list[Task]] = [[] for _ in range(devices)]
        down = range(3 * layers)
        for kind, stages in (F, down), (B, reversed(down)):
            for stage in stages:
                for i in range(microbatches):
                    home = stage // 3 * devices // layers
                    rows[i % devices if stage % 3 == 1 else home].append(kind(i, stage))
        for stage in down:
            rows[stage // 3 * devices // layers].append(U(stage))
        return rows

    def tasks(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        yield from rows(devices, microbatches)[device]

    return Recipe(f"helixpipe-{layers}", tasks, placement=placement)


def _bpipe(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B in which no device keeps more than p // 2 + 1 micro-batches when it begins a forward.
    The paper moves the others to a device that keeps fewer; here O and P move them to the host."""
    held: list[int] = []
    out: set[int] = set()
    for task in one_f_one_b.tasks(device, devices, microbatches):
        if task.kind == "B" and task.microbatch in out:
            yield P(task.microbatch)
            out.remove(task.microbatch)
        yield task
        if task.kind == "F":
            held.append(task.microbatch)
            if len(held) - len(out) > devices // 2 + 1:
                yield O(task.microbatch)
                out.add(task.microbatch)
        if task.kind == "B":
            held.remove(task.microbatch)


bpipe = Recipe("bpipe", _bpipe)
