"""Sockets between each two ranks of a pipe, which prove to each other that they belong to it."""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, NamedTuple

from fxpipe.errors import RankError, told
from fxpipe.runtime.ranks.shared import LOCAL, Shared
from fxpipe.signals import raise_held

CONNECTS = 30.0
"""Seconds that ranks, once all have come, may take to connect to each other."""

PROOF = 32  # bytes
_NONCE = 16
_POLL = 0.05


class RankInfo(NamedTuple):
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


class Membership(NamedTuple):
    """What the ranks of a pipe know of each other; by default of a process that is the only one.

    Attributes:
        rank: this one's number in the pipe. Those of the first replica come first, each replica's
            in the order of its devices.
        names: rank → what messages call it, ``rank 1 (host, process 4711)``.
        places: device → the same for a table, ``rank 1, host``, or ``ranks 1 and 3, host`` where
            it is in two replicas.
        hosts: rank → the name of its host.
        sockets: other rank → a connection to it.
        threads: intra-op threads of this rank's device: its share of the host's, or what
            OMP_NUM_THREADS says. 0 where it is the only one.
        timeout: seconds that a rank may be late.
        shared: other rank → the memory that it shares with this one, where it does.
        store: of torch.distributed, for this pipe alone.
        devices: rank → the index of its CUDA device on its host; None where the mesh is of CPUs.
        replicas: how many replicas of the pipeline there are.
    """

    rank: int = 0
    names: tuple[str, ...] = ("this process",)
    places: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    sockets: Mapping[int, socket.socket] = MappingProxyType({})
    threads: int = 0
    timeout: float = 0.0
    shared: Mapping[int, Shared] = MappingProxyType({})
    store: Any = None
    devices: tuple[int | None, ...] = ()
    replicas: int = 1


def connected(
    rank: int,
    infos: Sequence[RankInfo],
    names: Sequence[str],
    listeners: Sequence[socket.socket],
    deadline: float,
) -> dict[int, socket.socket]:
    """Connections to all others: to the lower ranks from here, from the higher ones to here."""
    found: dict[int, socket.socket] = {}
    secret = infos[0].secret
    try:
        for other in range(rank):
            info = infos[other]
            try:
                made = _connection(info, max(deadline - time.monotonic(), 1))
                made.sendall(
                    bytes([rank >> 8, rank & 255]) + _proof(secret, _exactly(made, _NONCE))
                )
            except OSError as error:
                raise RankError(
                    f"{names[other]} cannot be reached at {info.address} port {info.port} "
                    f"({told(error)}); open the network between the hosts, or set MASTER_ADDR to "
                    "an address by which they reach each other",
                    rank=other,
                ) from error
            found[other] = made
        with _Acceptor(listeners, secret) as door:
            while len(found) < len(infos) - 1:
                raise_held()
                if time.monotonic() > deadline:
                    late = next(r for r in range(len(infos)) if r != rank and r not in found)
                    raise RankError(f"{names[late]} did not connect in time", rank=late)
                for other, made in door.admitted():
                    if rank < other < len(infos) and other not in found:
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


def local_listener() -> socket.socket | None:
    """A socket for connections inside of this host, under a name that nobody else has."""
    if sys.platform != "linux":  # the only one on which a name needs no file
        return None
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0fxpipe-{secrets.token_hex(16)}")
    return made


def _connection(info: RankInfo, timeout: float) -> socket.socket:
    """A connection to another rank, if it can be one inside of this host."""
    if info.local and sys.platform == "linux":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout)
        try:
            made.connect(f"\0{info.local}")
            return made
        except OSError:  # it is on another host
            made.close()
    made = socket.create_connection((info.address, info.port), timeout)
    made.settimeout(timeout)
    return made


class _Acceptor:
    """Lets in who proves to be a rank. Strangers, even silent ones, keep nobody waiting."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes) -> None:
        self._secret = secret
        self._said: dict[socket.socket, bytes] = {}
        self._asked: dict[socket.socket, bytes] = {}
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        for each in listeners:
            self._selector.register(each, selectors.EVENT_READ)

    def __enter__(self) -> _Acceptor:
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
            part = made.recv(2 + PROOF - len(self._said[made]))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        said = self._said[made] = self._said[made] + part
        if part and len(said) < 2 + PROOF:
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


def address_here() -> tuple[str, str]:
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
