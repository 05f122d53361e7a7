"""A transformer with a mixture of experts, each of which takes as many tokens as it has room for.

Experts choose tokens, not tokens experts: Zhou et al., arXiv 2202.09368. So the shapes do not
depend on values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Each expert takes the tokens of a sequence that score highest with it.

    Args:
        width: of a token.
        hidden: of an expert's inner layer.
        experts: how many.
        capacity: tokens of a sequence for each expert.
    """

    def __init__(self, width: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.widen = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.narrow = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        chances = self.router(x).softmax(-1).transpose(1, 2)  # (batch, experts, length)
        gates, chosen = chances.topk(self.capacity, dim=-1)  # (batch, experts, capacity)
        where = chosen.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        taken = x.gather(1, where).unflatten(1, chosen.shape[1:])
        inner = torch.einsum("becw,ewh->bech", taken, self.widen).relu()
        made = torch.einsum("bech,ehw->becw", inner, self.narrow) * gates[..., None]
        return torch.zeros_like(x).scatter_add(1, where, made.flatten(1, 2))


class Block(nn.Module):
    """Attention, then the experts, each beside a shortcut."""

    def __init__(self, width: int, heads: int, experts: Experts) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.before_experts = nn.LayerNorm(width)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        z: Tensor = x + self.experts(self.before_experts(x))
        return z


class MixtureOfExperts(nn.Module):
    """Tokens in, the scores of each token's label out.

    Args:
        words: of the vocabulary.
        width: of a token.
        layers: how many blocks.
        heads: of the attention.
        experts: of each block.
        capacity: tokens of a sequence for each expert.
    """

    def __init__(
        self,
        words: int,
        width: int,
        *,
        layers: int = 2,
        heads: int = 2,
        experts: int = 4,
        capacity: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, Experts(width, 2 * width, experts, capacity))
                for _ in range(layers)
            )
        )
        self.scores = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.scores(self.blocks(self.embedding(tokens)))
        return y
