"""A causal language model whose keys and values stand in buffers, so that its stages own them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fxpipe.errors import InputError

WRITE = torch.ops.aten.index_put.default
"""The operation by which ``_Slots.update`` becomes part of a graph."""


class Decoder(nn.Module):
    """The next-token logits of a batch of sequences, each with a row of every layer's cache.

    A row has a slot for each position, and one more, to which padding is written and which no token
    reads.

    Args:
        model: a causal language model of transformers, such as ``LlamaForCausalLM``.
        rows: how many sequences there are at once.
        length: the most tokens of a sequence.

    Raises:
        InputError: a layer of the model is no attention over all earlier positions.
    """

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        super().__init__()
        config = _config(model)
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if (window is not None and window < length) or kinds - {"sliding_attention"}:
            raise InputError(
                f"{type(model).__name__} has layers that do not attend to all earlier positions "
                f"({', '.join(sorted(kinds)) or f'a window of {window}'}); give length <= the "
                "window, or call model.generate"
            )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        like = next(model.parameters())
        self.model = model
        self.length = length
        self.layers = range(config.num_hidden_layers)
        for layer in self.layers:
            for name in ("keys", "values"):
                cache = like.new_zeros(rows, length + 1, heads, size).detach()
                self.register_buffer(f"{name}_{layer}", cache, persistent=False)

    def forward(self, tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Read the next tokens of some sequences.

        Args:
            tokens: sequences × tokens; int64.
            rows: the row of each sequence.
            positions: sequences × tokens: the position of each token in its sequence; ``length``
                for padding.
            last: sequences: the index in ``tokens`` of each sequence's last one.

        Returns:
            Sequences × vocabulary: the logits of the token that follows.
        """
        cache = _Slots(self._caches("keys"), self._caches("values"), rows, positions)
        slots = torch.arange(self.length + 1, device=tokens.device)
        output = self.model(
            input_ids=tokens,
            position_ids=positions.clamp(max=self.length - 1),
            attention_mask=slots <= positions[:, None, :, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits.take_along_dim(last[:, None, None], 1).squeeze(1)

    def _caches(self, name: str) -> list[Tensor]:
        return [self.get_buffer(f"{name}_{layer}") for layer in self.layers]


class _Slots(Cache):  # type: ignore[misc]
    """What a model of transformers asks for earlier keys and values."""

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Tensor, positions: Tensor
    ) -> None:
        super().__init__(layers=[])
        self._caches = [*zip(keys, values, strict=True)]
        self._rows = rows
        self._at = rows[:, None], positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values (sequences × heads × tokens × size), and return all
        of these sequences."""
        key, value = self._caches[layer_idx]
        key[self._at] = key_states.transpose(1, 2)
        value[self._at] = value_states.transpose(1, 2)
        return key[self._rows].transpose(1, 2), value[self._rows].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, as positions and mask are given to the model and not counted by it."""
        return 0


def _config(model: nn.Module) -> Any:
    """The configuration of a model's text."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"{type(model).__name__} has no configuration of transformers; give a causal language "
            "model of transformers, or call pipe(x) in a loop of your own"
        )
    return config.get_text_config()
