"""Load and save the weights of a pipe as the hub has them; each process its own stages alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CheckpointError, InputError, told
from fxpipe.extensions.hub.files import INDEX, SINGLE, STEMS, entries, few, loaded
from fxpipe.extensions.hub.names import Shape, as_stored, sources
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.part import state_in_part


@locked
def load_hub(
    pipe: Pipeline, folder: str | os.PathLike[str], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load the weights of a folder of the hub: safetensors in one file, or in several with an
    index. Flushes first.

    A process reads the tensors of its own stages alone, and a model that was built on the meta
    device gets its memory here. Everything is checked by the headers of the files before anything
    changes. A tied weight may have any of its names. A model of transformers takes what its
    ``from_pretrained`` takes: tensors under other names, with or without the base model's prefix,
    and those that it puts together, such as the weights of experts.

    Args:
        folder: a folder as ``save_pretrained`` or the hub's download makes it.
        strict: whether the folder must have all tensors of the model and no others. Else, tensors
            that it lacks, such as those of a new head, stay as they are.

    Returns:
        The names that the folder lacks, and those that the model has not; empty with ``strict``.

    Raises:
        CheckpointError: a file is missing or damaged, lies outside of the folder, or the tensors
            are those of another model. Nothing has changed, on any rank.
        InputError: a buffer without data stands in no state dict; or the model was built on the
            meta device and nothing is compiled yet; or safetensors is not installed.
    """
    with pipe._group.calling("load_hub"):
        if pipe._options.hollow:
            pipe._used()  # raises before anything is read
        model, found = pipe._model, entries(Path(folder))
        with state_in_part():
            state = model.state_dict(keep_vars=True)
        held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        _refuse_lost_buffers(model, held)
        every = [(each, each.shapes(found, model)) for each in sources(model, found, held)]
        shapes = {name: shape for _, made in every for name, shape in made.items()}
        matched = _matched(pipe, held, shapes, Path(folder))
        lacking = sorted(held.keys() - matched.keys())
        unknown = sorted(shapes.keys() - held.keys())
        if strict:
            _refuse_others(pipe, Path(folder), lacking, unknown)
        if (own := pipe._owned()) is not None:
            there = {n for n, value in held.items() if own.names.get(id(value)) in own.used}
            matched = {name: of for name, of in matched.items() if name in there}
        pipe._group.exchange("weights of the hub")  # every rank has found all that it needs
        needed = [each for each, made in every if not made.keys().isdisjoint(matched.values())]
        read = dict(loaded(found, (name for each in needed for name in each.names)))
        values: dict[str, Tensor] = {}
        for each in needed:
            values |= each.made({name: read.pop(name) for name in each.names}, model)
        state = {name: values[of] for name, of in matched.items()}
        pipe.load_state_dict(state, strict=strict)
        return lacking, unknown


def _refuse_lost_buffers(model: nn.Module, held: Mapping[str, Any]) -> None:
    """Raise InputError if a buffer has no data and stands in no state dict."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in held:
            raise InputError(
                f"the buffer {name!r} stands in no state dict, so that no checkpoint has it, and "
                "has no data; build the model with its buffers: with "
                "accelerate.init_empty_weights(include_buffers=False): model = ..."
            )


def _matched(
    pipe: Pipeline, held: Mapping[str, Any], shapes: Mapping[str, Shape], folder: Path
) -> dict[str, str]:
    """Name in the model's state dict → the name of the same tensor that the folder has, if it has
    it. Raises CheckpointError if it has another shape."""
    by_tensor: dict[int, str] = {}
    for name, value in held.items():
        if name in shapes:
            by_tensor.setdefault(id(value), name)
    matched = {name: by_tensor.get(id(value), "") for name, value in held.items()}
    matched |= {name: name for name in held.keys() & shapes.keys()}
    for name, at in matched.items():
        if at and shapes[at] != (whole := tuple(pipe._group.shown(name, held[name]).shape)):
            raise CheckpointError(
                f"{at!r} has the shape {shapes[at]} in {folder}, and {whole} in "
                f"{type(pipe._model).__name__}; it is of a model of another size"
            )
    return {name: at for name, at in matched.items() if at}


def _refuse_others(
    pipe: Pipeline, folder: Path, lacking: Sequence[str], unknown: Sequence[str]
) -> None:
    """Raise CheckpointError if there are such names."""
    kind, cure = type(pipe._model).__name__, "or load what fits: load_hub(folder, strict=False)"
    if lacking:
        raise CheckpointError(
            f"{folder} has no {few(lacking)}, which {kind} needs; it is of another model, {cure}"
        )
    if unknown:
        raise CheckpointError(
            f"{folder} has {few(unknown)}, which {kind} has not; it is of another model, {cure}"
        )


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
        parts = _parted(as_stored(pipe._model, _own_tensors(pipe)), most)
        counts = [int(count) for count in group.exchange("files", len(parts))]
        total, first = sum(counts), sum(counts[: group.rank])
        stem = STEMS[hasattr(pipe._model, "save_config")]  # as diffusers has it
        names = [_name(stem, first + at, total) for at in range(len(parts))]
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
            _finish(path, stem, files, sum(bytes_ for _, bytes_ in said))
            if config:
                _configure(pipe._model, path)
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


def _name(stem: str, index: int, total: int) -> str:
    part = f"{stem}-{index + 1:05d}-of-{total:05d}"
    return SINGLE.format(stem if total == 1 else part)


def _finish(path: Path, stem: str, files: Mapping[str, str], size: int) -> None:
    """Write the index, and drop the files of earlier weights."""
    there = path / INDEX.format(stem)
    try:
        several = len({*files.values()}) > 1
        if several:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
            part = there.with_name(f"{there.name}.part")
            part.write_text(json.dumps(index, indent=2) + "\n")
            os.replace(part, there)
        kept = {*files.values(), there.name} if several else {*files.values()}
        for old in [*path.glob(SINGLE.format(f"{stem}*")), there]:
            if old.name not in kept:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({told(error)})") from error


def _configure(model: Any, path: Path) -> None:
    """Write the model's configuration, if it has one."""
    try:
        if hasattr(model, "save_config"):
            model.save_config(path)
        elif hasattr(getattr(model, "config", None), "save_pretrained"):
            model.config.save_pretrained(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({told(error)})") from error
