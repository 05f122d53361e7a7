"""The memory allocator of the C library, which holds the tensors of CPU devices.

glibc gives each thread that allocates an arena of its own. Memory that a stage has freed there
serves no other stage, and stays with the process: a transformer of 96 MiB of parameters over two
devices took 300 MiB more than it held. And it returns freed memory to the system, so that each step
faults the same pages in again: a tenth of a small U-Net's step. Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

_SETTINGS = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),  # the greatest that it takes
    "MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30),
}
"""Environment variable → the parameter of glibc's ``mallopt`` (malloc.h) for the same, and its
value: the number of arenas, the bytes of a block that is mapped by itself and returned when it is
freed, and the free bytes at the end of the arena that are returned."""


@functools.cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


@functools.cache
def share_memory() -> None:
    """Let all threads that are started from now on allocate from one arena, which keeps what is
    freed for later, unless an environment variable says otherwise. Arenas that exist stay."""
    library = _glibc()
    for name, setting in _SETTINGS.items():
        if library is not None and name not in os.environ:
            library.mallopt(*setting)


def give_back() -> None:
    """Give memory that is freed back to the system, as after a compilation."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
