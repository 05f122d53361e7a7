"""Load and save the weights of a pipe as the hub has them; each process its own stages alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fxpipe.errors import CheckpointError, InputError, told
from fxpipe.extensions.hub.files import INDEX, SINGLE, Entry, entries, loaded
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.part import state_in_part


@locked
def load_hub(pipe: Pipeline, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a folder of the hub: safetensors in one file, or in several with an
    index. Flushes first.

    A process reads the tensors of its own stages alone, and a model that was built on the meta
    device gets its memory here. Everything is checked by the headers of the files before anything
    changes. A tied weight may have any of its names.

    Args:
        folder: a folder as ``save_pretrained`` or the hub's download makes it.

    Raises:
        CheckpointError: a file is missing or damaged, lies outside of the folder, or the tensors
            are those of another model. Nothing has changed, on any rank.
        InputError: a buffer without data stands in no state dict; or the model was built on the
            meta device and nothing is compiled yet; or safetensors is not installed.
    """
    with pipe._group.calling("load_hub"):
        if pipe._options.hollow:
            pipe._used()  # raises before anything is read
        found = entries(Path(folder))
        stored = _stored(pipe, found, Path(folder))
        own = pipe._owned()
        if own is not None:
            with state_in_part():
                held = pipe._model.state_dict(keep_vars=True)
            stored = {n: s for n, s in stored.items() if own.names.get(id(held[n])) in own.used}
        pipe._group.exchange("weights of the hub")  # every rank has found all that it needs
        pipe.load_state_dict(dict(loaded(found, stored)))


def _stored(pipe: Pipeline, found: Mapping[str, Entry], folder: Path) -> dict[str, str]:
    """Name in the model's state dict → the name in the files."""
    with state_in_part():
        state = pipe._model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, buffer in pipe._model.named_buffers():
        if buffer.is_meta and name not in tensors:
            raise InputError(
                f"the buffer {name!r} stands in no state dict, so that no checkpoint has it, and "
                "has no data; build the model with its buffers: with "
                "accelerate.init_empty_weights(include_buffers=False): model = ..."
            )
    by_tensor: dict[int, str] = {}
    for name, value in tensors.items():
        if name in found:
            by_tensor.setdefault(id(value), name)
    stored: dict[str, str] = {}
    for name, value in tensors.items():
        at = name if name in found else by_tensor.get(id(value))
        kind = type(pipe._model).__name__
        if at is None:
            raise CheckpointError(
                f"{folder} has no {name!r}, which {kind} needs; it is of another model, or its "
                "names have another prefix"
            )
        whole = tuple(pipe._group.shown(name, value).shape)
        if found[at].shape != whole:
            raise CheckpointError(
                f"{at!r} has the shape {found[at].shape} in {found[at].file}, and {whole} in "
                f"{kind}; it is of a model of another size"
            )
        stored[name] = at
    if unknown := sorted(found.keys() - {*stored.values()} - tensors.keys()):
        raise CheckpointError(
            f"{folder} has {unknown[0]!r}, which {type(pipe._model).__name__} has not; it is of "
            "another model"
        )
    return stored


@locked
def save_hub(
    pipe: Pipeline, folder: str | os.PathLike[str], *, most: float = 5e9, config: bool = True
) -> None:
    """Write the weights to a folder as the hub has them, which ``from_pretrained`` reads. Flushes
    first.

    Each process writes its own stages, in files of at most ``most`` bytes, and the first rank the
    index once all are there. A tied weight has the first of its names.

    Args:
        folder: made if it is not there; weights in it are replaced.
        most: the most bytes of a file with several tensors.
        config: whether the model's own ``config`` is written, too, if it has ``save_pretrained``.

    Raises:
        CheckpointError: the folder cannot be written.
        InputError: safetensors is not installed.
        RankError: another rank failed in this way, or is gone.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise InputError(
            "folders of the hub need safetensors, which is not installed: pip install safetensors"
        ) from error
    group, path = pipe._group, Path(folder)
    with group.calling("save_hub"):
        pipe._engine.flush()
        parts = _parted(_own_tensors(pipe), most)
        counts = [int(count) for count in group.exchange("files", len(parts))]
        total, first = sum(counts), sum(counts[: group.rank])
        names = [_name(first + at, total) for at in range(len(parts))]
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name, part in zip(names, parts, strict=True):
                save_file(part, path / f"{name}.part", metadata={"format": "pt"})
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({told(error)})") from error
        own = {x: name for name, part in zip(names, parts, strict=True) for x in part}
        size = sum(x.nbytes for part in parts for x in part.values())
        said = group.exchange("weights of the hub", (own, size))  # all files are whole
        for name in names:
            os.replace(path / f"{name}.part", path / name)
        group.exchange("names of files")
        if not group.rank:
            files = {tensor: file for each, _ in said for tensor, file in each.items()}
            _finish(pipe, path, files, sum(bytes_ for _, bytes_ in said), config)
        group.exchange("the index")


def _own_tensors(pipe: Pipeline) -> dict[str, Tensor]:
    """The tensors that this process writes, on the CPU, each under one name."""
    group, own = pipe._group, pipe._owned()
    with pipe._engine.progress.true_weights(), state_in_part():
        held, state = pipe._model.state_dict(keep_vars=True), pipe._model.state_dict()
        if own is not None:
            state = own.part(pipe._model, state)
        tensors, seen = dict[str, Tensor](), set[int]()
        for name, value in state.items():
            if isinstance(value, Tensor) and id(held[name]) not in seen:
                seen.add(id(held[name]))
                tensors[name] = group.joined(name, value).detach().cpu().contiguous().clone()
    gives = own is None or (not group.column and (own.shared or not group.replica))
    return tensors if gives else {}


def _parted(tensors: Mapping[str, Tensor], most: float) -> list[dict[str, Tensor]]:
    """The tensors, in parts of at most so many bytes if they are several."""
    parts: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not parts or size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def _name(index: int, total: int) -> str:
    return SINGLE if total == 1 else f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def _finish(pipe: Pipeline, path: Path, files: Mapping[str, str], size: int, config: bool) -> None:
    """Write the index and the model's configuration, and drop the files of earlier weights."""
    try:
        several = len({*files.values()}) > 1
        if several:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
            (path / f"{INDEX}.part").write_text(json.dumps(index, indent=2) + "\n")
            os.replace(path / f"{INDEX}.part", path / INDEX)
        kept = {*files.values(), INDEX} if several else {*files.values()}
        for old in [*path.glob("model*.safetensors"), path / INDEX]:
            if old.name not in kept:
                old.unlink(missing_ok=True)
        if config and hasattr(getattr(pipe._model, "config", None), "save_pretrained"):
            pipe._model.config.save_pretrained(path)  # type: ignore[union-attr,operator]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({told(error)})") from error
