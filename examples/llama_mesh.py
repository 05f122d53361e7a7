"""Train a model like Llama over data, pipeline and tensor parallelism at once, and in one process.

    torchrun --standalone --nproc-per-node=8 -m examples.llama_mesh
    python -m examples.llama_mesh

Eight processes train two replicas of a pipeline of two devices, of which each is two processes with
a half of every matrix. The losses are those of one process, within rounding. Both write and read
the same checkpoint: the second command goes on from where the first has ended.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe

LAYERS, WORDS = 4, 256


def make_model() -> Any:
    """A small Llama with random weights, the same in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide every matrix over a mesh of one dimension, as Megatron-LM does."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        plan |= {f"{at}.{name}": ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
        plan |= {
            f"{at}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        }
    parallelize_module(model, mesh, plan)


def batch(number: int) -> Tensor:
    """The batch of this number: sentences that count."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(WORDS, (16, 1), generator=generator)
    return (first + torch.arange(24)) % WORDS


def train(folder: str, steps: int, shape: tuple[int, int, int]) -> list[float]:
    """Train for some steps, from the checkpoint if there is one, and write one. Returns the
    losses."""
    model, own, devices = make_model(), slice(None), 1
    mesh: DeviceMesh | int = devices
    if "RANK" in os.environ:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
        divide(model, mesh["tp"])
        own = slice(mesh.get_local_rank("dp"), None, shape[0])  # the samples of this replica
    losses: list[float] = []
    with fxpipe.compile(
        model,
        mesh,
        schedule="1f1b",
        microbatches=4,
        partition=[f"model.layers.{LAYERS // 2}"] if "RANK" in os.environ else "auto",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ) as pipe:
        pipe.prepare(input_ids=batch(0)[own], labels=batch(0)[own])
        pipe.load(folder, must_exist=False)
        for _ in range(steps):
            ids = batch(pipe.batches)[own]
            losses.append(pipe.step(input_ids=ids, labels=ids).item())
            if os.environ.get("RANK", "0") == "0":
                print(f"step {pipe.batches}: loss {losses[-1]:.6f}")
        pipe.save(folder)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="llama-mesh", help="where the checkpoint is")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shape", type=int, nargs=3, default=(2, 2, 2), help="dp, pp and tp")
    options = parser.parse_args()
    train(options.folder, options.steps, tuple(options.shape))
