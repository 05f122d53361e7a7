"""A model of the runtime of torch.distributed.pipelining, which runs lists of its actions.

Each rank runs its actions in order, as ``_PipelineScheduleRuntime`` does. Transfers between two
ranks are matched by order alone. All may be in flight at once (gloo), or one at a time (NCCL).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

Rows = Sequence[Sequence[str]]
_ACTION = re.compile(r"(\d+)([A-Z_]+?)(\d*)")


def works(rows: Rows, microbatches: int) -> bool:
    """Whether the rows end with the right gradients, under gloo and under NCCL."""
    try:
        home = _home(rows)
        for one_by_one in (False, True):
            _Machine(rows, home, microbatches, one_by_one).run()
    except AssertionError:
        return False
    return True


def _home(rows: Rows) -> dict[int, int]:
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        assert row
        for text in row:
            for action in parts(text):
                assert home.setdefault(action[0], rank) == rank
    assert sorted(home) == list(range(len(home)))
    return home


def parts(text: str) -> list[tuple[int, str, int]]:
    """Parse an action or a pair of them: stage, kind, micro-batch (−1 if it has none)."""
    inner = text[1 : text.index(")")].split(";") if text.startswith("(") else [text]
    found = [_ACTION.fullmatch(each) for each in inner]
    assert all(found)
    return [(int(m[1]), m[2], int(m[3] or -1)) for m in found if m]


class _Machine:
    """The state of all ranks, and of the transfers between them."""

    def __init__(
        self, rows: Rows, home: dict[int, int], microbatches: int, one_by_one: bool
    ) -> None:
        self.lists = [[action for text in row for action in parts(text)] for row in rows]
        self.home, self.count, self.one_by_one = home, microbatches, one_by_one
        self.done: set[tuple[int, str, int]] = set()
        self.posted: dict[tuple[int, str, int], int] = {}
        self.ends: defaultdict[tuple[int, int], list[tuple[str, tuple[int, str, int]]]]
        self.ends = defaultdict(list)  # rank and peer → its sends and receives, in order
        self.losses: list[int] = []
        self.gradients: defaultdict[int, int] = defaultdict(int)
        self.open: dict[int, bool] = {}
        self.sharded = {s for own in self.lists for s, kind, _ in own if kind == "UNSHARD"}
        self.sharded |= {s for own in self.lists for s, kind, _ in own if kind == "RESHARD"}

    def run(self) -> None:
        at = [0] * len(self.lists)
        moved = True
        while moved:
            moved = False
            for rank, own in enumerate(self.lists):
                while at[rank] < len(own) and self.step(rank, own[at[rank]]):
                    at[rank] += 1
                    moved = True
        assert all(here == len(own) for here, own in zip(at, self.lists, strict=True))
        for a, b in combinations(range(len(self.lists)), 2):
            assert self.arrived(a, b) == len(self.ends[a, b]) == len(self.ends[b, a])
            for one, other in ((a, b), (b, a)):
                sent = [what for way, what in self.ends[one, other] if way == "SEND"]
                assert sent == [w for way, w in self.ends[other, one] if way == "RECV"]
        assert not self.posted
        assert not self.open
        assert all(self.gradients[stage] == self.count for stage in self.home)
        if any(kind.startswith("WAIT") for own in self.lists for _, kind, _ in own):
            for stage, kind, i in list(self.done):
                if kind in ("SEND_F", "SEND_B", "REDUCE_GRAD"):
                    assert (stage, f"WAIT_{kind}", i) in self.done
        for stage in self.home:
            assert (stage, "REDUCE_GRAD", -1) in self.done
            assert all((stage, "F", i) in self.done for i in range(self.count))

    def arrived(self, a: int, b: int) -> int:
        """How many of a's transfers with b are done, if they run one at a time."""
        if not self.one_by_one:
            return len(self.ends[a, b])
        through = 0
        for (one, _), (other, _) in zip(self.ends[a, b], self.ends[b, a], strict=False):
            if one == other:
                break
            through += 1
        return through

    def has(self, rank: int, what: tuple[int, str, int]) -> bool:
        """Whether a posted receive is done; raises if it got another value than it is for."""
        assert what in self.posted
        source = self.home[what[0] + (-1 if what[1] == "RECV_F" else 1)]
        number = [w for way, w in self.ends[rank, source] if way == "RECV"].index(what)
        sent = [w for way, w in self.ends[source, rank] if way == "SEND"]
        if len(sent) <= number:
            return False
        assert sent[number] == what
        return self.ends[rank, source].index(("RECV", what)) < self.arrived(rank, source)

    def taken(self, rank: int, sent: tuple[int, str, int]) -> bool:
        """Whether the other rank has posted a receive for what was sent."""
        letter = sent[1][-1]
        to = sent[0] + (1 if letter == "F" else -1)
        peer = self.home[to]
        what = ("SEND", (to, f"RECV_{letter}", sent[2]))
        sends = [end for end in self.ends[rank, peer] if end[0] == "SEND"]
        receives = [end for end in self.ends[peer, rank] if end[0] == "RECV"]
        if len(receives) <= sends.index(what):
            return False
        return self.ends[rank, peer].index(what) < self.arrived(rank, peer)

    def step(self, rank: int, action: tuple[int, str, int]) -> bool:
        stage, kind, i = action
        if kind in ("UNSHARD", "RESHARD"):
            assert (stage in self.open) == (kind == "RESHARD")
            if kind == "UNSHARD":
                self.open[stage] = False
            else:
                assert self.open.pop(stage)
            return True
        if kind.startswith("WAIT_"):
            begun = (stage, kind.removeprefix("WAIT_"), i)
            assert begun in self.done
            assert action not in self.done
            if kind != "WAIT_REDUCE_GRAD" and not self.taken(rank, begun):
                return False
            self.done.add(action)
            return True
        if kind[:5] in ("SEND_", "RECV_"):
            up = (kind[-1] == "F") == (kind[:4] == "SEND")
            other = stage + (1 if up else -1)
            assert self.home.get(other, rank) != rank
            assert action not in self.posted
            backwards = ((stage, "B", i), (stage, "I", i))
            if kind[:4] == "SEND":
                made = any(each in self.done for each in backwards)
                assert made if kind[-1] == "B" else (stage, "F", i) in self.done and not made
                assert action not in self.done
                self.done.add(action)
                what = (other, f"RECV_{kind[-1]}", i)
            else:
                assert 0 <= i < self.count
                self.posted[action] = rank
                what = action
            self.ends[rank, self.home[other]].append((kind[:4], what))
            return True
        assert action not in self.done
        if kind == "REDUCE_GRAD":
            assert self.gradients[stage] == self.count
            self.done.add(action)
            return True
        assert 0 <= i < self.count
        assert stage not in self.sharded or stage in self.open
        if kind == "F":
            ready = self.input(rank, stage - 1, ("F",), (stage, "RECV_F", i))
            if stage == len(self.home) - 1 and ready:
                assert len(self.losses) == i
                self.losses.append(i)
        elif kind in ("B", "I"):
            assert (stage, "F", i) in self.done
            assert not {(stage, "B", i), (stage, "I", i)} & self.done
            ready = self.input(rank, stage + 1, ("B", "I"), (stage, "RECV_B", i))
        else:
            assert kind == "W"
            assert (stage, "I", i) in self.done
            ready = True
        if ready:
            self.done.add(action)
            if stage in self.open:
                self.open[stage] = True
            self.gradients[stage] += kind in ("B", "W")
        return ready

    def input(
        self, rank: int, other: int, kinds: Sequence[str], receive: tuple[int, str, int]
    ) -> bool:
        """Whether the input of a compute has arrived, or comes from a stage of the same rank."""
        if other not in self.home:
            return True
        if self.home[other] == rank:
            assert any((other, kind, receive[2]) in self.done for kind in kinds)
            return True
        if not self.has(rank, receive):
            return False
        del self.posted[receive]
        return True
