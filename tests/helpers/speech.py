"""Small models of speech, and their loss, as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODELS = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert"}
"""Name of the base model in the whole → what the names of its classes begin with."""


def speech(name: str, **options: Any) -> nn.Module:
    """A model in training mode.

    Args:
        name: of MODELS.
        options: of its configuration, such as dropouts.
    """
    import transformers  # slow to import

    config: Any = getattr(transformers, f"{MODELS[name]}Config")
    kind: Any = getattr(transformers, f"{MODELS[name]}ForCTC")
    made: nn.Module = kind(
        config(
            vocab_size=12,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_stride=(3, 2),
            conv_kernel=(5, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            final_dropout=0.0,
            **options,
        )
    )
    return made.train()


def sounds() -> tuple[Tensor, Tensor]:
    """Four sounds, and what is said in them."""
    return torch.randn(4, 200), torch.randint(1, 12, (4, 5))


def ctc(output: Any, labels: Tensor) -> Tensor:
    """The loss of what a model returns for sounds of one length."""
    chances = output.logits.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(labels),), len(chances)), torch.full((len(labels),), labels.shape[1])
    return F.ctc_loss(chances, labels, *lengths)
