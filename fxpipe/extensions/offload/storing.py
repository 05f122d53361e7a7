"""Offload what stages keep for their backwards or recomputations, and prefetch it.

Only memory that nobody else holds is stored: neither the model nor the caller, and no other value
on the device. Prefetched tensors lie in new memory; those that shared memory share it again.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from fxpipe.extensions.streams.lanes import Lanes
    from fxpipe.ir import instruction as ins
    from fxpipe.ir.value import Buffer
    from fxpipe.runtime.interpreter import Machine


class _Place(NamedTuple):
    """Where a tensor lay: the index of its memory, and the layout in there."""

    memory: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self, memories: Sequence[Tensor]) -> Tensor:
        """The same tensor in new memory."""
        storage = memories[self.memory].untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class Offloaded(NamedTuple):
    """What a stage keeps of a micro-batch, while its memory is elsewhere.

    Attributes:
        values: the values that stay, and a place for each tensor whose memory is elsewhere.
        memory: that memory.
    """

    values: list[Any]
    memory: HostMemory | FileMemory


def store(
    machine: Machine, forward: ins.Forward, batch: int, stored: Sequence[Buffer]
) -> Offloaded:
    """Begin to copy what a forward has kept in these buffers of a batch to memory elsewhere."""
    values = machine.store.values
    mine = [*values[stored[0]], *(values[buffer] for buffer in stored[1:])]
    others = [v for b, v in values.items() if b not in stored or b.kind == "in"]
    held = {0, *map(_memory, _tensors(others))}
    held |= {_memory(t) for t in machine.store.state.values()}
    version = batch + forward.version - forward.batch
    weights, buffers = machine.held(forward.stage, version)
    held |= {_memory(t) for t in (*weights, *buffers)}
    memories: list[Tensor] = []
    numbers: dict[int, int] = {}  # address → index of the memory
    kept: list[Any] = []
    for value in mine:
        if type(value) is not Tensor or not _plain(value) or _memory(value) in held:
            kept.append(value)
            continue
        number = numbers.setdefault(_memory(value), len(memories))
        if number == len(memories):
            storage = value.untyped_storage()
            memories.append(torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage))
        offset = int(value.storage_offset())
        kept.append(_Place(number, value.dtype, value.shape, value.stride(), offset))
    return Offloaded(kept, memory_of(machine, memories))


def fetch(away: Offloaded) -> Offloaded:
    """Begin to copy it back; the values are in new memory."""
    memories = away.memory.fetch()
    values = [x.tensor(memories) if isinstance(x, _Place) else x for x in away.values]
    return Offloaded(values, away.memory)


def memory_of(machine: Machine, memories: list[Tensor]) -> HostMemory | FileMemory:
    """Begin to copy memory out of a device: to the host if it has streams, else to a file."""
    lanes: Lanes | None = getattr(machine, "lanes", None)
    return FileMemory(machine.device, memories) if lanes is None else HostMemory(lanes, memories)


class HostMemory:
    """Memory that streams copy to the host's memory and back."""

    def __init__(self, lanes: Lanes, memories: list[Tensor]) -> None:
        """Begin to copy to the host, on the current stream."""
        self._lanes = lanes
        self._stored = [lanes.take(memory) for memory in memories]

    def wait(self) -> None:
        """Nothing to do: streams wait for the copies by events."""

    def fetch(self) -> list[Tensor]:
        """Begin to copy it back, into new memory."""
        fetched = [self._lanes.put(memory) for memory in self._stored]
        self._stored.clear()
        return fetched


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor))


def _plain(value: Tensor) -> bool:
    """Whether a tensor's memory has its elements as they are."""
    return value.layout is torch.strided and not (value.is_conj() or value.is_neg())


def _memory(value: Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none."""
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else 0


class FileMemory:
    """Memory in an unnamed temporary file, which is gone when the process ends, however it ends.

    The environment variable TMPDIR says on which disk; see Python's ``tempfile``.
    """

    def __init__(self, device: int, memories: list[Tensor]) -> None:
        """Begin to write, in the device's thread for that."""
        self._device = device
        self._sizes = [memory.nbytes for memory in memories]
        self._begin("offload", self._write, memories)

    def wait(self) -> None:
        """Wait until the memory is stored, so that it can be freed, or until it is back. Raises any
        error of writing or reading."""
        self._done.result()

    def fetch(self) -> list[Tensor]:
        """Begin to read it, into new memory."""
        memories = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]
        stored = self._done

        def read(memories: list[Tensor]) -> None:
            stored.result()
            self._read(memories)

        self._begin("prefetch", read, memories)
        return memories

    def _begin(
        self, name: str, job: Callable[[list[Tensor]], None], memories: list[Tensor]
    ) -> None:
        argument = [memories]  # emptied by the job, so that nothing holds the memory afterwards
        key = os.getpid(), name, self._device  # a forked process has no threads of its parent
        if key not in _threads:
            _threads[key] = ThreadPoolExecutor(1, f"fxpipe {name} {self._device}")
        self._done = _threads[key].submit(lambda: job(argument.pop()))

    def _write(self, memories: list[Tensor]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is read
        self._close = weakref.finalize(self, self._file.close)
        for memory in memories:
            self._file.write(memory.numpy().data)
        self._file.seek(0)

    def _read(self, memories: list[Tensor]) -> None:
        for memory in memories:
            if self._file.readinto(memory.numpy().data) < memory.nbytes:
                raise OSError("the file of what a stage has stored has lost some of it")
        self._close()


_threads: dict[tuple[int, str, int], ThreadPoolExecutor] = {}
