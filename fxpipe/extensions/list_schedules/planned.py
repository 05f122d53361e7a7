"""Schedules that rules make: interleaved zero bubble, and Hanayo's waves.

Nobody writes their rows down. Whenever a device is idle, it starts the task that sorts first of
those whose inputs are there; ``list_schedule`` says more. Both work for every p and m.
``fxpipe.schedules`` explains the symbols and the drawings.
"""

from __future__ import annotations

from fxpipe.extensions.list_schedules.listed import list_schedule
from fxpipe.ir.recipe import round_robin, vee
from fxpipe.ir.task import Task


@list_schedule(
    "interleaved-zb", "FIW", placement=round_robin(2), limit=lambda device, devices: 2 * devices
)
def interleaved_zb(task: Task, devices: int) -> tuple[int, ...]:
    """Interleaved 1F1B with halved backwards; weight gradients run where nothing else can.

    In the time and the memory of ``ScheduleInterleavedZeroBubble`` of torch. p = 2, m = 4, all
    tasks equally long::

        0: F0 F1 f0 f1  . i0 w0 i1 I0 I1 F2 W0 F3 W1 f2 w1 f3 i2 w2 i3 I2 I3 W2 W3 w3 U
        1:  . F0 F1 f0 i0 f1 i1 I0 I1 W0 W1 F2 w0 F3 w1 f2 i2 f3 i3 I2 I3 W2 W3 w2 w3 U

    Bubble: p − 1 tasks, for p dividing m and equal times. Kept: at most 2p micro-batches on all
    stages of a device together, for every p and m.
    """
    assert task.stage is not None
    assert task.microbatch is not None
    stage = -task.stage if task.kind == "I" else task.stage
    return "IFW".index(task.kind), task.microbatch // devices, stage, task.microbatch


@list_schedule("hanayo", "FB", placement=lambda devices: vee(devices) * 2)
def hanayo(task: Task, devices: int) -> tuple[int, int]:
    """Stages go down the devices and up again, twice; what is furthest along goes first.

    After Hanayo's two waves (Liu et al., arXiv 2308.15762), for few micro-batches: they come back
    to a device about when it is free again. p = 2, m = 2, a backward drawn as long as a forward;
    small letters are all stages but the device's first::

        0: F0 F1  . f0 f0 f1 f1 f0 b0 f1 b1 b0 b0 b1 b1 B0  . B1 U
        1:  . F0 f0 F1 f1 f0 f0 f1 f1 b0 b0 b1 b1 b0 B0 b1 B1  . U

    Bubble: for m = p and equal times at most 7(p − 1)/2 tasks, of which a micro-batch has eight on
    each device; 1F1B's would be 8(p − 1) of them. Kept: at most m micro-batches on every stage.
    """
    assert task.stage is not None
    assert task.microbatch is not None
    return -task.stage if task.kind == "F" else task.stage, task.microbatch
