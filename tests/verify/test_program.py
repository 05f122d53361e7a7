"""The verifier of programs refuses what does not compute the step, hangs or leaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import fxpipe
from fxpipe.errors import VerificationError
from fxpipe.ir.instruction import every_opcode
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.schedules import gpipe, one_f_one_b, pipedream, two_bw, zb_h1
from fxpipe.verify.program import verify_program
from tests.helpers.lines import lines
from tests.helpers.mutants import program_mutants, sampled
from tests.helpers.plans import add_clip, add_reduce, chain, skipping
from tests.helpers.profiles import DEEP, deep, some
from tests.oracles.program_executor import program_is_right, steps_to_tell
from tests.oracles.symbolic_loop import Model, plain_loop

V = Schedule.parse(
    "schedule v stages=4 microbatches=2 delay=0\n"
    "place 0 3 | 1 2\n"
    "0: F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 B1@0 U@0 U@3\n"
    "1: F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1 U@1 U@2\n"
)
"""Two stages a device, down and up again."""

SHARED = Schedule.parse(
    "schedule shared stages=2 microbatches=3 delay=0\n"
    "place 0 | 1 | +0\n"
    "0: F0@0 F2@0 B0@0 B2@0 A U\n"
    "1: F0 B0 F1 B1 F2 B2 A U\n"
    "2: F1 B1 A\n"
)
"""A stage on two devices, before one that is on a single one."""


def lowered(
    schedule: Schedule,
    plan: Plan,
    *,
    updates: bool = True,
    pause: bool = False,
    shards: bool = False,
) -> Program:
    """Lowered to a program, of two replicas where the schedule sums their gradients."""
    replicas = 2 if "A" in schedule.kinds and not schedule.copies else 1
    program = Lower(plan, updates=updates, pause=pause, replicas=replicas)(schedule)
    return free(communicate(gather_weights(program) if shards else program))


def gather_weights(program: Program) -> Program:
    """The program with new weights gathered behind each update, as where optimizers are sharded."""
    gather: Any = every_opcode()["gather_weights"]
    lists = [
        [y for x in row for y in ((x, gather(x.stage, x.batch)) if x.task == "U" else (x,))]
        for row in program.lists
    ]
    return replace(program, lists=tuple(map(tuple, lists)))


def accepts(program: Program) -> bool:
    try:
        verify_program(program)
    except VerificationError:
        return False
    return True


def stepped(
    schedule: Schedule,
    *,
    updates: bool = True,
    pause: bool = False,
    shards: bool = False,
    buckets: bool = False,
) -> Program:
    """Lowered over stages with skips, where there are enough for them."""
    stages = schedule.stages
    plan = skipping(stages) if stages > 2 else chain(stages)
    if buckets:
        own = tuple((k,) for k in range(3))
        plan = replace(plan, stages=tuple([replace(stage, buckets=own) for stage in plan.stages]))
    return lowered(schedule, plan, updates=updates, pause=pause, shards=shards)


def recomputing(schedule: Schedule) -> Schedule:
    """With a recompute before each backward, but on the last device."""
    rows = tuple(
        tuple(
            each
            for task in row
            for each in ((replace(task, kind="R"), task) if task.kind in "BI" else (task,))
        )
        for row in schedule.rows[:-1]
    )
    return replace(schedule, rows=(*rows, schedule.rows[-1]))


def with_own_tasks(schedule: Schedule) -> Schedule:
    """With a look at the gradients before each update, and one at the weights after it."""
    rows = tuple(
        tuple(
            each
            for task in row
            for each in (
                (replace(task, kind="N"), task, replace(task, kind="L"))
                if task.kind == "U"
                else (task,)
            )
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


SIZES = (3, 2), (2, 3)
"""Devices and micro-batches, in turn for the schedules of the library; both in the long run. Edits
of the schedules themselves are tried in both."""

Case = tuple[Schedule, bool, bool]
"""A schedule, whether it is lowered with updates, and with a pause."""

LIBRARY: dict[str, Case] = {
    f"{name} {devices}x{microbatches}": (RECIPES[name](devices, microbatches), True, False)
    for at, name in enumerate(some(RECIPES))
    for devices, microbatches in (SIZES[at % 2], *deep(SIZES[1 - at % 2], (2, 2)))
}
CASES = LIBRARY | {
    "one device": (gpipe(1, 1), True, False),
    "gpipe with a pause": (gpipe(3, 1), False, True),
    "v without updates": (V, False, False),
    "recompute": (recomputing(one_f_one_b(3, 2)), True, False),
    "recompute, halves": (recomputing(zb_h1(2, 2)), True, False),
    "recompute, overlap": (recomputing(two_bw(3, 2)), True, False),
    "own tasks": (with_own_tasks(one_f_one_b(2, 2)), True, False),
    "own tasks, overlap": (with_own_tasks(two_bw(2, 2)), True, False),
    "clip": (add_clip(one_f_one_b(2, 2)), True, False),
    "clip, several stages": (add_clip(V), True, False),
    "clip, overlap": (add_clip(two_bw(2, 2)), True, False),
    "reduce": (add_reduce(one_f_one_b(3, 2)), True, False),
    "reduce, several stages, clip": (add_clip(add_reduce(V)), True, False),
    "reduce, halves": (add_reduce(zb_h1(2, 2)), True, False),
    "reduce, overlap": (add_reduce(two_bw(2, 2)), True, False),
    "reduce, overlap, clip": (add_clip(add_reduce(two_bw(2, 2))), True, False),
    "reduce, pause": (add_reduce(gpipe(2, 2)), False, True),
    "reduce, buckets": (add_reduce(one_f_one_b(3, 2)), True, False),
    "reduce, halves, buckets": (add_reduce(zb_h1(2, 2)), True, False),
    "reduce, overlap, clip, buckets": (add_clip(add_reduce(two_bw(2, 2))), True, False),
    "shard": (add_reduce(one_f_one_b(2, 2)), True, False),
    "shard, buckets": (add_reduce(one_f_one_b(2, 2)), True, False),
    "shard, several stages, clip": (add_clip(add_reduce(V)), True, False),
    "shard, overlap": (add_reduce(two_bw(2, 2)), True, False),
    "shard, overlap, clip": (add_clip(add_reduce(two_bw(2, 2))), True, False),
    "shard, delays of stages": (add_reduce(pipedream(2, 2)), True, False),
    "stale, with a flush": (replace(gpipe(2, 2), delay=1), True, False),
    "no two delays alike": (replace(gpipe(3, 1), delay=(2, 1, 0)), True, False),
    "own tasks, delays of stages": (with_own_tasks(recomputing(pipedream(3, 3))), True, False),
}


def program_of(case: str, cases: Mapping[str, Case] = CASES) -> Program:
    schedule, updates, pause = cases[case]
    shards, buckets = case.startswith("shard"), case.endswith("buckets")
    return stepped(schedule, updates=updates, pause=pause, shards=shards, buckets=buckets)


def expected_of(case: Case, program: Program, steps: int) -> Model:
    schedule, updates, _ = case
    own = "N" in schedule.kinds
    return plain_loop(
        program.stages,
        (*program.edges, *program.gradients),
        program.microbatches,
        trains=schedule.trains,
        updates=updates and schedule.trains,
        steps=steps,
        delays=lambda stage, i: schedule.delays[stage],
        before="N" if own else "",
        after="L" if own else "",
        reduces="A" in schedule.kinds and not schedule.copies,
        clips="C" in schedule.kinds,
        copies=lambda stage, i: schedule.devices_of(stage).index(schedule.device_of(stage, i)),
    )


@pytest.fixture(scope="module", autouse=True)
def own_tasks() -> Iterator[None]:
    """N looks at the gradients of a batch, L at the weights behind its update."""
    norm = {"reads": ("gradients",), "follows": "BW", "cost": 1.0}
    fxpipe.define_task("N", "norm", run=lambda context: None, **norm)  # type: ignore[arg-type]
    look = {"reads": ("parameters",), "follows": "U", "cost": 1.0}
    fxpipe.define_task("L", "look", run=lambda context: None, **look)  # type: ignore[arg-type]
    yield
    del KINDS["N"], KINDS["L"]


def tried(program: Program) -> Iterator[tuple[str, str, Program]]:
    """Single edits of a program: what was edited, the kind of instruction, and what came out."""
    yield from sampled(program_mutants(program), None if DEEP else 2)


RIGHT_FAULTS = {
    ("drop", "Send"): "never sends it",
    ("drop", "Receive"): "never receives it",
    ("drop", "Free"): "is still there",
    ("drop", "Load"): "is never made on this device",
    ("drop", "Output"): "the caller never gets",
    ("drop", "Forward"): "has no forward",
    ("drop", "Backward"): "has no backward|keeps what no backward uses up",
    ("drop", "InputGrad"): "has no input gradient",
    ("drop", "WeightGrad"): "has no weight gradient",
    ("drop", "Barrier"): "no barrier comes before it|barriers and pauses",
    ("drop", "Update"): "has no update|no update follows",
    ("drop", "Share"): "is never made on this device",
    ("drop", "Give"): "has no reduce",
    ("drop", "Add"): "has no add",
    ("give away", "Share"): "stage .* is on device|has a copy of stage",
    ("give away", "Give"): "has no such copy",
    ("give away", "Add"): "stage .* is on device|has a copy of stage",
    ("duplicate", "Share"): "it is there already",
    ("duplicate", "Give"): "it is there already",
    ("duplicate", "Add"): "it is there already",
    ("change copy", "Give"): "has no such copy",
    ("duplicate", "Send"): "it is sent twice|is freed already",
    ("duplicate", "Receive"): "was made before",
    ("duplicate", "Free"): "is freed already",
    ("duplicate", "Forward"): "it is there already",
    ("duplicate", "Backward"): "it is there already",
    ("duplicate", "Recompute"): "it is there already",
    ("duplicate", "Update"): "it is there already",
    ("drop", "GatherWeights"): "has no gather_weights",
    ("duplicate", "GatherWeights"): "it is there already",
}
"""Edit and instruction → what one of the faults is about, where it is refused."""


@pytest.mark.parametrize("case", [*some(LIBRARY), *(case for case in CASES if case not in LIBRARY)])
def test_single_edits_are_refused_when_they_change_what_is_computed(case: str) -> None:
    assert_edits_are_judged(case, CASES)


def assert_edits_are_judged(case: str, cases: Mapping[str, Case]) -> None:
    """Edits of a program are refused, or it still computes what it should."""
    program = verify_program(program_of(case, cases))
    expected: dict[int, Model] = {}

    def is_right(mutant: Program) -> bool:
        steps = steps_to_tell(mutant)
        if steps not in expected:
            expected[steps] = expected_of(cases[case], program, steps)
        return program_is_right(mutant, expected[steps], steps)

    assert is_right(program)
    for edit, kind, mutant in some(tried(program), 2):
        try:
            verify_program(mutant)
        except VerificationError as error:
            # what a failure would leave half done, and versions that happen to be the same
            if not (
                kind in ("Barrier", "Update")
                or edit in ("change version", "change batch", "change opcode")
            ):
                assert not is_right(mutant), f"{edit} {kind}: {error}\n{mutant}"
            if (edit, kind) in RIGHT_FAULTS:
                assert re.search(RIGHT_FAULTS[edit, kind], str(error)), f"{edit} {kind}: {error}"
        else:
            assert is_right(mutant), f"{edit} {kind}:\n{mutant}"


OF_OFFLOAD = {"Offload", "Prefetch", "Await"}
OF_COPIES = {"Share", "Give", "Add"}
OF_SHARDS = {"GatherShards", "AwaitShards", "DropShards", "PartialToOwners", "ReduceToOwners"}
OF_SHARDS |= {"AwaitSums", "ShareNorms", "UpdateShards", "ColumnNorm"}
"""The instructions whose edits the extensions that have them try."""


def edits_of(cases: Mapping[str, Case]) -> Counter[tuple[str, str]]:
    """How often each edit is made to each kind of instruction."""
    programs = (verify_program(program_of(case, cases)) for case in cases)
    return Counter((edit, kind) for program in programs for edit, kind, _ in tried(program))


@pytest.mark.deep
def test_no_class_of_edits_is_left_out() -> None:
    count = edits_of(CASES)
    kinds = {made.__name__ for made in every_opcode().values()} - OF_OFFLOAD - OF_COPIES
    kinds -= OF_SHARDS | {"RunEach"}
    halves = {"Recompute", "PartialBackward", "Backward", "InputGrad", "WeightGrad"}
    halves |= {"RestOfBackward", "RestOfWeightGrad"}
    compute = halves | {"Forward", "Run"}
    once = {"ReduceScatter", "AllGather", "GatherWeights", "Norm", "Clip", "Update"}
    moved = {"Load", "Output", "Send", "Receive", "Free"}
    wanted = {
        (edit, kind)
        for edit in ("drop", "duplicate", "swap", "move", "give away")
        for kind in kinds
    }
    wanted |= {("change micro-batch", kind) for kind in moved | halves | {"Forward"}}
    wanted |= {("change batch", kind) for kind in moved | compute | once}
    wanted |= {("change stage", kind) for kind in once}
    wanted |= {(edit, kind) for edit in ("change value", "change opcode") for kind in moved}
    wanted |= {
        (edit, kind) for edit in ("change stage", "change version") for kind in compute | {"Update"}
    }
    wanted |= {("change keep", "Forward"), ("change bucket", "PartialBackward")}
    rests = ("Backward", "WeightGrad", "RestOfBackward", "RestOfWeightGrad")
    wanted |= {("change rest", kind) for kind in rests}
    assert not {each for each in wanted if count[each] < 2}
    assert sum(count.values()) > 5_000


def test_a_valid_program_is_returned_as_it_is() -> None:
    assert_returned_as_they_are(CASES)


def assert_returned_as_they_are(cases: Mapping[str, Case]) -> None:
    """Programs are sound after each pass that lowers them."""
    for schedule, updates, pause in cases.values():
        program = Lower(chain(schedule.stages), updates=updates, pause=pause)(schedule)
        for each in (program, communicate(program), free(communicate(program))):
            assert verify_program(each) is each


too_much = pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("microbatches=2", "microbatches=999999999", "its 999999999 micro-batches"),
        (" v0", " v999999999", "reaches 999999999 batches back; .* at most 1000"),
        ("s0[0]", "s0[0" + 9000 * "'" + "]", "reaches 9000 batches back"),
    ],
)
"""What is put for what in a program's text, and why it is refused."""


@too_much
def test_counts_that_one_line_asks_for_are_refused_before_any_work(
    old: str, new: str, message: str
) -> None:
    text = str(lowered(gpipe(2, 2), chain(2)))
    assert old in text
    program = Program.parse(text.replace(old, new))
    with pytest.raises(VerificationError, match=message):
        program.verify()


def test_the_work_grows_with_the_number_of_instructions_alone() -> None:
    def work(microbatches: int) -> int:
        program = lowered(one_f_one_b(8, microbatches), chain(8))
        return lines(lambda: verify_program(program))

    assert work(128) < 9 * work(16)  # 8 times the instructions
