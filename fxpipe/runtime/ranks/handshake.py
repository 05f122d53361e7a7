"""Connect each two ranks of a pipe by a socket; they prove to each other that they belong to it."""

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
"""Seconds that ranks may take to connect to each other, once they have met."""

PROOF = 32  # bytes
_NONCE = 16
_POLL = 0.05


class RankInfo(NamedTuple):
    """What a rank tells the others about itself."""

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
    """What a rank knows about the ranks of its pipe; by default there is only this process.

    Attributes:
        rank: this rank's number in the pipe. The first replica's ranks come first, and within a
            replica they are in the order of its devices.
        names: rank → what messages call it, ``rank 1 (host, process 4711)``.
        places: device → what tables call its ranks, ``rank 1, host``, or with two replicas
            ``ranks 1 and 3, host``.
        hosts: rank → the name of its host.
        sockets: other rank → a connection to it.
        threads: intra-op threads of this rank's device: its share of the host's threads, or
            OMP_NUM_THREADS. 0 for the only rank of a pipe.
        timeout: seconds that a rank may be late.
        shared: other rank → the memory shared with it, if any.
        store: a store of torch.distributed that belongs to this pipe.
        devices: rank → the index of its CUDA device on its host; None in a mesh of CPUs.
        replicas: the number of replicas of the pipeline.
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
    """Connect to the lower ranks, and accept the connections of the higher ones.

    Returns:
        Other rank → the connection to it.

    Raises:
        RankError: a rank cannot be reached, or does not connect before the deadline.
    """
    connections: dict[int, socket.socket] = {}
    secret = infos[0].secret
    try:
        for other in range(rank):
            info = infos[other]
            try:
                connection = _connect(info, max(deadline - time.monotonic(), 1))
                proof = _proof(secret, _receive(connection, _NONCE))
                connection.sendall(bytes([rank >> 8, rank & 255]) + proof)
            except OSError as error:
                raise RankError(
                    f"{names[other]} cannot be reached at {info.address} port {info.port} "
                    f"({told(error)}); open the network between the hosts, or set MASTER_ADDR to "
                    "an address by which they reach each other",
                    rank=other,
                ) from error
            connections[other] = connection
        with _Acceptor(listeners, secret) as acceptor:
            while len(connections) < len(infos) - 1:
                raise_held()
                if time.monotonic() > deadline:
                    late = next(r for r in range(len(infos)) if r not in {rank, *connections})
                    raise RankError(f"{names[late]} did not connect in time", rank=late)
                for other, connection in acceptor.admitted():
                    if rank < other < len(infos) and other not in connections:
                        connections[other] = connection
                    else:
                        connection.close()
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    for connection in connections.values():
        connection.settimeout(max(deadline - time.monotonic(), 1))
        if connection.family != LOCAL:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def local_listener() -> socket.socket | None:
    """Return a socket for connections within this host, bound to a fresh random name."""
    if sys.platform != "linux":  # elsewhere the name would be a file
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0fxpipe-{secrets.token_hex(16)}")
    return listener


def _connect(info: RankInfo, timeout: float) -> socket.socket:
    """Connect to another rank: by its local name on the same host, else by its address."""
    if info.local and sys.platform == "linux":
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(timeout)
        try:
            local.connect(f"\0{info.local}")
            return local
        except OSError:  # it is on another host
            local.close()
    return socket.create_connection((info.address, info.port), timeout)


class _Acceptor:
    """Accepts ranks that prove who they are. Strangers, even silent ones, delay nobody."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes) -> None:
        self._secret = secret
        self._answers: dict[socket.socket, bytes] = {}
        self._nonces: dict[socket.socket, bytes] = {}
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Acceptor:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for stranger in self._nonces:
            stranger.close()

    def admitted(self) -> Iterator[tuple[int, socket.socket]]:
        """Wait shortly; yields the ranks that have proven who they are, and their connections."""
        for key, _ in self._selector.select(_POLL):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj in self._listeners:
                self._ask(key.fileobj.accept()[0])
            elif (other := self._read_answer(key.fileobj)) is not None:
                yield other, key.fileobj

    def _ask(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        nonce = self._nonces[connection] = secrets.token_bytes(_NONCE)
        self._answers[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):
            connection.send(nonce)

    def _read_answer(self, connection: socket.socket) -> int | None:
        """Return the rank at the other end if its proof is complete; hang up on a stranger."""
        try:
            part = connection.recv(2 + PROOF - len(self._answers[connection]))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        answer = self._answers[connection] = self._answers[connection] + part
        if part and len(answer) < 2 + PROOF:
            return None
        self._selector.unregister(connection)
        nonce = self._nonces.pop(connection)
        if hmac.compare_digest(answer[2:], _proof(self._secret, nonce)):
            return answer[0] << 8 | answer[1]
        connection.close()
        return None


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionError("the connection was closed")
        received += part
    return received


def address_here() -> tuple[str, str]:
    """Return the address to listen at, and the address by which the others reach it.

    It is the address from which this host reaches MASTER_ADDR. On the host of MASTER_ADDR itself
    this may be a loopback address, such as the 127.0.1.1 that many hosts have for their own name;
    then this rank listens at all addresses, and the others use MASTER_ADDR.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "9"))
    try:
        family, *_, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1", "127.0.0.1"
    if _is_loopback(address) and not _is_loopback(master):
        return "::" if family == socket.AF_INET6 else "0.0.0.0", master
    return address, address


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False  # a name
