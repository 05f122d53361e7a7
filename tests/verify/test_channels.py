"""Bounded channels: refused exactly where a run over channels of that size gets stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fxpipe.errors import InputError, VerificationError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b
from fxpipe.verify.program import smallest_channel
from tests.helpers.plans import chain, skipping

MEETINGS = ins.Send | ins.Receive | ins.Barrier | ins.Pause


def finishes(program: Program, channel: int) -> bool:
    """Run some steps and the flush, one after another, over channels of that size."""
    steps = 2 * program.depth + 3 if program.depth else 1
    waiting: Counter[tuple[int, int]] = Counter()
    for step in range(steps + program.depth):
        lists = [
            [x for x in own if isinstance(x, MEETINGS) and 0 <= step + _batch(x) < steps]
            for own in program.lists
        ]
        if not _step_finishes(lists, program, waiting, channel):
            return False
    return True


def _batch(instruction: ins.Instruction) -> int:
    return instruction.buffer.batch if isinstance(instruction, ins.Send | ins.Receive) else 0


def _step_finishes(
    lists: Sequence[Sequence[ins.Instruction]],
    program: Program,
    waiting: Counter[tuple[int, int]],
    channel: int,
) -> bool:
    """``waiting`` has what is on its way between two devices; all that matters here is how much."""
    at = [0] * len(lists)
    ends = {  # whether it is the sender of a value, and the value → the device
        (isinstance(x, ins.Send), x.buffer[:5]): device
        for device, own in enumerate(program.lists)
        for x in own
        if isinstance(x, ins.Send | ins.Receive)
    }

    def now(device: int) -> ins.Instruction | None:
        return lists[device][at[device]] if at[device] < len(lists[device]) else None

    moved = True
    while moved:
        moved = False
        for device in range(len(lists)):
            match now(device):
                case ins.Send(buffer):
                    pair = device, ends[False, buffer[:5]]
                    there = now(pair[1])
                    meets = isinstance(there, ins.Receive) and there.buffer == buffer
                    if waiting[pair] < channel:
                        waiting[pair] += 1
                    elif channel == 0 and meets:
                        at[pair[1]] += 1
                    else:
                        continue
                case ins.Receive(buffer):
                    pair = ends[True, buffer[:5]], device
                    if not waiting[pair]:
                        continue
                    waiting[pair] -= 1
                case ins.Barrier() | ins.Pause() as meeting:
                    if any(type(now(d)) is not type(meeting) for d in range(len(lists))):
                        continue
                    at = [place + 1 for place in at]
                    at[device] -= 1
                case None:
                    continue
            at[device] += 1
            moved = True
    return all(place == len(own) for place, own in zip(at, lists, strict=True))


def accepts(program: Program, channel: int) -> bool:
    try:
        program.verify(channel=channel)
    except VerificationError:
        return False
    return True


@pytest.mark.parametrize("name", RECIPES)
def test_a_channel_is_refused_exactly_where_a_run_over_it_gets_stuck(name: str) -> None:
    for p, m in [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)]:
        schedule = RECIPES[name](p, m)
        for plan in (chain, skipping) if schedule.stages > 2 else (chain,):
            program = free(communicate(Lower(plan(schedule.stages))(schedule)))
            fits = [accepts(program, channel) for channel in range(6)]
            assert fits == [finishes(program, channel) for channel in range(6)]
            least = smallest_channel(program)
            assert fits == [channel >= least for channel in range(6)]


@pytest.mark.parametrize("name", RECIPES)
def test_the_library_needs_channels_as_told(name: str) -> None:
    """One value from stage to stage; see the verifier's own table."""
    least = [
        smallest_channel(free(communicate(Lower(chain(schedule.stages))(schedule))))
        for schedule in (RECIPES[name](p, m) for p, m in [(2, 4), (3, 3), (4, 8)])
    ]
    assert max(least) == NEEDS[name]


NEEDS = dict.fromkeys(("gpipe", "inference", "naive"), 0)
NEEDS |= dict.fromkeys(("1f1b", "1f1b-async", "pipedream", "2bw"), 1)
NEEDS |= dict.fromkeys(("zb-h1", "zb-h2", "v-half", "v-min"), 1)
NEEDS |= dict.fromkeys(("chimera",), 1)
NEEDS |= dict.fromkeys(("interleaved-zb",), 1)
NEEDS |= dict.fromkeys(("zb-v", "dualpipe-v", "interleaved-1f1b", "looped-bfs", "hanayo"), 2)


def test_a_send_that_waits_for_room_is_named_with_what_would_do() -> None:
    program = free(communicate(Lower(chain(2))(one_f_one_b(2, 3))))
    assert program.verify(channel=1) is program
    with pytest.raises(VerificationError) as caught:
        program.verify(channel=0)
    assert {fault.device for fault in caught.value.faults} == {0, 1}
    for fault in caught.value.faults:
        assert fault.subject.startswith("send")
        assert "deadlock: it waits until device" in fault.what
        assert "or let more than 0 values be on their way between two devices" in fault.cure


def test_a_send_that_waits_for_the_next_step_is_named() -> None:
    program = free(communicate(Lower(skipping(3))(RECIPES["2bw"](3, 2))))
    with pytest.raises(VerificationError, match="it waits for room, which device 0 makes only in"):
        program.verify(channel=1)


@pytest.mark.parametrize("channel", [-1, 2.5, "1"])
def test_a_channel_that_is_no_count_is_refused(channel: Any) -> None:
    with pytest.raises(InputError, match=f"channel is {channel!r}; give at least 0"):
        free(communicate(Lower(chain(2))(gpipe(2, 1)))).verify(channel=channel)
