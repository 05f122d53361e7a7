"""Folders of weights as the hub has them: safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.errors import CheckpointError, InputError, told

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor of a folder: the file that has it, and its shape."""

    file: Path
    shape: tuple[int, ...]


def safetensors_file(file: Path) -> Any:
    """A file of safetensors. Raises InputError if the package is not installed."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError(
            "folders of the hub need safetensors, which is not installed: pip install safetensors"
        ) from error
    return safe_open(file, framework="pt")


def entries(folder: Path) -> dict[str, Entry]:
    """Name → the tensor of this name, from the headers of the files alone.

    Raises:
        CheckpointError: there is no such folder, or a file is missing or damaged, or lies outside.
    """
    found: dict[str, Entry] = {}
    for file, names in _files(folder).items():
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no file {file.name!r}, in which its index has {_few(names)}; "
                "download the folder again"
            )
        try:
            with safetensors_file(file) as held:
                known = set(held.keys())
                for name in names or known:
                    if name in known:
                        found[name] = Entry(file, tuple(held.get_slice(name).get_shape()))
        except InputError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file} is damaged, or no file of safetensors ({told(error)}); download it again"
            ) from error
        if lost := [name for name in names if name not in found]:
            raise CheckpointError(
                f"{file} lacks {_few(lost)}, which the index says it has; download the folder again"
            )
    return found


def loaded(found: Mapping[str, Entry], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Read tensors: name → the name that it has in the files. Reads nothing else of the files."""
    by_file: dict[Path, list[str]] = {}
    for name, stored in names.items():
        by_file.setdefault(found[stored].file, []).append(name)
    for file, wanted in by_file.items():
        with safetensors_file(file) as held:
            for name in wanted:
                yield name, held.get_tensor(names[name])


def _files(folder: Path) -> dict[Path, list[str]]:
    """File → the names in it by the index; none if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a checkpoint as "
                "save_pretrained or the hub's download makes it"
            )
        return {folder / SINGLE: []}
    try:
        known = json.loads(index.read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in known.items()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of weights ({told(error)})") from error
    files: dict[Path, list[str]] = {}
    for name, file in pairs:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} has {name!r} in {file!r}, which is no file of safetensors in that "
                "folder; nothing was read"
            )
        files.setdefault(folder / file, []).append(name)
    return files


def _few(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
