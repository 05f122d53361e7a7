"""The ranks of a pipe as a group: they make the same calls in the same order, and agree on each."""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise, zip_longest
from math import inf, prod
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from fxpipe.errors import InputError, RankError, told
from fxpipe.extensions.ranks.packing import RefusedError, enclosed, opened, pack, unpack
from fxpipe.extensions.ranks.tree import OUTCOME, REFUSED, STORE, Key, Tree
from fxpipe.parts import Parts
from fxpipe.runtime.group import Group
from fxpipe.signals import HeldSignals, raise_held

if TYPE_CHECKING:
    from fxpipe.extensions.ranks.channels import RankChannels

POLL = 0.1
"""Seconds between two checks for signals while a thread waits for another rank."""

LARGE = 1 << 16
"""The bytes above which a rank's part of an exchange goes by itself, and is packed once."""

Run = tuple[int, int]
"""Identifies a run's channels: the number of the call that opens them, and the number of channels
opened in that call, these included."""

_PLACE = ("device", "instruction", "stage", "microbatch", "source")


class Said(NamedTuple):
    """What a rank says in an exchange: about what, in which call, with how many runs kept, in which
    epoch, the value, and whether that is large and was told before."""

    about: str
    what: str
    kept: int
    epoch: int
    value: Any
    large: bool = False


class RankGroup(Group):
    """The ranks of a pipe, as one of them sees them. ``kept`` is the same on all ranks, unless one
    failed while the others committed a run.

    Attributes:
        names: rank → what messages call it, ``rank 1 (host, process 4711)``.
        store: a store of torch.distributed that belongs to this pipe.
        timeout: seconds that a rank may be late.
        own_backend: the name of the user's own backend for tensors; empty for torch's.
        epoch: how often the process groups of devices were given up after a failure: those of this
            number are used, once a call has begun on all ranks.
        columns: dimension of the mesh that divides stages → the ranks with the parts of this one's.
        groups: the same dimensions → the process group of torch.distributed of the mesh.
        own_column: the ranks that have the same parts as this one.
        summed: the bytes that this rank has sent to sum gradients over the replicas.
        closed: whether ``close`` was called.
        changed: the lock to hold for any change by what other ranks tell; those that wait for it
            hear of each.
    """

    own_backend = ""
    _along: Mapping[str, list[Any]] = MappingProxyType(
        {}
    )  # what came along with this call, by rank

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: Any,
        edges: Mapping[int, Any],
        timeout: float,
        replicas: int,
        columns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Begin to hear of the other ranks; ``edges`` are the groups of the tree, see ``Tree``. The
        first column's ranks come first, of these the first replica's, and within a replica they are
        in the order of devices. ``columns`` has for each dimension of the mesh that divides stages
        this rank and those that have the other parts."""
        self._stand(rank, names, replicas, columns)
        self.store, self.timeout = store, timeout
        self.summed = self.epoch = 0
        self._dealt: dict[str, int] = {}  # name of a parameter → the replica that has it
        self._loads = [0] * replicas  # replica → the bytes that it has of these
        self.closed = False
        self.changed = threading.Condition(threading.RLock())
        self._gone: tuple[int, int, str] | None = None  # who has told of which lost rank, and why
        # exchange → statement → the ranks that say it, as bits; and whether that is all
        self._answers: dict[Key, tuple[Mapping[bytes, int], bool]] = {}
        self._large: dict[tuple[Key, int], bytes] = {}  # exchange and rank → its statement
        self._peaks: list[Any] = [None] * self.size  # what each rank said at the end of a step
        self._failures: dict[int, RankError] = {}  # call → the first failure of it
        self._run: Run = 0, 0
        self._channels = weakref.WeakValueDictionary[Run, "RankChannels"]()
        # what was told of channels that are not open yet
        self._early: dict[Run, list[tuple[str, int, Key, Any]]] = {}
        self._what = ""  # the name of the running call; empty between calls
        self._exchanges = 0  # those of this call
        self._settled = False  # whether all ranks have done the call's work, and only return
        self._told = False  # whether this rank has announced that the call failed
        self._outcome_told = False  # whether it has sent, in this call, how far it has come
        self._failed: Callable[[], str] = lambda: ""
        self._stops: Callable[[], None] = lambda: None  # ends what runs outside of runs
        self._tree = Tree(rank, self.size, edges, store, weakref.WeakMethod(self._deliver))
        weakref.finalize(self, self._tree.end).atexit = False

    def _stand(
        self,
        rank: int,
        names: Sequence[str],
        replicas: int,
        columns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Find the rank's place among the others, see ``__init__``."""
        self.rank, self.size, self.replicas, self.names = rank, len(names), replicas, names
        self.groups: Mapping[str, Any] = {}
        self.columns = {dim: tuple(ranks) for dim, ranks in columns.items()}
        self._each = self.size // prod(map(len, self.columns.values()))  # ranks of a column
        self._devices = self._each // self.replicas
        self.column, within = divmod(self.rank, self._each)
        self.replica, self.device = divmod(within, self._devices)
        first = self.rank - self.device
        self.pipeline = range(first, first + self._devices)
        beginning = self.column * self._each
        self.own_column = range(beginning, beginning + self._each)
        self.twins = self.own_column[self.device :: self._devices]

    # calls

    @contextmanager
    def calling(self, what: str, *, exchanges: bool = False) -> Iterator[None]:
        """Calls inside the block count as part of it. Signals are held where they would end the
        call half done. Where the block exchanges something first, the ranks find out only then
        whether all of them make this call.

        Raises:
            InputError: the pipe is closed, or this process was forked.
            RankError: another rank failed in this call, or makes a different call.
        """
        if self._what:
            try:
                yield
            finally:
                self._settled = False  # the outer call goes on
            return
        self._check_open()
        with _held_once():
            self.call, self._exchanges = self.call + 1, 0
            self._what, self._told, self._settled, self._outcome_told = what, False, False, False
            with self.changed:
                self._run = self.call, 0
            try:
                self.check()  # inside the try: the others may wait in this call for the failure
                if not exchanges:
                    self.exchange("the beginning of a call")
                yield
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._what = ""
                self._forget()

    def when_failed(self, failed: Callable[[], str]) -> None:
        self._failed = failed

    @property
    def called(self) -> bool:
        return bool(self._what)

    def check(self) -> None:
        """Raise InputError if the pipe is closed, or this process was forked; RankError if a rank
        is gone."""
        self._check_open()
        if (gone := self.gone) is not None:
            raise gone

    def _check_open(self) -> None:
        if self._tree.forked:
            raise InputError(
                "this process was forked from the one that compiled the pipe, and the other ranks "
                "are connected only to that one; use the pipe there"
            )
        if self.closed:
            raise InputError("the pipe is closed; compile the model again")

    def tell(self, kind: str, key: Key, value: Any, ranks: Collection[int] | None = None) -> None:
        """See ``Tree.tell``."""
        self._tree.tell(kind, key, value, ranks)

    def exchange(self, about: str, value: Any = None, *, held: bool = False) -> list[Any]:
        """All ranks must exchange the same things in the same order. Either all return from an
        exchange, or none: the root of the tree decides whether it was complete before a failure.

        Raises:
            RankError: a rank failed, is gone or late, or exchanges something else.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        own = Said(about, self._what, self.kept, self.epoch, value)
        return self._exchange(number, own, held)

    def gather(self, about: str, make: Callable[[], Any]) -> list[Any]:
        came = self._along.get(about)
        return self.exchange(about, make()) if came is None else came

    def collect(self, about: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        sent = {name: enclosed(value) for name, value in values.items()}
        ranks = self.exchange(about, sent)
        return [{name: opened(value) for name, value in each.items()} for each in ranks]

    def meets(self, look: Callable[[], None]) -> None:
        """Meet all ranks, before the first call. ``look`` is called meanwhile, and may raise."""
        self._exchange(0, Said("the mesh", "fxpipe.compile", 0, 0, None), held=True, look=look)

    def _exchange(
        self, number: int, own: Said, held: bool, look: Callable[[], None] = lambda: None
    ) -> list[Any]:
        self._settled, key = False, (self.call, number)
        self._say(key, own)
        deadline = time.monotonic() + self.timeout
        while True:
            with self.changed:
                if key in self._answers:
                    statements, whole = self._answers.pop(key)
                    said = self._read(key, statements)
                    break
                if (failure := self.gone if number == OUTCOME else self.failure) is not None:
                    raise failure
                self.changed.wait(POLL)
            if time.monotonic() > deadline:
                self.tell("late", key, None)  # the root answers with what it has
                deadline = inf
            look()
            if not held:
                raise_held()
        self._compare(said)
        if not whole:
            late = next(rank for rank in range(self.size) if rank not in said)
            raise RankError(
                f"{self.names[late]} has not reached the point where others wait ({own.about}) in "
                f"{self.timeout:.0f} s, the timeout of init_process_group; let every rank make the "
                "same calls",
                rank=late,
            )
        self.epoch = max(self.epoch, *(each.epoch for each in said.values()))
        return [said[rank].value for rank in range(self.size)]

    def _say(self, key: Key, own: Said) -> None:
        statement = pack(tuple(own))
        if len(statement) > LARGE:
            self.tell("large", key, bytes(statement))
            statement = pack((*own[:4], None, True))
        self._tree.say(key, bytes(statement))

    def _read(self, key: Key, statements: Mapping[bytes, int]) -> dict[int, Said]:
        """Rank → what it has said."""
        said: dict[int, Said] = {}
        for statement, bits in statements.items():
            ranks = [rank for rank in range(self.size) if bits >> rank & 1]
            try:
                one = Said(*unpack(statement))
                for rank in ranks:
                    large = one.large and self._large.pop((key, rank))
                    said[rank] = Said(*unpack(large)) if large else one
            except RefusedError as error:
                raise RankError(
                    f"{self.names[ranks[0]]} has sent {error}, {REFUSED}", rank=ranks[0]
                ) from None
        return said

    def _compare(self, said: Mapping[int, Said]) -> None:
        """Check that ranks are at the same place of the same call."""
        names, different = self.names, {each[:3]: rank for rank, each in sorted(said.items())[::-1]}
        for (own, first), (other, rank) in pairwise(sorted(different.items(), key=itemgetter(1))):
            if other[:2] != own[:2]:
                raise RankError(
                    f"{names[rank]} calls {other[1]} and is at {other[0]}, while {names[first]} "
                    f"calls {own[1]} and is at {own[0]}; let every rank make the same calls in the "
                    "same order, with the same model and options",
                    rank=rank,
                )
            raise RankError(
                f"{names[rank]} has kept the results of {other[2]} runs and {names[first]} those "
                f"of {own[2]}: a rank failed after others had kept the results of the same run, so "
                "their stages do not match; load a checkpoint on every rank",
                rank=rank,
            )

    def settle(self, value: Any) -> list[Any]:
        """It cannot be interrupted, as other ranks may have returned already. An error that this
        rank raises afterwards is no failure of the call."""
        mine = None if value == self._peaks[self.rank] else value  # mostly the same, so not told
        for rank, other in enumerate(self.exchange("end", mine, held=True)):
            self._peaks[rank] = self._peaks[rank] if other is None else other
        self._settled = True
        return [self._peaks[rank] or {} for rank in self.pipeline if rank != self.rank]

    def outcomes(self, value: Any) -> list[Any]:
        """Those that failed elsewhere tell nothing."""
        if not self._what or self._settled:
            return [value]  # the others have ended the call
        self._outcome_told = True
        try:
            answers = self._exchange(OUTCOME, self._outcome(value), held=True)
        except RankError:
            if self.gone is None:
                self.close()  # it is not known how far the others have come
            return [value]
        return [answer for answer in answers if answer is not None]

    def _outcome(self, value: Any) -> Said:
        return Said("how far it has come", "", 0, self.epoch, value)

    def agree(
        self,
        about: str,
        text: str,
        *,
        own: str = "",
        twins: str = "",
        parts: str = "",
        value: Any = None,
    ) -> list[Any]:
        """Check that all ranks have the same texts.

        Args:
            about: what the texts describe.
            text: must be the same on all ranks.
            own: must be the same on all ranks of a replica.
            twins: must be the same on the ranks with the same device in all replicas of a column.
            parts: must be the same on the ranks that have the parts of the same stages.
            value: any value to send to the other ranks along with the texts.

        Returns:
            Rank → its value.

        Raises:
            RankError: a text differs; the message shows the first line that differs.
        """
        texts = [text, own, twins, parts]
        answers = self.exchange(about, [*map(text_digest, texts), value])
        for rank in range(self.size):
            device, column = rank % self._devices, rank - rank % self._each
            replica = (rank - column) - device
            for kind, first in enumerate((0, replica, column + device, rank % self._each)):
                if answers[rank][kind] != answers[first][kind]:
                    self.differs(about, first, rank, texts[kind])
        return [answer[-1] for answer in answers]

    def differs(self, about: str, first: int, rank: int, text: str) -> NoReturn:
        """Raise the RankError that says where the texts of two ranks differ. All ranks call it, and
        only the texts of these two count."""
        full = self.exchange(f"{about} in full", text if self.rank in (first, rank) else "")
        raise RankError(
            f"{about} differs between ranks: {difference(self.names, first, rank, full)}; give all "
            "ranks the same model, options, settings and inputs",
            rank=rank,
        )

    @property
    def checks(self) -> bool:
        return self.rank % self._each == 0

    def sharded(self, name: str) -> Sequence[str]:
        """The dimensions of the mesh over which a parameter is sharded."""
        return ()

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        return rank % self._each // self._devices

    def deal(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[int]:
        sizes = {name: p.nbytes for name, p in zip(names, parameters, strict=True)}
        if new := [name for name in names if name not in self._dealt]:
            owners = Parts.owners.find("sharding over replicas")
            of = owners([sizes[name] for name in new], self._loads)
            self._dealt |= dict(zip(new, of, strict=True))
        return [self._dealt[name] for name in names]

    def refuse(self, what: str, cure: str) -> None:
        raise InputError(f"{what} is not possible over several ranks; {cure}")

    # failures

    def announce(self, error: BaseException) -> None:
        """Tells nothing if the others know already."""
        if not self._what or self._told or self._settled or error is self.failure:
            return
        self._told = True
        self.tell("fails", (self.call,), failure_of(error))

    def _fail(self, error: BaseException) -> None:
        """Announce that the call has failed with an error, and clean up."""
        if not self._settled:
            self.announce(error)
            if note := self._failed():
                error.add_note(note)
            if not self._outcome_told:  # others may wait for it
                self._say((self.call, OUTCOME), self._outcome(None))
        if self.call == 1:  # the first call is compile: there will be no pipe
            self.close()

    def error_of(self, rank: int, value: Mapping[str, Any]) -> RankError:
        """Return the error to raise here for an error that a rank has told with ``failure_of``."""
        name, place = self.names[rank], {key: value[key] for key in _PLACE if key in value}
        if "rank" in value:  # a RankError there: its message holds on every rank
            error = RankError(value["error"], rank=value["rank"], **place)
        else:
            error = RankError(f"{name} failed: {value['error']}", rank=rank, **place)
        error.add_note(f"On {name}:\n{value['traceback']}")
        return error

    @property
    def gone(self) -> RankError | None:
        """A new error, which says that a rank is gone, after which no rank hears of another."""
        if self._gone is None:
            return None
        teller, lost, why = self._gone
        if lost == self.rank and teller != lost:
            lost, why = teller, f"has lost this one, which {why}"
        name = "the store of torch.distributed" if lost == STORE else self.names[lost]
        return RankError(
            f"{name} {why}; start all ranks again, from the last checkpoint", rank=lost
        )

    @property
    def failure(self) -> RankError | None:
        """The reason why this call cannot go on, if a rank has failed in it or is gone."""
        return self._failures.get(self.call) or self.gone

    def close(self) -> None:
        """Stop what still runs here, and say goodbye to the other ranks."""
        if not self._tree.forked:
            self.closed = True
            self._stop(RankError("the pipe was closed", rank=self.rank))
            self._tree.close()

    def _stop(self, error: RankError) -> None:
        """Stop all runs because of an error."""
        with self.changed:
            running = [*self._channels.values()]
        self._stops()
        for channels in running:
            channels.fail(error)

    # what other ranks tell

    def open(self, channels: RankChannels) -> Run:
        """Hand what belongs to a run to its channels. Returns their key, alike on all ranks."""
        with self.changed:
            self._run = key = self._run[0], self._run[1] + 1
            self._channels[key] = channels
            for kind, rank, of, value in self._early.pop(key, []):
                channels.deliver(kind, rank, of, value)
        return key

    def meet(self, run: Run) -> None:
        """Come to the barrier of a run; its channels hear when all ranks have."""
        self._tree.say((self.call, run), b"")

    def _forget(self) -> None:
        """Drop what belongs to this call, which is over here."""
        self._along = {}
        with self.changed:
            self._answers = {key: each for key, each in self._answers.items() if key[0] > self.call}
            self._large = {key: each for key, each in self._large.items() if key[0][0] > self.call}
            self._early = {key: each for key, each in self._early.items() if key[0] > self.call}
            self._failures = {call: e for call, e in self._failures.items() if call > self.call}

    def _deliver(self, kind: str, rank: int, key: Key, value: Any) -> None:
        """Handle what a rank tells; called by a thread of the tree."""
        stops: RankError | None = None
        with self.changed:
            call = key[0]
            if kind == "gone":
                self._gone = rank, call, value
                stops = self.gone
            elif kind == "failed":
                if (call > self.call or self._what) and call not in self._failures:
                    self._failures[call] = error = self.error_of(rank, value)
                    stops = error if call == self.call and rank != self.rank else None
            elif kind == "large":
                self._large[key, rank] = value
            elif kind == "answer" and isinstance(key[1], int):
                if call >= self.call:
                    self._answers[key] = value
            else:
                run = key[1] if kind == "answer" else call
                if (channels := self._channels.get(run)) is not None:
                    channels.deliver(kind, rank, key, value)
                elif run > self._run:  # else it is over here
                    self._early.setdefault(run, []).append((kind, rank, key, value))
            self.changed.notify_all()
        if stops is not None:
            self._stop(stops)


def text_digest(text: str) -> bytes:
    """What stands for a text where texts are compared; for no text nothing."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest() if text else b""


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return what a rank tells the others about its error."""
    value = {name: getattr(error, name) for name in _PLACE if hasattr(error, name)}
    value["traceback"] = "".join(traceback.format_exception(error))
    if isinstance(error, RankError):
        return {**value, "error": str(error), "rank": error.rank}
    return {**value, "error": told(error)}


def _held_once() -> AbstractContextManager[object]:
    """A ``HeldSignals``, unless a surrounding block holds signals already."""
    around = HeldSignals._innermost
    main = threading.current_thread() is threading.main_thread()
    return nullcontext() if main and around is not None else HeldSignals()


def difference(names: Sequence[str], first: int, rank: int, texts: Sequence[str]) -> str:
    """Say which line of two ranks' texts is the first that differs."""
    pairs = zip_longest(texts[first].split("\n"), texts[rank].split("\n"))
    number, pair = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    mine, theirs = ("missing" if line is None else repr(line.strip()) for line in pair)
    return f"line {number} is {mine} on {names[first]} and {theirs} on {names[rank]}"
