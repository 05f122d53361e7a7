"""GPipe: fill with all forwards, then drain all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.schedule import B, F, Task, U, schedule


@schedule("gpipe")
def gpipe(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Every device runs all its forwards, then all its backwards.

    p = 3, m = 3, a backward drawn as long as a forward::

        0: F0 F1 F2  .  .  .  . B0 B1 B2 U
        1:  . F0 F1 F2  .  . B0 B1 B2  . U
        2:  .  . F0 F1 F2 B0 B1 B2  .  . U
    """
    for i in range(microbatches):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
    yield U()
