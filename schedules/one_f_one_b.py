"""1F1B with a flush after each step, and interleaved 1F1B: forwards and backwards alternate.

Both work for every p and m. ``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, zip_longest

from fxpipe.ir.recipe import Recipe, round_robin, schedule
from fxpipe.ir.task import B, F, Pair, Task, U


@schedule("1f1b")
def one_f_one_b(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Warm up with forwards, then alternate backward and forward, then drain with backwards.

    PipeDream-Flush (Narayanan et al., arXiv 2006.09503). It takes GPipe's time, and its memory
    does not grow with m. p = 3, m = 4, a backward drawn as long as a forward::

        0: F0 F1 F2  .  . B0 F3 B1  . B2  . B3 U
        1:  . F0 F1  . B0 F2 B1 F3 B2  . B3  . U
        2:  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  . U

    Bubble: (p − 1)/(m + p − 1). Kept: min(p − s, m) micro-batches on stage s. Both hold for every
    p and m.
    """
    ahead = min(devices - device, microbatches)
    for i in range(ahead):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
        if i + ahead < microbatches:
            yield F(i + ahead)
    yield U()


@schedule("interleaved-1f1b", placement=round_robin(2))
def interleaved_one_f_one_b(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task | Pair]:
    """1F1B with several stages a device, each in turn for a round of p or a few more micro-batches.

    From Megatron-LM (Narayanan et al., arXiv 2104.04473). v stages a device divide the bubble of
    1F1B by about v, for v times the communication and more memory. Megatron-LM needs an m that p
    divides; here any m will do. p = 2, m = 4, v = 2, a backward drawn as long as a forward::

        0: F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1  . b2  . b3 B2 B3 U
        1:  . F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3  . U

    ``interleaved_one_f_one_b.placed(round_robin(4))`` has v = 4; ``grouped(6)`` has turns of 6.

    Bubble: (p − 1)/(v m + p − 1), for m ≥ p. Kept: min((v − 1) r + 2p − 1, v m) micro-batches of
    one stage on device 0, the fullest, for every p and m. r is the length of the longest round:
    ⌈m/⌊m/p⌋⌉ if m ≥ p, else m. If p divides m and m > p, it is v p + p − 1.
    """
    rounds = max(microbatches // devices, 1)
    starts = [microbatches * turn // rounds for turn in range(rounds + 1)]
    yield from _in_turns(device, devices, starts, stages)


def grouped(size: int, chunks: int = 2, *, pairs: bool = False) -> Recipe:
    """Interleaved 1F1B with a group size: each stage runs for ``size`` micro-batches at a time.

    Megatron-LM's ``microbatch_group_size_per_vp_stage``; the last group has what is left. A larger
    group gives transfers more time and keeps more: min((v − 1) g + 2p − 1, v m) micro-batches of
    one stage on device 0, for p ≤ g ≤ m.

    As in Megatron-LM, no group may have fewer than p micro-batches, or the devices would wait for
    one another; a single group may. Else making the schedule raises an InputError.

    With ``pairs``, one more forward runs ahead, and each later one runs together with the backward
    behind it: Megatron-LM's ``overlap_moe_expert_parallel_comm``, and the schedule of Kimi K2.
    """

    def tasks(
        device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
    ) -> Iterator[Task | Pair]:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size is {size!r}; give a whole number of at least 1")
        starts = [*range(0, microbatches, size), microbatches]
        last = starts[-1] - starts[-2]
        if len(starts) > 2 and min(size, last) < devices:
            raise ValueError(
                f"groups of {size} leave one of {min(size, last)} of {microbatches} micro-batches, "
                f"and there are {devices} devices; choose a size that leaves at least their number"
            )
        yield from _in_turns(device, devices, starts, stages, pairs)

    name = f"interleaved-1f1b-by-{size}" + ("-in-pairs" if pairs else "")
    return Recipe(name, tasks, placement=round_robin(chunks))


def seq1f1b(slices: int) -> Recipe:
    """1F1B over slices of sequences: each micro-batch's slices go forward in order, and back in
    reverse. It keeps less than 1F1B, and its bubble is that of as many micro-batches as slices.

    Seq1F1B (Sun et al., arXiv 2406.03488). Slice c of the stage of device d is stage c p + d, as in
    ``Schedule.slices``. p = 2, m = 2 in two slices, of which the second is drawn small, a backward
    drawn as long as a forward::

        0: F0 f0 F1  . b0 f1 B0  . b1 B1 U
        1:  . F0 f0 b0 F1 B0 f1 b1 B1  . U

    Bubble, where slices take the same time: (p − 1)/(n m + p − 1) for n slices. Kept: min(p − d +
    n − 1, n m) slices on device d.
    """

    def tasks(device: int, devices: int, microbatches: int) -> Iterator[Task]:
        stages = range(device, slices * devices, devices)
        forwards = [F(i, stage) for i in range(microbatches) for stage in stages]
        backwards = [B(i, stage) for i in range(microbatches) for stage in reversed(stages)]
        ahead = devices - device + slices - 1
        yield from forwards[:ahead]
        for backward, forward in zip_longest(backwards, forwards[ahead:]):
            yield backward
            if forward is not None:
                yield forward
        yield from map(U, stages)

    return Recipe(f"seq1f1b-{slices}", tasks, placement=round_robin(slices), slices=slices)


def _in_turns(
    device: int, devices: int, starts: list[int], stages: tuple[int, ...], pairs: bool = False
) -> Iterator[Task | Pair]:
    """Yield interleaved 1F1B, each stage in turn for the micro-batches from start to start."""
    turns = [range(start, end) for start, end in pairwise(starts)]
    forwards = [F(i, stage) for turn in turns for stage in stages for i in turn]
    backwards = [B(i, stage) for turn in turns for stage in reversed(stages) for i in turn]
    ahead = 2 * (devices - device) - 1 + (len(stages) - 1) * max(map(len, turns))
    yield from forwards[:ahead]
    for backward, forward in zip_longest(backwards, forwards[ahead:]):
        if pairs and forward is not None:
            yield forward & backward
            continue
        yield backward
        if forward is not None:
            yield forward
    yield from map(U, stages)
