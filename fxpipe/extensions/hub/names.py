"""What the tensors of a folder are in a model: transformers stores some under other names, and the
weights of experts one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, InputError, told
from fxpipe.extensions.hub.files import Entry

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Some tensors of a folder, and the tensors of the model that they make.

    Attributes:
        names: in the folder.
        target: in the model; the first one if they make several.
        conversion: makes them in transformers' way, with the pattern of each name; None for one
            tensor that is taken as it is.
    """

    names: tuple[str, ...]
    target: str
    conversion: Any = None
    patterns: Sequence[str] = ()

    def made(self, values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Name in the model → the tensor, made of those in the folder."""
        if self.conversion is None:
            return {self.target: values[self.names[0]]}
        conversion = copy.deepcopy(self.conversion)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            conversion.add_tensor(self.target, name, pattern, values[name])
        made = conversion.convert(self.target, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    def shapes(self, found: Mapping[str, Entry], model: nn.Module) -> dict[str, Shape]:
        """Name in the model → its shape, by the headers of the files alone.

        Raises:
            CheckpointError: the tensors do not go together.
        """
        if self.conversion is None:
            return {self.target: found[self.names[0]].shape}
        values = {name: torch.empty(found[name].shape, device="meta") for name in self.names}
        try:
            return {name: tuple(x.shape) for name, x in self.made(values, model).items()}
        except Exception as error:
            raise CheckpointError(
                f"{self.names[0]!r} and {len(self.names) - 1} more do not make {self.target!r} "
                f"({told(error)}); the folder is of another model"
            ) from error


def sources(
    model: nn.Module, found: Mapping[str, Entry], state: Mapping[str, Any]
) -> Iterator[Source]:
    """What each tensor of a folder is for, in the model with the given state dict: by its name,
    and, for a model of transformers, as its ``from_pretrained`` reads it, which renames tensors,
    puts the base model's prefix before them or takes it away, and leaves some out."""
    transformed = getattr(model, "base_model_prefix", None) is not None
    if not (transformed and hasattr(model, "_keys_to_ignore_on_load_unexpected")):
        yield from (Source((name,), name) for name in found)
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    grouped: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(found, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and name in state:
            target, pattern = name, None
        grouped.setdefault(target, []).append((name, pattern))
    ignored: Any = model._keys_to_ignore_on_load_unexpected
    left_out = [re.compile(each) for each in ignored or ()]
    for target, parts in grouped.items():
        names, patterns = zip(*parts, strict=True)
        if target not in state and any(each.search(target) for each in left_out):
            continue
        yield Source(names, target, by_pattern.get(patterns[0]), patterns)


def as_stored(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model under the names, and in the parts, in which a folder has them.

    Raises:
        InputError: a tensor of the folder is made of several, of which some are elsewhere.
    """
    if not hasattr(model, "_keys_to_ignore_on_load_unexpected"):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    try:
        made = revert_weight_conversion(model, tensors)
    except Exception as error:
        raise InputError(
            f"transformers does not divide the weights of these stages as a folder has them "
            f"({told(error)}); cut between layers: compile(..., partition=[names])"
        ) from error
    return {name: tensor.contiguous() for name, tensor in made.items()}
