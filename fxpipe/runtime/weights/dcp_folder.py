"""Folders of torch.distributed.checkpoint (DCP), read without running code in their pickles.

The steps are those of its ``save`` and ``load``. Between them, though, processes talk in the pipe's
way, so that what fails in one is known to all.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

METADATA = ".metadata"
"""The file with the names of all that is in a folder, and where."""

_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""The classes and functions that a folder's metadata is made of."""


class Writer(FileSystemWriter):
    """Writes a folder, or the part of one process."""

    def write(self, values: dict[str, Any], rank: int) -> Tensor:
        """Write files, and sync them to disk. The keys of the nested dicts give what is in them a
        path; ``rank`` is the number of this process. Returns what ``complete`` wants to know."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(values, is_coordinator=True)
        self.set_up_storage_writer(True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        (plan,), metadata = planner.create_global_plan([plan])
        plan = self.prepare_global_plan([*([SavePlan([])] * rank), plan])[rank]
        plan = planner.finish_plan(plan)
        made = self.write_data(plan, planner).wait()
        metadata.storage_data = {each.index: each.storage_data for each in made}
        return torch.frombuffer(bytearray(pickle.dumps(metadata)), dtype=torch.uint8)

    def complete(self, parts: Sequence[Tensor]) -> None:
        """Write the metadata of all files, of what ``write`` has returned in each process. Raises
        OSError where a file is missing, or cannot be written."""
        whole = Metadata({}, planner_data={})
        results: list[WriteResult] = []
        for part in parts:
            found: Metadata = _Unpickler(BytesIO(part.numpy().tobytes())).load()
            whole.state_dict_metadata |= found.state_dict_metadata
            whole.planner_data |= found.planner_data
            for index, place in found.storage_data.items():
                results.append(WriteResult(index, 0, place))
        for name in {each.storage_data.relative_path for each in results}:
            if not (Path(self.path) / name).exists():
                raise OSError(
                    f"the file {name!r} of another process is not there; give a folder that all "
                    "of them reach under the same path"
                )
        self.finish(whole, [results])

    def storage_meta(self) -> StorageMeta | None:
        """None, as it would have a path, which another version of Python may be unable to read."""
        return None


class Reader(FileSystemReader):
    """Reads a folder without running code that may be in its pickles.

    Attributes:
        places: name → its path in the nested dicts that were written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = self.read_metadata()
        self.places: Mapping[str, tuple[str, ...]] = self._metadata.planner_data
        self.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
            return metadata

    def read(self, names: Collection[str]) -> dict[str, Any]:
        """Name → what is under it: tensors, and other values."""
        made = {name: self.empty(name) for name in names}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(made, self._metadata, is_coordinator=True)
        self.read_data(planner.create_local_plan(), planner).wait()
        return made

    def empty(self, name: str, device: str = "cpu") -> Any:
        """A tensor like the one under a name; None where there is none."""
        kind = self._metadata.state_dict_metadata[name]
        if not isinstance(kind, TensorStorageMetadata):
            return None
        return torch.empty(kind.size, dtype=kind.properties.dtype, device=device)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = torch.load(value, weights_only=True)


class _Unpickler(pickle.Unpickler):
    """Makes only what a folder's metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):  # where others have written it
            return PurePosixPath
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype) or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")
