"""Zero bubble: ZB-H1, ZB-H2 and ZB-V, after Qi et al. (arXiv 2401.10241).

Only the input gradient, one half of a backward, is what the stage before waits for. The other half,
the weight gradient, is delayed to where the device would be idle.

All three work for every p and m. Here the bubble is a time: how long a device is idle between its
first task and its last. ``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from fxpipe.ir.recipe import schedule, vee
from fxpipe.ir.task import F, I, Task, U, W


@schedule("zb-h1")
def zb_h1(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """1F1B with halved backwards; on device d the weight gradients lag by d micro-batches.

    It has a third of 1F1B's bubble, and every stage needs the memory of 1F1B's first. p = 3, m = 5,
    all tasks equally long::

        0: F0 F1 F2  .  . I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4 U
        1:  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4 U
        2:  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4 U

    Bubble: at most (p − 1)(T_F + T_I − T_W), for m ≥ p and T_W ≤ T_F. With equal times p − 1 tasks,
    a share of (p − 1)/(3m + p − 1) of the step. Kept: min(p, m) micro-batches on every stage, for
    every p and m.
    """
    yield from _in_turn(devices - device, device, microbatches)


@schedule("zb-h2")
def zb_h2(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """ZB-H1 with more forwards ahead and weight gradients delayed twice as far: no bubble.

    Forwards fill the wait for the first gradient, weight gradients fill the end. It needs nearly
    twice the memory of 1F1B's first stage. p = 3, m = 6, all tasks equally long::

        0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  . U
        1:  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  . U
        2:  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5 U

    The devices start one after another, and so end one after another.

    Bubble: at most (p − 1)(T_F + T_I − 2 T_W), for m ≥ 2p − 1, T_W ≤ T_F and 2 T_W ≤ T_F + T_I;
    none with equal times. Kept: min(2p − 1, m) micro-batches on every stage, for every p and m.
    """
    yield from _in_turn(2 * (devices - device) - 1, 2 * device, microbatches)


def _in_turn(ahead: int, behind: int, microbatches: int) -> Iterator[Task]:
    """Yield forwards ``ahead`` of the input gradients, and weight gradients ``behind`` them."""
    ahead, behind = min(ahead, microbatches), min(behind, microbatches)
    for i in range(ahead):
        yield F(i)
    for i in range(microbatches):
        yield I(i)
        if i >= behind:
            yield W(i - behind)
        if i + ahead < microbatches:
            yield F(i + ahead)
    for i in range(microbatches - behind, microbatches):
        yield W(i)
    yield U()


@schedule("zb-v", placement=vee)
def zb_v(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Stages in a V, two a device, and halved backwards: no bubble in 1F1B's memory.

    Section 6 of the paper; also arXiv 2405.15362. Device d holds the stages d and 2p − 1 − d.
    Choose it where a forward, an input gradient and a weight gradient take about equally long.
    p = 2, m = 4, all tasks equally long::

        0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3  . U
        1:  . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3 U

    Bubble: none, for m ≥ 2p − 1 and equal times. Kept: at most 2 min(p, m) micro-batches of one of
    a device's two stages, in the memory of min(p, m) of both; for m ≥ 2p − 1 exactly 2p on every
    device.
    """
    before, behind = device, devices - device
    more = max(microbatches - 2 * devices + 1, 0)
    words = (
        "F0 " * (2 * behind - 1)
        + "F1 F0 " * before
        + "F1 I1 W " * behind
        + "F0 I0 W F1 I1 W " * (more + before)
        + "I0 W F1 I1 W " * (behind - 1)
        + "I0 I1 " * before
        + "I0 W " * behind
        + "W W " * before
    )
    yield from spell(words, stages, microbatches)
    yield from map(U, stages)


def spell(words: str, stages: tuple[int, ...], microbatches: int) -> Iterator[Task]:
    """Yield the tasks of a device, written as words from left to right as in a figure.

    A word is the letter of a task and the position of its stage in ``stages``: "F0" is the forward
    of the next micro-batch on the device's first stage, "B1" or "I1" the next backward on its
    second. "W" is the weight gradient that has waited longest.

    Micro-batches from ``microbatches`` on are left out, so that a row written for many also serves
    for few: an order stays valid when a micro-batch is removed from all devices.
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    for word in words.split():
        if word == "W":
            i, stage = waiting.popleft()
        else:
            taken, at = forwards if word[0] == "F" else backwards, int(word[1:])
            i, stage = taken[at], stages[at]
            taken[at] += 1
        if word[0] == "I":
            waiting.append((i, stage))
        if i < microbatches:
            yield Task(word[0], i, stage)
