"""The verifier of a CSV of torch.distributed.pipelining: what would hang or give wrong gradients.

The rules are those of its ``_PipelineScheduleRuntime``, which checks only a few of them:

- It runs a rank's actions in order. A compute waits for the receives of its own micro-batch.
- Sends and receives between two ranks have no names: the k-th send of one is the k-th receive of
  the other, over all stages, activations and gradients together.
- The format "compute_only" has no sends and receives; its lowering adds them, and fails where
  ranks wait for each other. In "compute_comms" all are written, without empty cells.
- Up to PyTorch 2.13 the runtime waits for sends when the step ends. Later versions write the waits
  as actions, such as WAIT_SEND_F; a list that has one of them must have all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe.errors import Fault, VerificationError
from fxpipe.extensions.peers.forms import (
    COMPUTE,
    PER_STAGE,
    RECEIVES,
    SENDS,
    WAITS,
    Action,
    Rows,
    home_of,
    parse_actions,
    schedule_of,
)
from fxpipe.formatting import plural
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.ir.walk import Wait, needs_of, walk
from fxpipe.verify.tasks import Window, complete, counts_faults

Place = tuple[int, int, int]
"""Rank, cell, and position in an overlapped pair, all from 0."""


@dataclass(frozen=True)
class Actions:
    """The actions of a CSV of torch.distributed.pipelining.

    Attributes:
        rows: rank → its cells.
        name: its name in messages.
    """

    rows: Rows
    name: str = "csv"

    @staticmethod
    def parse(text: str, name: str = "csv") -> Actions:
        """Read either format. Raises ParseError with line and column."""
        return Actions(parse_actions(text), name)

    def schedule(self) -> Schedule:
        """Make a Schedule of its compute, without verifying it."""
        return schedule_of(self.rows, self.name)

    def verify(self) -> Actions:
        """Return self, or raise VerificationError with all that would go wrong in the runtime."""
        faults = list(_Judge(self.rows).faults())
        if faults:
            raise VerificationError(f"CSV {self.name!r}", faults)
        return self

    def __str__(self) -> str:
        """The format, and the numbers of ranks, stages and micro-batches."""
        judge = _Judge(self.rows)
        count = judge.microbatches
        return (
            "CSV of torch.distributed.pipelining in the format "
            f"{'compute_comms' if judge.lowered else 'compute_only'}, "
            f"{plural(len(self.rows), 'rank')}, {plural(len(judge.home), 'stage')}, "
            f"{count} micro-batch{'' if count == 1 else 'es'}"
        )


def parse_csv(text: str, *, name: str = "csv", check: bool = True) -> Schedule:
    """Read the CSV of torch.distributed.pipelining: a row a rank, cells such as ``2F0``.

    Args:
        text: what its ``_dump_csv`` writes, as "compute_only" or with sends and receives.
        name: the schedule's name.
        check: whether to refuse a CSV that would hang or give wrong gradients in its runtime.

    Raises:
        ParseError: a cell is no action; with line and column.
        VerificationError: with all that would go wrong in the runtime, by row and column.
        InputError: a stage is missing, or in two rows.
    """
    actions = Actions.parse(text, name)
    return (actions.verify() if check else actions).schedule()


class _Judge:
    """Checks the rows of a CSV and yields their faults.

    Attributes:
        home: stage → its rank.
        at: action → its first place.
        again: the actions that are there already, with their places.
        waits: whether the list waits for sends itself.
        lowered: whether the format is "compute_comms".
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.home = home_of(rows)
        self.at: dict[Action, Place] = {}
        self.again: list[tuple[Action, Place]] = []
        self.actions = [
            (action, (rank, position, part))
            for rank, row in enumerate(rows)
            for position, cell in enumerate(row)
            for part, action in enumerate(cell)
        ]
        for action, place in self.actions:
            first = self.at.setdefault(action, place)
            if first != place and action.kind not in ("UNSHARD", "RESHARD"):
                self.again.append((action, place))
        self.microbatches = max([a.microbatch or 0 for a in self.at], default=-1) + 1
        kinds = {action.kind for action in self.at}
        moves = not kinds.isdisjoint((*SENDS, *RECEIVES, *WAITS))
        self.waits = any(kind.startswith("WAIT") for kind in kinds)
        self.lowered = moves or (len(rows) == 1 and not kinds.isdisjoint(PER_STAGE))

    def faults(self) -> Iterator[Fault]:
        frame = list(self._frame())
        yield from frame
        if frame:  # without these, the other rules mean nothing
            return
        yield from self._form()
        yield from self._complete()
        yield from self._order()
        if self.lowered:
            yield from self._moves()
            yield from self._whole_stages()

    def _fault(self, action: Action, what: str, cure: str, place: Place | None = None) -> Fault:
        return Fault(what, cure, subject=f"{_where(place or self.at[action])}, {action}")

    def _frame(self) -> Iterator[Fault]:
        """Check the rows, the counts and the ranks of stages."""
        for rank, row in enumerate(self.rows):
            if not any(row):
                yield Fault("a rank without actions fails", "remove it", subject=f"row {rank + 1}")
        last = max(self.home, default=0)
        if len(self.home) <= last:
            first = next(stage for stage in range(last + 1) if stage not in self.home)
            yield Fault(f"stage {first} computes nothing", "count the stages from 0")
            return
        placement = [self.home[stage] for stage in range(last + 1)]
        yield from counts_faults(self.microbatches, placement, len(self.rows), len(self.actions), 0)
        for action, place in self.actions:
            home = self.home.get(action.stage)
            if home is None:
                what, cure = f"stage {action.stage} computes nothing", "remove it"
                yield self._fault(action, what, cure, place)
            elif home != place[0]:
                what = f"stage {action.stage} is on the rank of row {home + 1}"
                yield self._fault(action, what, "move it there", place)

    def _form(self) -> Iterator[Fault]:
        """Report what is there twice, and what the format does not have."""
        for action, place in self.again:
            what = f"it is there already: {_where(self.at[action])}"
            yield self._fault(action, what, "keep one", place)
        for rank, row in enumerate(self.rows if self.lowered else ()):
            if () in row:
                where = _where((rank, row.index(()), 0))
                what = 'an empty cell is no action in the format "compute_comms"'
                yield Fault(what, "remove all empty cells of the row", subject=where)
        for action, place in self.actions if not self.lowered else ():
            if action.kind in PER_STAGE:
                what = 'it is no action of the format "compute_only", whose lowering adds it'
                yield self._fault(action, what, "remove it", place)

    @cached_property
    def compute(self) -> Schedule:
        """Its compute, with the CSV's own numbers of stages and micro-batches."""
        rows = tuple(
            tuple(Task(a.kind, a.microbatch, a.stage) for c in row for a in c if a.kind in COMPUTE)
            for row in self.rows
        )
        placement = tuple(self.home[stage] for stage in range(len(self.home)))
        return Schedule("", self.microbatches, placement, rows)

    def _complete(self) -> Iterator[Fault]:
        """Check that no compute is missing, and the order of the last stage's forwards."""
        if not self.compute.trains:
            yield Fault(
                "it holds forwards alone, which the loader refuses",
                "write the backwards too, and call eval() in place of step()",
            )
        for fault in complete(Window(self.compute), updates=False):
            assert fault.device is not None
            yield replace(fault, device=None, subject=f"row {fault.device + 1}")
        latest = -1
        for action, place in self.actions:
            if action.kind == "F" and action.stage == len(self.home) - 1:
                i = action.microbatch or 0
                if i < latest:
                    yield self._fault(
                        action,
                        f"it comes after micro-batch {latest}, and the runtime takes the k-th loss "
                        "of the last stage for that of micro-batch k",
                        "let the last stage take the micro-batches in ascending order",
                        place,
                    )
                latest = max(latest, i)

    def _order(self) -> Iterator[Fault]:
        """Check that each compute comes after those that it needs, and that no ranks deadlock."""
        waits: list[list[Wait]] = [[] for _ in self.rows]
        needs = needs_of(self.compute)
        for action, place in self.at.items():
            if action.kind in WAITS and (receive := self._received(action)) in self.at:
                waits[place[0]].append((place[1], *self.at[receive][:2]))
            if action.kind not in COMPUTE:
                continue
            for kind, i, stage in needs((action.kind, action.microbatch, action.stage)):
                needed = Action(kind, stage, i)
                on = self.at.get(needed)
                if on is None:
                    continue  # reported as missing
                if on[0] != place[0]:
                    if self.lowered:
                        on = self.at.get(Action("SEND_F" if kind == "F" else "SEND_B", stage, i))
                    if on is not None:
                        waits[place[0]].append((place[1], on[0], on[1]))
                elif on > place:
                    what = f"it comes before {needed}, {_where(on)}, which it needs"
                    yield self._fault(action, what, "move it behind that")
                elif on[1] == place[1] and stage != action.stage and not self.lowered:
                    what = (
                        f"it needs {needed} of its own pair, and the lowering starts both at once"
                    )
                    yield self._fault(action, what, "write them as two cells")
        for rank_waits in waits:
            rank_waits.sort()
        walked = walk([len(row) for row in self.rows], waits)
        for fault in walked.faults(self._text, "reorder one of the rows of the circle"):
            assert fault.device is not None
            position, other, awaited = walked.stuck[fault.device]
            there = self._text(other, awaited)
            what = f"deadlock: it waits for {there}, which waits for it in a circle"
            yield Fault(what, fault.cure, subject=self._text(fault.device, position))

    def _received(self, wait: Action) -> Action:
        """The receive for which a WAIT_SEND waits."""
        letter = wait.kind[-1]
        to = wait.stage + (1 if letter == "F" else -1)
        return Action(f"RECV_{letter}", to, wait.microbatch)

    def _text(self, rank: int, position: int) -> str:
        cell = self.rows[rank][position]
        return f"{_where((rank, position, 0))}, {';'.join(map(str, cell)) or 'an empty cell'}"

    def _moves(self) -> Iterator[Fault]:
        """Check that what crosses ranks is sent and received once, in time and in one order."""
        channels: defaultdict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(list)
        transfers: set[Action] = set()
        for maker in [a for a in self.at if a.kind in ("F", "B", "I")]:
            letter, to = ("F", maker.stage + 1) if maker.kind == "F" else ("B", maker.stage - 1)
            if self.home.get(to, self.home[maker.stage]) == self.home[maker.stage]:
                continue
            send = Action(f"SEND_{letter}", maker.stage, maker.microbatch)
            receive = Action(f"RECV_{letter}", to, maker.microbatch)
            wait = replace(send, kind=f"WAIT_{send.kind}")
            transfers |= {send, receive, wait}
            yield from self._move(maker, send, receive)
            yield from self._awaited(send, wait)
            if send in self.at and receive in self.at:
                channels[self.home[maker.stage], self.home[to]].append((send, receive))
        for action in self.at:
            if action.kind in (*SENDS, *RECEIVES, *WAITS) and action not in transfers:
                yield self._fault(action, "no other rank has an end of this transfer", "remove it")
        swapped: set[frozenset[int]] = set()
        for (source, target), moves in channels.items():
            sends = sorted(moves, key=lambda move: self.at[move[0]])
            receives = sorted(moves, key=lambda move: self.at[move[1]])
            for k, ((sent, _), (_, received)) in enumerate(zip(sends, receives, strict=True)):
                if sends[k] != receives[k]:
                    swapped.add(frozenset((source, target)))
                    what = (
                        f"it gets what {sent} sends, {_where(self.at[sent])}: both are number "
                        f"{k + 1} from row {source + 1} to row {target + 1}"
                    )
                    yield self._fault(received, what, "receive in the order of the sends")
        for source, target in channels:
            if source < target and frozenset((source, target)) not in swapped:
                both = channels[source, target] + channels.get((target, source), [])
                yield from self._crossing(source, target, both)

    def _move(self, maker: Action, send: Action, receive: Action) -> Iterator[Fault]:
        """Check one transfer of what a compute makes."""
        i, stage = maker.microbatch, receive.stage
        sent, received = self.at.get(send), self.at.get(receive)
        readers = [Action(kind, stage, i) for kind in ("F" if maker.kind == "F" else "BI")]
        reader = next((action for action in readers if action in self.at), None)
        if sent is None and received is None:
            cure = f"add {send} behind it, and {receive} before {reader or readers[0]}"
            yield self._fault(maker, f"what it makes for stage {stage} is not sent", cure)
        elif sent is None:
            what = f"it waits for ever, for {send} is missing"
            yield self._fault(receive, what, f"add {send} behind {maker}, {_where(self.at[maker])}")
        elif received is None:
            what = f"it is never received, for {receive} is missing"
            yield self._fault(send, what, f"add {receive} before {reader or readers[0]}")
        if sent is not None and sent < self.at[maker]:
            what = f"it comes before {maker}, {_where(self.at[maker])}, which makes what it sends"
            yield self._fault(send, what, "move it behind that")
        for used in [Action(kind, maker.stage, i) for kind in "BI"] if maker.kind == "F" else ():
            if sent is not None and used in self.at and self.at[used] < sent:
                what = f"it comes behind {used}, {_where(self.at[used])}, which uses its value up"
                yield self._fault(send, what, "move it before that")
        if reader is not None and received is not None and self.at[reader] < received:
            what = f"it comes behind {reader}, {_where(self.at[reader])}, which reads its value"
            yield self._fault(receive, what, "move it before that")

    def _awaited(self, begun: Action, wait: Action) -> Iterator[Fault]:
        """Check that the wait comes after what it waits for, and is there if the list has waits."""
        if begun in self.at and self.waits and wait not in self.at:
            yield self._fault(begun, f"{wait} is missing", "add it behind that")
        elif wait in self.at and self.at[wait] < self.at.get(begun, self.at[wait]):
            what = f"it comes before {begun}, {_where(self.at[begun])}"
            yield self._fault(wait, what, "move it behind that")

    def _crossing(
        self, source: int, target: int, moves: list[tuple[Action, Action]]
    ) -> Iterator[Fault]:
        """Check that two ranks have the transfers between them, both ways, in the same order."""

        def end(move: tuple[Action, Action], rank: int) -> Action:
            return move[0] if self.home[move[0].stage] == rank else move[1]

        here = sorted(moves, key=lambda move: self.at[end(move, source)])
        there = sorted(moves, key=lambda move: self.at[end(move, target)])
        for move, move_there in zip(here, there, strict=True):
            if move != move_there:
                first = end(move_there, target)
                yield self._fault(
                    end(move, source),
                    f"row {target + 1} has {first}, {_where(self.at[first])}, before its end of "
                    "this transfer; under NCCL, which takes the transfers between two ranks one by "
                    "one, each can wait for the other for ever",
                    "take the transfers between the two in the same order in both rows",
                )
                return

    def _whole_stages(self) -> Iterator[Fault]:
        """Check each stage's REDUCE_GRAD, and that it computes between UNSHARD and RESHARD."""
        by_stage: defaultdict[int, list[tuple[Action, Place]]] = defaultdict(list)
        for action, place in self.actions:
            by_stage[action.stage].append((action, place))
        for stage, home in sorted(self.home.items()):
            reduce = Action("REDUCE_GRAD", stage, None)
            gradients = [place for action, place in by_stage[stage] if action.kind in ("B", "W")]
            if reduce not in self.at and gradients:
                yield Fault(
                    f"stage {stage} has no {reduce}, so that its gradients are neither averaged "
                    "over the micro-batches nor summed over sharded replicas",
                    f"add it behind {_where(gradients[-1])}",
                    subject=f"row {home + 1}",
                )
            elif gradients and gradients[-1] > self.at[reduce]:
                what = f"it leaves out the gradient of {_where(gradients[-1])}"
                yield self._fault(reduce, what, "move it behind that")
            yield from self._awaited(reduce, replace(reduce, kind="WAIT_REDUCE_GRAD"))
            yield from self._sharded(by_stage[stage])

    def _sharded(self, actions: list[tuple[Action, Place]]) -> Iterator[Fault]:
        """Check that a stage computes between UNSHARD and RESHARD, unless it has none of them.

        Only FSDP reads these two; a stage without them is not sharded.
        """
        if all(action.kind not in ("UNSHARD", "RESHARD") for action, _ in actions):
            return
        opened: tuple[Action, Place] | None = None
        used = False
        for action, place in actions:
            if action.kind == "UNSHARD":
                if opened is not None:
                    where = _where(opened[1])
                    yield self._fault(
                        action, f"it is unsharded already: {where}", "keep one", place
                    )
                opened, used = (action, place), False
            elif action.kind == "RESHARD":
                if opened is None or not used:
                    what = "no compute behind an UNSHARD comes before it"
                    yield self._fault(action, what, "move or remove it", place)
                opened = None
            elif action.kind in COMPUTE:
                if opened is None:
                    what, cure = "its stage is sharded", f"add {action.stage}UNSHARD before it"
                    yield self._fault(action, what, cure, place)
                used = True
        if opened is not None:
            what = "its stage is still unsharded when the next step unshards it"
            yield self._fault(opened[0], what, f"add {actions[0][0].stage}RESHARD", opened[1])


def _where(place: Place) -> str:
    """``row 2, column 4``, as a spreadsheet counts."""
    return f"row {place[0] + 1}, column {place[1] + 1}"
