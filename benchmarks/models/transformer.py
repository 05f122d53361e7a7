"""A stack of PyTorch's own transformer layers: Vaswani et al., arXiv 1706.03762."""

from __future__ import annotations

from torch import nn


def transformer(width: int, layers: int, heads: int = 8) -> nn.Sequential:
    """Layers from (batch, length, width) to the same, without dropout."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
    )
