"""How the ranks of a pipe find and connect to each other, once, when it is compiled."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError, RankError, told
from fxpipe.runtime.ranks.shared import LOCAL, Shared, share
from fxpipe.signals import raise_held
from fxpipe.words import numbers_text

T = TypeVar("T")

CONNECTS = 30.0
"""Seconds that ranks, once all have come, may take to connect to each other."""

_POLL = 0.05
_PROOF = 32  # bytes
_NONCE = 16


class Met(NamedTuple):
    """What the ranks of a pipe know of each other.

    Attributes:
        rank: this one's number in the pipe. Those of the first replica come first, each replica's
            in the order of its devices.
        names: rank → what messages call it, ``rank 1 (host, process 4711)``.
        places: device → the same for a table, ``rank 1, host``, or ``ranks 1 and 3, host`` where
            it is in two replicas.
        hosts: rank → the name of its host.
        sockets: other rank → a connection to it.
        threads: intra-op threads of this rank's device: its share of the host's, or what
            OMP_NUM_THREADS says.
        timeout: seconds that a rank may be late.
        shared: other rank → the memory that it shares with this one, where it does.
        store: of torch.distributed, for this pipe alone.
        devices: rank → the index of its CUDA device on its host; None where the mesh is of CPUs.
        replicas: how many replicas of the pipeline there are.
    """

    rank: int
    names: tuple[str, ...]
    places: tuple[str, ...]
    hosts: tuple[str, ...]
    sockets: dict[int, socket.socket]
    threads: int
    timeout: float
    shared: Mapping[int, Shared] = MappingProxyType({})
    store: Any = None
    devices: tuple[int | None, ...] = ()
    replicas: int = 1


class _Card(NamedTuple):
    """What a rank tells the others of itself."""

    global_rank: int
    host: str
    process: int
    network: str
    address: str
    port: int
    local: str
    secret: bytes
    versions: tuple[str, str]
    ranks: tuple[tuple[int, ...], ...]
    device: int | None


def meet(mesh: DeviceMesh, pipeline: int | None, replicas: int | None) -> Met:
    """Connect to the other ranks of a pipe. Every rank of the mesh has to call this.

    Args:
        mesh: the ranks of the pipe.
        pipeline: the dimension along which the devices of one pipeline are, in order.
        replicas: the dimension along which the replicas are, in order.

    Raises:
        InputError: the ranks have different versions of fxpipe or torch, or different meshes, or
            this one is in none.
        RankError: a rank does not come, or cannot be reached.
    """
    dims = [dim for dim in (replicas, pipeline) if dim is not None and mesh.shape[dim] > 1]
    devices = 1 if pipeline is None else mesh.shape[pipeline]
    size = mesh.size()
    ranks = tuple(map(int, mesh.mesh.movedim(dims, [*range(len(dims))]).flatten()))
    if dist.get_rank() not in ranks:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh, which has the ranks "
            f"{', '.join(map(str, ranks))}; call fxpipe.compile on these alone"
        )
    groups, rank = [mesh.get_group(dim) for dim in reversed(dims)], ranks.index(dist.get_rank())
    timeout = _timeout(groups[0], mesh.device_type)
    # a thread has a current device of its own
    device = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    address, known_as = _address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as closing:
        listener = socket.create_server((address, 0), family=family, backlog=size)
        listeners = [closing.enter_context(listener)]
        local = _local()
        if local is not None:
            listeners.append(closing.enter_context(local))
            local.listen(size)
        card = _Card(
            dist.get_rank(),
            socket.gethostname(),
            os.getpid(),
            _network(),
            known_as,
            listener.getsockname()[1],
            "" if local is None else local.getsockname()[1:].decode(),
            secrets.token_bytes(_PROOF),
            (_version(), torch.__version__),
            tuple(ranks[first : first + devices] for first in range(0, size, devices)),
            device,
        )
        cards = [card]

        def gather() -> None:
            try:
                with nullcontext() if device is None else torch.cuda.device(device):
                    for group in groups:  # along one dimension of the mesh, then along the other
                        parts: list[list[_Card]] = [[]] * group.size()
                        dist.all_gather_object(parts, cards, group=group)
                        cards[:] = [each for part in parts for each in part]
            except BaseException as error:
                raise RankError(
                    f"the ranks of the mesh did not meet ({told(error)}); every rank has to call "
                    "fxpipe.compile with the same mesh",
                    rank=-1,
                ) from error

        interruptibly(gather, raise_held)
        names = tuple(_named_rank(each) for each in cards)
        for name, each in zip(names, cards, strict=True):
            if each.versions != cards[0].versions:
                raise InputError(
                    f"{name} has fxpipe {each.versions[0]} and torch {each.versions[1]}, and "
                    f"{names[0]} {cards[0].versions[0]} and {cards[0].versions[1]}; install the "
                    "same on all"
                )
            if each.ranks != cards[0].ranks:
                raise InputError(
                    f"{name} has a mesh of the ranks {each.ranks} and {names[0]} one of "
                    f"{cards[0].ranks}; make the same mesh on all"
                )
        cards.sort(key=lambda each: ranks.index(each.global_rank))  # the group is in its own order
        names = tuple(_named_rank(each) for each in cards)
        sockets = _connected(rank, cards, names, listeners, time.monotonic() + CONNECTS)
    shared = dict(zip(sockets, share([*sockets.values()]), strict=True))
    beside = sum(each.host == card.host and each.network == card.network for each in cards)
    threads = torch.get_num_threads()
    threads = threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // beside)
    places = tuple(_place(cards[device::devices]) for device in range(devices))
    hosts = tuple(each.host for each in cards)
    name = hashlib.sha256(cards[0].secret).hexdigest()
    store = within(groups[0].get_group_store(), f"fxpipe/{name}")
    return Met(
        rank,
        names,
        places,
        hosts,
        sockets,
        threads,
        timeout,
        shared,
        store,
        tuple(each.device for each in cards),
        size // devices,
    )


def _place(cards: Sequence[_Card]) -> str:
    """What a table says of a device, which is on one rank of each replica."""
    hosts = {card.host for card in cards}
    where = cards[0].host if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = numbers_text(sorted(card.global_rank for card in cards))
    return f"rank{'s' * (len(cards) > 1)} {ranks}, {where}"


def _named_rank(card: _Card) -> str:
    """What messages call a rank."""
    place = ""
    for replica, own in enumerate(card.ranks if len(card.ranks) > 1 else ()):
        if card.global_rank in own:
            place = f"device {own.index(card.global_rank)} of replica {replica}, "
    return f"rank {card.global_rank} ({place}{card.host}, process {card.process})"


def _connected(
    rank: int,
    cards: Sequence[_Card],
    names: Sequence[str],
    listeners: Sequence[socket.socket],
    deadline: float,
) -> dict[int, socket.socket]:
    """Connections to all others: to the lower ranks from here, from the higher ones to here."""
    found: dict[int, socket.socket] = {}
    secret = cards[0].secret
    try:
        for other in range(rank):
            card = cards[other]
            try:
                made = _connection(card, max(deadline - time.monotonic(), 1))
                made.sendall(
                    bytes([rank >> 8, rank & 255]) + _proof(secret, _exactly(made, _NONCE))
                )
            except OSError as error:
                raise RankError(
                    f"{names[other]} cannot be reached at {card.address} port {card.port} "
                    f"({told(error)}); open the network between the hosts, or set MASTER_ADDR to "
                    "an address by which they reach each other",
                    rank=other,
                ) from error
            found[other] = made
        with _Door(listeners, secret) as door:
            while len(found) < len(cards) - 1:
                raise_held()
                if time.monotonic() > deadline:
                    late = next(r for r in range(len(cards)) if r != rank and r not in found)
                    raise RankError(f"{names[late]} did not connect in time", rank=late)
                for other, made in door.admitted():
                    if rank < other < len(cards) and other not in found:
                        found[other] = made
                    else:
                        made.close()
    except BaseException:
        for each in found.values():
            each.close()
        raise
    for each in found.values():
        each.settimeout(max(deadline - time.monotonic(), 1))
        if each.family != LOCAL:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _local() -> socket.socket | None:
    """A socket for connections inside of this host, under a name that nobody else has."""
    if sys.platform != "linux":  # the only one on which a name needs no file
        return None
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0fxpipe-{secrets.token_hex(16)}")
    return made


def _connection(card: _Card, timeout: float) -> socket.socket:
    """A connection to another rank, if it can be one inside of this host."""
    if card.local and sys.platform == "linux":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout)
        try:
            made.connect(f"\0{card.local}")
            return made
        except OSError:  # it is on another host
            made.close()
    made = socket.create_connection((card.address, card.port), timeout)
    made.settimeout(timeout)
    return made


class _Door:
    """Lets in who proves to be a rank. Strangers, even silent ones, keep nobody waiting."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes) -> None:
        self._secret = secret
        self._said: dict[socket.socket, bytes] = {}
        self._asked: dict[socket.socket, bytes] = {}
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        for each in listeners:
            self._selector.register(each, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for stranger in self._asked:
            stranger.close()

    def admitted(self) -> Iterator[tuple[int, socket.socket]]:
        """The ranks that have proven who they are since the last call, after a short wait."""
        for key, _ in self._selector.select(_POLL):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj in self._listeners:
                self._ask(key.fileobj.accept()[0])
            elif (other := self._heard(key.fileobj)) is not None:
                yield other, key.fileobj

    def _ask(self, made: socket.socket) -> None:
        made.setblocking(False)
        self._asked[made], self._said[made] = secrets.token_bytes(_NONCE), b""
        self._selector.register(made, selectors.EVENT_READ)
        with suppress(OSError):
            made.send(self._asked[made])

    def _heard(self, made: socket.socket) -> int | None:
        """The number of the rank at the other end once it is known; closes that of a stranger."""
        try:
            part = made.recv(2 + _PROOF - len(self._said[made]))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        said = self._said[made] = self._said[made] + part
        if part and len(said) < 2 + _PROOF:
            return None
        self._selector.unregister(made)
        nonce = self._asked.pop(made)
        if hmac.compare_digest(said[2:], _proof(self._secret, nonce)):
            return said[0] << 8 | said[1]
        made.close()
        return None


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return found


def _address() -> tuple[str, str]:
    """The address to listen at, and what the others call it: the one that leads to MASTER_ADDR.

    On the host that is MASTER_ADDR this may be an address inside of it, such as the 127.0.1.1 that
    many hosts have for their own name. Then the others use MASTER_ADDR as they know it.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "9"))
    try:
        family, *_, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1", "127.0.0.1"
    if _within_host(own) and not _within_host(master):
        return "::" if family == socket.AF_INET6 else "0.0.0.0", master
    return own, own


def _within_host(address: str) -> bool:
    """Whether an address, as it is written, leads to no other host."""
    if address == "localhost":
        return True
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False  # a name


def _version() -> str:
    """That of fxpipe; empty where it is used without being installed."""
    with suppress(PackageNotFoundError):
        return version("fxpipe")
    return ""


def _network() -> str:
    """What tells the hosts apart, network namespaces of one host included."""
    with suppress(OSError):
        return str(os.stat("/proc/self/ns/net").st_ino)
    return ""


def _timeout(group: dist.ProcessGroup, device: str) -> float:
    """Seconds that a rank may be late: as ``init_process_group(timeout=...)`` says."""
    with suppress(Exception):
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return 1800.0


def within(store: Any, name: str) -> Any:
    """The part of a store of torch.distributed whose keys begin with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined,unused-ignore]


def interruptibly(work: Callable[[], T], look: Callable[[], None]) -> T:
    """The result of a call that would not let Python handle signals; another thread makes it.

    Args:
        work: the call.
        look: called again and again meanwhile; what it raises ends the wait.
    """
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="fxpipe-meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL)
        look()
    if failed:
        raise failed[0]
    return made[0]
