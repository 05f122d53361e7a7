"""GPT-2: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.

The smallest of the four has 12 blocks of width 768, and 124 million parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class GPT2(nn.Module):
    """Tokens in, scores of the next token out.

    Args:
        words: in the vocabulary.
        length: the most tokens.
        blocks: how many.
        width: of a token.
        heads: of the attention.
    """

    def __init__(
        self,
        words: int = 50257,
        length: int = 1024,
        blocks: int = 12,
        width: int = 768,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.embed = Embed(words, length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words, bias=False))
        self.head[1].weight = self.embed.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embed(tokens)))
        return scores


class Embed(nn.Module):
    """What a token is, and where it stands."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return x


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        y: Tensor = x + self.think(x)
        return y


def next_words(scores: Tensor, words: Tensor) -> Tensor:
    """The loss: of each token the one that follows it is asked for."""
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())
