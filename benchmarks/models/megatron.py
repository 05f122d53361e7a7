"""GPT as Megatron-LM trained it in 2021: arXiv 2104.04473. Attention as products, no masks, whose
kernels are part of the softmax's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Attention(nn.Module):
    """Attention of heads, as two products around a softmax and a dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(hidden, 3 * hidden)
        self.outputs = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape

        def by_head(y: Tensor) -> Tensor:
            apart = y.view(samples, length, self.heads, -1).transpose(1, 2)
            return apart.reshape(samples * self.heads, length, -1)

        query, key, value = map(by_head, self.inputs(x).chunk(3, -1))
        scores = torch.softmax(torch.bmm(query, key.transpose(1, 2)), -1)
        mixed = torch.bmm(torch.dropout(scores, 0.1, True), value)
        apart = mixed.view(samples, self.heads, length, -1).transpose(1, 2)
        y: Tensor = self.outputs(apart.reshape(samples, length, hidden))
        return y


class Layer(nn.Module):
    """Attention and two products around a GELU, each behind a layer norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.between = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.dropout(self.attention(self.before(x)), 0.1, True)
        return x + torch.dropout(self.mlp(self.between(x)), 0.1, True)


class GPT(nn.Module):
    """A language model; what tensor parallelism divides is ``TENSORS``."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


TENSORS = {
    "embedding": "rows",
    "layers.*.attention": "columns/rows",
    "layers.*.mlp": "columns/rows",
    "head": "columns",
}


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in 32 bits, as Megatron computes it."""
    return cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
