"""Where the processes of a benchmark meet."""

from __future__ import annotations

from socket import create_server


def meeting_place() -> str:
    """A URL for ``init_process_group``. The store behind it is reached by TCP, as under torchrun;
    one in a file is polled, which would count as time of whoever uses it."""
    with create_server(("127.0.0.1", 0)) as free:  # its port, where the first process will listen
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"
