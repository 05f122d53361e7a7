"""Llama 3: arXiv 2407.21783. Attention is one operation, and so is the product of the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Gated(torch.autograd.Function):
    """SiLU of the first times the second, of which backward keeps the two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        silu = gate * share
        return gradient * up * (share + silu * (1 - share)), gradient * silu


class Attention(nn.Module):
    """Attention of heads, groups of which share keys and values."""

    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        width = hidden // heads * groups
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, width, bias=False)
        self.value = nn.Linear(hidden, width, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape

        def apart(y: Tensor, heads: int) -> Tensor:
            return y.view(samples, length, heads, -1).transpose(1, 2)

        query = apart(self.query(x), self.heads)
        key, value = (apart(y(x), self.groups) for y in (self.key, self.value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, length, hidden))
        return y


class Mlp(nn.Module):
    """Two products side by side, and one behind them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = Gated.apply(self.gate(x), self.up(x))  # type: ignore[no-untyped-call]
        y: Tensor = self.down(gated)
        return y


class Layer(nn.Module):
    """Attention and gated products, each behind a norm."""

    def __init__(self, hidden: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads, groups), Mlp(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y: Tensor = x + self.mlp(self.between(x))
        return y


class Llama(nn.Module):
    """A language model, by default Llama 3 70B."""

    def __init__(
        self,
        layers: int = 80,
        hidden: int = 8192,
        heads: int = 64,
        groups: int = 8,
        inner: int = 28672,
        vocabulary: int = 128256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, groups, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


TENSORS = {
    "layers.*": "sequence",
    "layers.*.attention": "columns/rows",
    "layers.*.mlp": "columns/rows",
    "embedding": "rows",
    "norm": "sequence",
    "head": "columns",
}
"""How tensor parallelism divides it, with sequence parallelism between."""


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in 32 bits."""
    return cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
