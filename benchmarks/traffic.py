"""The bytes that the processes of a pipe send each other in a warm step, beside those of
torch.distributed.pipelining. Run it with ``python -m benchmarks.traffic``, on Linux.

It runs in a network of its own, where nothing else sends, and reads what the loopback interface
counts, with the headers of packets.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import socket
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.machine import describe
from benchmarks.peers.contenders import PIPELINING, RANKS
from benchmarks.peers.group import Group
from benchmarks.report import Figure, Report

CASES = ("unet", "transformer", "tiny")

WARM_UP = 2
"""Steps before bytes are counted."""

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
"""The requests of Linux for the flags of an interface, and the flag that it is up."""


def loopback_up() -> None:
    """Start the loopback interface of a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def sent() -> int:
    """The bytes that the loopback interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = (line.split() for line in lines if line.strip().startswith("lo:"))
    return int(own[9])


def bytes_a_step(contender: str, case: str, steps: int) -> float:
    """The bytes of a step of a contender, in the mean over so many steps."""
    group = Group(contender, case)
    try:
        group.imported()
        group.set_up()
        for _ in range(WARM_UP):
            group.step()
        counts = [sent()]
        for _ in range(steps):
            group.step()
            counts.append(sent())
    finally:
        group.close()
    return mean(after - before for before, after in pairwise(counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--alone", action="store_true", help="already in a network of its own")
    given = parser.parse_args()
    if not given.alone:
        if (unshare := shutil.which("unshare")) is None:
            parser.error("it needs the command unshare, of util-linux")
        again = [sys.executable, "-m", "benchmarks.traffic", "--alone", f"--steps={given.steps}"]
        return subprocess.run([unshare, "--net", "--map-root-user", *again], check=False).returncode
    loopback_up()
    machine = describe()
    figures = []
    for case in CASES:
        peer, own = (bytes_a_step(each, case, given.steps) for each in (PIPELINING, RANKS))
        figures += [
            Figure(f"{case}: {RANKS}", own / 1e3, "kB"),
            Figure(f"{case}: {PIPELINING}", peer / 1e3, "kB"),
            Figure(f"{case}: ratio", own / peer),
        ]
    setting = {
        "bytes": f"sent over loopback in a step, headers included, the mean of {given.steps}",
        "cases": "those of benchmarks.compare",
    }
    Report("traffic", "Bytes between processes in a step", setting, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
