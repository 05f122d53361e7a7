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
        self.layers = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.scores = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.dropout(self.embedding(tokens)))
        y: Tensor = self.scores(self.dropout(hidden))
        return y
