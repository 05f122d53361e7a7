"""Where stages gather their weights and drop them again.

``add_shards``, around each run of a stage's tasks:

before:  0: F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0 A@0 A@1 U@0 U@1
after:   0: G@0 F0@0 F1@0 D@0 G@1 F0@1 F1@1 B0@1 B1@1 D@1 G@0 B0@0 B1@0 D@0 A@0 A@1 U@0 U@1

or once a step:

after:   0: G@0 F0@0 F1@0 G@1 F0@1 F1@1 B0@1 B1@1 D@1 B0@0 B1@0 D@0 A@0 A@1 U@0 U@1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.extensions.sharding.opcodes import AwaitShards, DropShards, GatherShards
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task


@dataclass
class _Run:
    """Tasks of one stage that follow each other.

    Attributes:
        stage: the stage.
        first, last: the positions of its first and its last task.
    """

    stage: int
    first: int
    last: int


def reads_weights(task: Task) -> bool:
    """Whether a task needs its stage's weights."""
    return task.kind in "FBIWR" or "parameters" in KINDS[task.kind].reads


def add_shards(schedule: Schedule, *, once: bool = False, ahead: bool | None = None) -> Schedule:
    """Schedule → Schedule: a gather before each run of a stage's tasks, and a drop behind it.

    Args:
        schedule: a schedule without either; any other is returned unchanged.
        once: gather each stage once a step, before its first task, and drop it behind the last.
        ahead: begin to gather the next run's stage at the begin of a run, so that a device has two
            stages whole. By default where a device has more than two.
    """
    if schedule.kinds & {"G", "D"}:
        return schedule
    rows = [
        tuple(_gathering(row, once, len(schedule.held_by(d)) > 2 if ahead is None else ahead))
        for d, row in enumerate(schedule.rows)
    ]
    return replace(schedule, rows=tuple(rows))


def _gathering(row: Sequence[Task], once: bool, ahead: bool) -> Iterator[Task]:
    runs: list[_Run] = []
    for at, task in enumerate(row):
        if not reads_weights(task):
            continue
        assert task.stage is not None
        known = [run for run in runs if run.stage == task.stage] if once else runs[-1:]
        if known and known[-1].stage == task.stage:
            known[-1].last = at
        else:
            runs.append(_Run(task.stage, at, at))
    begins: defaultdict[int, list[int]] = defaultdict(list)
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        before = runs[number - 1] if number and ahead and not once else run
        begins[before.first].append(run.stage)
        ends[run.last].append(run.stage)
    for at, task in enumerate(row):
        for stage in begins[at]:
            yield Task("G", None, stage)
        yield task
        for stage in ends[at]:
            yield Task("D", None, stage)


class LowerShards:
    """A G begins to gather, and the first task that reads the weights waits for them::

    gather_shards  s1 number 0
    forward        s0[0] v0 keep
    await_shards   s1 number 0
    forward        s1[0] v0 keep
    drop_shards    s1
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        self._waits: dict[Task, int] = {}  # task → the number of the gather that it waits for
        self._next: Counter[int] = Counter()
        for row in schedule.rows:
            coming: dict[int, int] = {}
            count: Counter[int] = Counter()
            for task in row:
                assert task.stage is not None
                if task.kind == "G":
                    coming[task.stage] = count[task.stage]
                    count[task.stage] += 1
                elif reads_weights(task) and task.stage in coming:
                    self._waits[task] = coming.pop(task.stage)

    def of(self, task: Task) -> ins.Instruction:
        """The instruction of a G or a D."""
        stage = task.stage
        assert stage is not None
        if task.kind == "D":
            return DropShards(stage, task.batch)
        number = self._next[stage]
        self._next[stage] += 1
        return GatherShards(stage, task.batch, number)

    def before(self, task: Task) -> Iterator[ins.Instruction]:
        """Yield the wait for the weights before the first task that reads them."""
        if task in self._waits:
            assert task.stage is not None
            yield AwaitShards(task.stage, task.batch, self._waits[task])
