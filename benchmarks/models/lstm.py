"""An LSTM language model: Zaremba et al., arXiv 1409.2329."""

from __future__ import annotations

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Tokens in, the scores of each next token out: (batch, length) → (batch, length, words).

    Args:
        words: of the vocabulary.
        width: of the embedding and of every layer.
        layers: how many.
        dropout: between the layers, and before and after them.
    """

    def __init__(self, words: int, width: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        # one by one, as they may be on stages of their own
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.scores = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            hidden = self.dropout(layer(hidden)[0])
        y: Tensor = self.scores(hidden)
        return y
