"""The instructions of the tasks O and P."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import InputError
from fxpipe.extensions.offload.opcodes import Await, Offload, Prefetch
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.ir.value import own_buffer


class LowerOffload:
    """An O begins to store, and a P begins to fetch. The backward, or an R, first waits for the
    fetch::

          offload   offloaded:1[0]
          prefetch  fetching:1[0]
          await     fetched:1[0]
          backward  s1[0] v0
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        """Raises InputError if a stage keeps what autograd holds, which cannot be stored."""
        recomputed, self._fetched = schedule.indices_of("R"), schedule.indices_of("P")
        self._recomputed = recomputed
        held = {stage for stage, _ in schedule.indices_of("O") - recomputed}
        for stage in plan.stages:
            if stage.calls and stage.index in held:
                raise InputError(
                    f"schedule {schedule.name!r} offloads what stage {stage.index} keeps, and with "
                    "modules called as they are autograd keeps it for itself; leave offload out, "
                    "recompute, or trace them"
                )

    def of(self, task: Task) -> ins.Instruction:
        """The instruction that begins to store, or to fetch."""
        stage, i = task.stage, task.microbatch
        assert stage is not None
        assert i is not None
        kind, make = ("offloaded", Offload) if task.kind == "O" else ("fetching", Prefetch)
        return make(own_buffer(kind, stage, i, task.batch))

    def before(self, task: Task) -> Iterator[ins.Instruction]:
        """Yield the wait for a fetch before the first task that needs it."""
        stage, i = task.stage, task.microbatch
        needs = "R" if (stage, i) in self._recomputed else "BI"
        if task.kind in needs and (stage, i) in self._fetched:
            assert stage is not None
            assert i is not None
            yield Await(own_buffer("fetched", stage, i, task.batch))
