"""A small model like Llama, and ways to divide it; losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, WORDS = 4, 16, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        made = (f(x).view(b, s, -1, WIDTH // HEADS) for f in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in made)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(b, s, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, hidden, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp(hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        out: Tensor = x + self.mlp(self.n2(x))
        return out


class Llama(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 24, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(hidden, bias) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def made(**how: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(**how)


def plan_of(layers: int, parts: Sequence[str]) -> dict[str, Any]:
    """A plan for ``parallelize_module``: which parts of a model are divided."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    plan: dict[str, Any] = {}
    for i in range(layers):
        at = f"layers.{i}"
        if "attention" in parts:
            plan |= {f"{at}.attention.{name}": ColwiseParallel() for name in "qkv"}
            plan[f"{at}.attention.o"] = RowwiseParallel()
        if "mlp" in parts:
            plan |= {f"{at}.mlp.{name}": ColwiseParallel() for name in ("w1", "w3")}
            plan[f"{at}.mlp.w2"] = RowwiseParallel()
        if "sequence" in parts:  # the sequence is divided from the embedding to the head
            whole = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan |= {f"{at}.n1": SequenceParallel(), f"{at}.n2": SequenceParallel()}
            plan |= {f"{at}.attention": whole, f"{at}.mlp": whole}
            for name in ("attention.o", "mlp.w2"):
                plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    if "embed" in parts:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if "sequence" in parts:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    elif "head" in parts:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def data(samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (2, samples, 6), generator=generator)
    return ids[0], ids[1]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


Results = Mapping[str, Any]


def looped(
    model: nn.Module,
    steps: int = 2,
    microbatches: int = 4,
    clip: float | None = None,
    same: Tensor | None = None,
) -> dict[str, Tensor]:
    """Losses, weights and buffers of plain loops in one process, without any mesh, on ``data()`` or
    to give back the ``same``."""
    (x, y), by = (data(), loss) if same is None else ((same, same), F.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        total = x.new_zeros((), dtype=torch.double)
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            each = by(model(a), b) / microbatches
            each.backward()
            total += each.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found[f"loss {step}"] = total
    held = (*model.named_parameters(), *model.named_buffers())
    return found | {name: tensor.detach().clone() for name, tensor in held}


def near(found: Results, expected: Results, name: str) -> None:
    """Check that values are within 1e-6 of others, relative to the largest of each."""
    for key, value in expected.items():
        error = (found[key] - value).abs().max() / value.abs().max()
        assert error < 1e-6, f"{name}: {key} differs by {error}"
