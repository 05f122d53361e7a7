"""Train a small character-level GPT-2 on Python source code.

``plain_gpt2.py`` is an ordinary script for one device; ``piped_gpt2.py`` is the same script over
two devices.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, BATCH, ACCUMULATION, STEPS, WARM_UP, RATE = 32, 4, 4, 12, 3, 3e-3


def rate_at(step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * share))


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups: weight decay for matrices, none for norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def some(data: Tensor, count: int) -> Tensor:
    starts = torch.randint(len(data) - LENGTH, (count,))
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def main() -> None:
    torch.manual_seed(0)
    text = Path(textwrap.__file__).read_text()
    letters = sorted({*text})
    data = torch.tensor([letters.index(letter) for letter in text])
    train, valid = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 3, "n_head": 4}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=len(letters), **shape, **drops, **ends)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    for step in range(STEPS):
        batch = some(train, BATCH * ACCUMULATION)
        optimizer.zero_grad()
        total = torch.zeros(())
        for words in batch.split(BATCH):
            loss = model(input_ids=words, labels=words).loss / ACCUMULATION
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step}: loss {total.item():.6f}, gradient norm {norm:.6f}")
    model.eval()
    words = some(valid, BATCH)
    with torch.no_grad():
        print(f"validation loss {model(input_ids=words, labels=words).loss.item():.4f}")


if __name__ == "__main__":
    main()
