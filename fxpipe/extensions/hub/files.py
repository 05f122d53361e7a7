"""Folders of weights as the hub has them: safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.errors import CheckpointError, InputError, told

STEMS = "model", "diffusion_pytorch_model"
"""How the names of files begin: transformers', and diffusers'."""

SINGLE, INDEX = "{}.safetensors", "{}.safetensors.index.json"
"""All weights in one file, or the index of several, after such a beginning."""


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
                f"{folder} has no file {file.name!r}, in which its index has {few(names)}; "
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
                f"{file} lacks {few(lost)}, which the index says it has; download the folder again"
            )
    return found


def loaded(found: Mapping[str, Entry], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of these names, and nothing else of the files."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(found[name].file, []).append(name)
    for file, wanted in by_file.items():
        with safetensors_file(file) as held:
            for name in wanted:
                yield name, held.get_tensor(name)


def _files(folder: Path) -> dict[Path, list[str]]:
    """File → the names in it by the index; none if there is no index."""
    indexes = [folder / INDEX.format(stem) for stem in STEMS]
    index = next((each for each in indexes if each.is_file()), None)
    if index is None:
        for stem in STEMS:
            if (single := folder / SINGLE.format(stem)).is_file():
                return {single: []}
        raise CheckpointError(
            f"{folder} has neither {SINGLE.format(STEMS[0])} nor {INDEX.format(STEMS[0])}; give "
            "the folder of a checkpoint as save_pretrained or the hub's download makes it"
        )
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


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
