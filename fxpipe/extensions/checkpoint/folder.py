"""A checkpoint as a folder of torch.distributed.checkpoint (DCP), written by many processes.

Every tensor has a path that does not depend on the process that wrote it, so any process can read
the tensors it needs. Everything else is in a header, one per process that wrote a part; it names
the tensors and has their checksums.

    model                    name → parameter or persistent buffer, as in the model's state dict
    buffers, gradients       name → another buffer, or ``.grad``
    optimizer                name → key → the optimizer's state for the parameter
    older                    version → name → value
    random, device_random    states of generators
    groups, extra            tensors among the optimizers' settings and the user's own values
    fxpipe                   number of the process → its header, written by ``torch.save``

The steps are those of DCP's ``save`` and ``load``, but between them processes talk over the pipe's
own group, so that all learn of a failure in one; and no code in the folder's pickles is run."""

from __future__ import annotations

import functools
import os
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map_only

from fxpipe.errors import CheckpointError, told
from fxpipe.extensions.checkpoint.content import (
    EVERYTHING,
    Checkpoint,
    as_held,
    decode,
    encode,
    in_plain_form,
    refuse_others,
    unpickled,
)
from fxpipe.extensions.checkpoint.replacing import replacing, standing
from fxpipe.runtime.group import Group

FORMAT = 4
"""The format that this version writes and reads."""

_SHARED = ("parameters", "buffers", "gradients", "history", "optimizer")
"""The attributes of which each process writes a part. The first process writes all others."""

METADATA = ".metadata"
"""DCP's file with the name and the place of everything in a folder."""

_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""What the pickle of a folder's metadata may name, besides data types and the classes of DCP's
module for metadata."""

Folder = str | os.PathLike[str]


def write(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    path: Folder,
    group: Group,
    apart: Collection[str] = (),
    *,
    shared: bool = False,
    dealt: bool = False,
) -> None:
    """Write a folder; an older one is replaced only once the new one is complete.

    Args:
        checkpoint: this process's part of the checkpoint.
        state: this process's part of the model's state dict.
        path: the folder, which all processes can reach.
        group: the processes; each of them calls this inside of ``calling``. Those of the first
            replica write everything, the others only the states that it has not.
        apart: the names of parameters that hold something else than the model's state dict has.
        shared: see ``replacing``; that of rank 0 counts.
        dealt: whether each replica has parameters of its own, which it writes.

    Raises:
        CheckpointError: the folder cannot hold a value, or cannot be written. An older folder stays
            as it is.
    """
    with naming(path):
        tensors = Tensors(checkpoint, state, path, group, apart, dealt)
        values = tensors.sealed(tree_map_only(Tensor, Tensor.cpu, tensors.nested))
        with ExitStack() as stack:
            writer = Writer(begun(stack, path, group, shared))
            written = failure = None
            try:
                if values:
                    written = writer.write(values, group.rank)
            except (OSError, ValueError, RuntimeError) as error:
                failure = error  # rank 0 must not remove the folder while others write to it
            files = group.exchange("files", (written, failure is not None))
            if failed := [rank for rank, (_, failing) in enumerate(files) if failing]:
                if failure is not None and failed[0] == group.rank:
                    raise failure
                group.exchange("what has failed")  # raises what the first of them does
            if group.rank == 0:
                writer.complete([part for part, _ in files if part is not None])
        group.exchange("checkpoint", None)  # return only once the folder is in place


@contextmanager
def naming(path: Folder) -> Iterator[None]:
    """Inside, what fails raises CheckpointError, which names the folder."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {why}") from error


def begun(stack: ExitStack, path: Folder, group: Group, shared: bool) -> str:
    """Where to write a folder, for all processes. On rank 0, it is in place once ``stack`` is
    closed. Raises OSError."""
    unfinished = None
    if group.rank == 0:
        _refuse_others(path)
        unfinished = str(stack.enter_context(replacing(path, folder=True, shared=shared)))
    place: str = group.exchange("folder", unfinished)[0]
    return place


def _refuse_several(places: Sequence[str]) -> None:
    """Raises CheckpointError, the same on all ranks, unless they were given one folder."""
    for rank, place in enumerate(places):
        if place != places[0]:
            raise CheckpointError(
                f"cannot write the checkpoint: rank {rank} was given the folder {place!r}, and "
                f"rank 0 {places[0]!r}; give all ranks the same folder, which all of them reach"
            )


def _refuse_others(path: Folder) -> None:
    """Raises OSError if replacing a folder would remove more than a checkpoint."""
    folder = Path(os.path.realpath(path))
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.name != METADATA and file.suffix != ".distcp":
            raise OSError(
                f"it holds {file.name!r}, which is no part of a checkpoint; give a folder of its "
                "own"
            )


class Tensors:
    """The tensors that a process writes to a folder, and a header with everything else.

    Attributes:
        nested: path → tensor, as nested dicts; empty if this process writes nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: Mapping[str, Any],
        path: Folder,
        group: Group,
        apart: Collection[str],
        dealt: bool,
    ) -> None:
        """Collect them, on all processes of the group; see ``write``. Raises CheckpointError if the
        folder cannot hold a value."""
        optimizer, parts = checkpoint.optimizer, _SHARED if group.rank else EVERYTHING
        states = {} if optimizer is None else optimizer.parameters
        stated = {name for name, kept in states.items() if kept.state}
        said = group.exchange("states", (os.path.realpath(path), stated))
        _refuse_several([place for place, _ in said])
        own = stated.difference(*(known for _, known in said[: group.rank]))
        spare = group.column > 0 or (group.replica and not dealt)
        if (group.replica or group.column) and optimizer is not None:
            optimizer = replace(optimizer, parameters={name: states[name] for name in own})
            checkpoint = replace(checkpoint, optimizer=optimizer)
            parts = ("optimizer",) if spare else ("parameters", "optimizer")
        self.nested: dict[str, Any] = {}
        self._state = {} if spare else state
        self._apart = apart
        self._rank = str(group.rank)
        self._places: dict[str, tuple[str, ...]] = {}  # name → its path, of those with checksums
        self._content: Any = None
        if spare and not own:
            return
        self._content = encode(checkpoint, self._add, parts)
        for name, value in self._state.items():  # tied parameters under their other names, too
            dense = isinstance(value, Tensor) and value.layout is torch.strided
            if dense and f"model.{name}" not in self._places:
                self._put(("model", name), value.detach())

    def sealed(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of ``nested`` on the CPU, with the header, which has their checksums."""
        if self._content is None:
            return {}
        sums = {}
        for name, place in self._places.items():
            tensor: Any = functools.reduce(lambda inner, key: inner[key], place, nested)
            sums[name] = checksum(name, tensor)
        header = BytesIO()
        torch.save({"format": FORMAT, "content": self._content, "crc32": sums}, header)
        bytes_ = torch.frombuffer(bytearray(header.getvalue()), dtype=torch.uint8)
        return {**nested, "fxpipe": {self._rank: bytes_}}

    def _add(self, path: tuple[str, ...], tensor: Tensor) -> Tensor:
        """Add a tensor; in the header, its number stands for it. Raises CheckpointError if the
        folder cannot hold it."""
        *place, last = self._place(path)
        while (name := ".".join((*place, last))) in self._places:  # keys with dots or slashes
            last += "'"
        self._places[name] = (*place, last)
        self._put((*place, last), as_held(path, tensor))
        return torch.tensor(len(self._places) - 1)

    def _put(self, place: tuple[str, ...], tensor: Tensor) -> None:
        *outer, last = place
        inner = self.nested
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = tensor

    def _place(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Map a tensor's path in the checkpoint to its path in the folder."""
        match path:
            case ("parameters" | "buffers", name) if name in self._state.keys() - self._apart:
                return "model", name
            case ("optimizer", "parameters", name, "state", *inner):
                return "optimizer", name, "/".join(inner)
            case ("optimizer", "groups", *inner):
                return "groups", self._rank, "/".join(inner)
            case ("history", kind, version, *inner):
                return kind, version, "/".join(inner)
            case (kind, *inner) if inner:
                return kind, "/".join(inner)
        return path


def exists(path: Folder) -> bool:
    """Whether there is a file, or a folder that is not empty, to read a checkpoint from. Raises
    CheckpointError if the path cannot be looked up, as one that is too long."""
    try:
        folder = standing(path)
        return any(folder.iterdir()) if folder.is_dir() else folder.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {str(path)!r}: {error}") from error


def read(path: Folder, own: Collection[str] | None = None) -> Checkpoint:
    """Read a folder; no code in it can run.

    Args:
        path: the folder.
        own: the names of the parameters and buffers whose tensors are read; None for all. Tensors
            of others are returned on the meta device.

    Raises:
        CheckpointError: there is no such folder, or it is incomplete, damaged, no checkpoint, or in
            a newer format.
    """
    shown, folder = repr(str(path)), standing(path)
    if not (folder / METADATA).exists():
        hint = "; pipe.restore() reads the files of pipe.checkpoint()" if folder.is_file() else ""
        raise CheckpointError(
            f"cannot read the checkpoint {shown}: it is no folder with a file {METADATA!r}, as "
            f"pipe.save() writes it{hint}"
        )
    try:
        reader = Reader(folder)
        places = reader.places
        headers = [name for name in reader.tensors if places[name][0] == "fxpipe"]
        if not headers:
            raise CheckpointError(
                f"{shown} was not written by pipe.save(); read it with torch.distributed.checkpoint"
                " and load the model's state dict with pipe.load_state_dict()"
            )
        parts = []
        for _, header in sorted(reader.read(headers).items()):
            parts.append(unpickled(BytesIO(header.numpy().tobytes())))
            refuse_others(parts[-1]["format"], FORMAT, shown)
        sums: dict[str, int] = {}
        for part in parts:
            sums |= part["crc32"]
        kept = {None} if own is None else {None, *own}
        wanted = [name for name in sums if own is None or _owner(places[name]) in kept]
        tensors = reader.read(wanted)
        for name, tensor in tensors.items():
            if sums[name] != checksum(name, tensor):
                raise ValueError(f"the checksum of {name!r} is another")
        tensors |= {n: reader.empty(n, "meta") for n in sums if n not in tensors}
        return decode(functools.reduce(_joined, (_filled(part, tensors) for part in parts)))
    except CheckpointError:
        raise
    except Exception as error:  # torch raises all kinds of errors if a file is damaged
        raise CheckpointError(
            f"{shown} is damaged, or not all of a checkpoint ({told(error)}); load an older one"
        ) from error


def _filled(part: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The content of a header, with tensors in place of their numbers."""
    names = [*part["crc32"]]
    return in_plain_form(part["content"], lambda _, number: tensors[names[int(number)]])


def _joined(a: Any, b: Any) -> Any:
    """Join what two processes have of a value; if both have it, return the first one's."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {**a, **b, **{key: _joined(a[key], b[key]) for key in a if key in b}}
    return b if isinstance(a, list) and not a else a


def checksum(name: str, tensor: Tensor) -> int:
    """The CRC-32 of a dense tensor with its name, dtype and shape. It is certain to detect a few
    flipped bits."""
    head = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data, head)


def _owner(place: tuple[str, ...]) -> str | None:
    """The name of the parameter or buffer that a tensor in a folder belongs to, if any."""
    match place:
        case ("model" | "parameters" | "buffers" | "gradients" | "optimizer", name, *_):
            return name
        case ("older", _, name):
            return name
    return None


class Writer(FileSystemWriter):
    """Writes a folder, each process a part of it."""

    def write(self, values: dict[str, Any], rank: int) -> Tensor:
        """Write the part of this process, and sync it to disk.

        Args:
            values: tensors and strings in nested dicts, whose keys make their paths.
            rank: the number of this process.

        Returns:
            The metadata of the part, for ``complete``.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(values, is_coordinator=True)
        self.set_up_storage_writer(True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        (plan,), metadata = planner.create_global_plan([plan])
        plan = self.prepare_global_plan([*([SavePlan([])] * rank), plan])[rank]
        plan = planner.finish_plan(plan)
        results = self.write_data(plan, planner).wait()
        metadata.storage_data = {result.index: result.storage_data for result in results}
        return torch.frombuffer(bytearray(pickle.dumps(metadata)), dtype=torch.uint8)

    def complete(self, parts: Sequence[Tensor]) -> None:
        """Write the metadata of all files, joined from what ``write`` returned in each process,
        this one first. Raises OSError if a file is missing, or cannot be written."""
        whole = Metadata({}, planner_data={})
        results: list[WriteResult] = []
        for part in parts:
            metadata: Metadata = _Unpickler(BytesIO(part.numpy().tobytes())).load()
            whole.state_dict_metadata |= metadata.state_dict_metadata
            whole.planner_data |= metadata.planner_data
            for index, place in metadata.storage_data.items():
                results.append(WriteResult(index, 0, place))
        self.refuse_missing([result.storage_data.relative_path for result in results])
        self.finish(whole, [results])

    def refuse_missing(self, names: Sequence[str]) -> None:
        """Raise OSError if one of these files is missing, the first of which is this process's."""
        for name in dict.fromkeys(names):
            if not (Path(self.path) / name).exists():
                if name == names[0]:
                    raise OSError(
                        f"{str(self.path)!r}, where it was written, was removed or emptied "
                        "meanwhile; let nothing clear that folder, and save again"
                    )
                raise OSError(
                    f"the file {name!r} of another process is not there; give a folder that all "
                    "of them reach under the same path"
                )

    def storage_meta(self) -> StorageMeta | None:
        """None: DCP's would hold a path object, which another Python may be unable to unpickle."""
        return None


class Reader(FileSystemReader):
    """Reads a folder without running code that may be in its pickles.

    Attributes:
        places: name → its path in the nested dicts that were written.
        tensors: the names of tensors; anything else would be a pickle, and is not read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = self.read_metadata()
        self.places: Mapping[str, tuple[str, ...]] = self._metadata.planner_data
        kinds = self._metadata.state_dict_metadata
        self.tensors = [name for name in kinds if isinstance(kinds[name], TensorStorageMetadata)]
        self.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
            return metadata

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Name → its tensor. Raises ValueError for what is no tensor."""
        values = {name: self.empty(name) for name in names}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        self.read_data(planner.create_local_plan(), planner).wait()
        return values

    def empty(self, name: str, device: str = "cpu") -> Tensor:
        """An uninitialised tensor like the one with this name. Raises ValueError if it is none."""
        kind = self._metadata.state_dict_metadata[name]
        if not isinstance(kind, TensorStorageMetadata):
            raise ValueError(f"{name!r} is no tensor")
        return torch.empty(kind.size, dtype=kind.properties.dtype, device=device)


class _Unpickler(pickle.Unpickler):
    """Makes only objects that a folder's metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):  # in folders that DCP's own writer wrote
            return PurePosixPath
        dcp = Metadata.__module__
        kind = super().find_class(module, name) if module in ("torch", dcp) else None
        own = isinstance(kind, type) and kind.__module__ == dcp
        if own or isinstance(kind, torch.dtype) or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")
