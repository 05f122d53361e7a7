"""Keys and values of attention in buffers of the model, which each stage keeps on its device.

A forward gets ``StageCache`` as ``past_key_values``. To PyTorch it is a container of two tensors,
split into micro-batches as any input: the rows of the batch that a micro-batch has, and the
position of its first token. Its layers write into the buffers, and read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fxpipe.errors import InputError, told
from fxpipe.extensions.generation.generate import CURE
from fxpipe.torchtools.state import reparametrized


class Caches(nn.Module):
    """Has the buffers ``keys_0`` and ``values_0`` of layer 0, of shape (rows, heads, length, size),
    while a generation runs. It stays the same object, as graphs refer to it."""

    def __init__(self, states: Sequence[Any], rows: int, length: int) -> None:
        super().__init__()
        self.states, self.rows, self.length = states, rows, length

    def fill(self) -> None:
        """Make the buffers, which take no memory before they are written."""
        for layer, states in enumerate(self.states):
            for name, state in zip(("keys", "values"), states or (), strict=False):
                shape = self.rows, state.shape[1], self.length, state.shape[3]
                self.register_buffer(f"{name}_{layer}", state.new_zeros(shape, device="cpu"), False)


class StageCache(Cache):  # type: ignore[misc]
    """The caches of a micro-batch: its ``rows`` of the batch, and in ``start``, a tensor of one
    element, how many tokens are there. Outside of the model, those of the batch: ``start`` is a
    number, and ``held`` the buffers of this process's stages."""

    is_compileable = True
    is_croppable = False
    is_sliding = ()  # masks hide what a window has left behind

    def __init__(self, caches: Caches, rows: Tensor, start: Any) -> None:
        super().__init__(layers=[])
        self.caches, self.rows, self.start = caches, rows, start
        self.held: Sequence[Tensor] = ()

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; returns those of all, with room behind."""
        at, found = self.start + torch.arange(keys.shape[2], device=keys.device), []
        for name, new in (("keys", keys), ("values", values)):
            held = getattr(self.caches, f"{name}_{layer_idx}")
            # without gradients, as a buffer is written
            held[self.rows[:, None], :, at[None]] = new.detach().transpose(1, 2).to(held.dtype)
            found.append(held[self.rows])
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.caches.length, 0

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.start

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row have the tokens of another, as beams do."""
        for buffer in self.held:
            buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))


pytree.register_pytree_node(
    StageCache,
    lambda cache: ([cache.rows, cache.start], cache.caches),
    lambda leaves, caches: StageCache(caches, *leaves),
    serialized_type_name=f"{__name__}.StageCache",
    flatten_with_keys_fn=lambda cache: (
        [(pytree.GetAttrKey(name), getattr(cache, name)) for name in ("rows", "start")],
        cache.caches,
    ),
)


def states_of(model: Any) -> list[tuple[Tensor, Tensor] | None]:
    """Layer → its keys and values of one token, without data; None where it reads another's. Raises
    InputError if it keeps something else, or the model cannot run without data."""
    named = (*model.named_parameters(), *model.named_buffers())
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        given = {"input_ids": token, "past_key_values": cache, "use_cache": True}
        with reparametrized(model, meta):
            model(**given)
        for kind in {*map(type, cache.layers)} - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise TypeError(f"there is a {kind.__name__}")
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} keeps something else than keys and values of attention, or "
            f"cannot be run without data to see it ({told(error)}); {CURE}"
        ) from error
    return [None if x.keys is None else (x.keys, x.values) for x in cache.layers]
