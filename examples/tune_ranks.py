"""Tune a language model of the hub over several processes, of which each reads, trains and writes
its own stages alone.

    torchrun --standalone --nproc-per-node=4 -m examples.tune_ranks FOLDER TUNED

FOLDER has the config and the weights as ``save_pretrained`` or a download leaves them, in one file
or many; ``from_pretrained(TUNED)`` has the tuned model, which here learns to count.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import fxpipe


def train(source: str, target: str, steps: int, devices: DeviceMesh | int) -> list[float]:
    """The losses."""
    config = AutoConfig.from_pretrained(source)
    with init_empty_weights(include_buffers=False):  # no memory for weights yet
        model = AutoModelForCausalLM.from_config(config)
    words = (torch.arange(8)[:, None] + torch.arange(16)) % config.vocab_size
    batch = {"input_ids": words, "labels": words}
    with fxpipe.compile(
        model,
        devices,
        microbatches=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        example=((), batch),
    ) as pipe:
        pipe.load_hub(source)
        losses = [pipe.step(**batch).item() for _ in range(steps)]
        pipe.save_hub(target)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("source", metavar="FOLDER")
    parser.add_argument("target", metavar="TUNED")
    parser.add_argument("--steps", type=int, default=10)
    given, count = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("pp",)) if count > 1 else 1
    losses = train(given.source, given.target, given.steps, mesh)
    if os.environ.get("RANK", "0") == "0":
        print(*(f"step {number}: loss {loss:.6f}" for number, loss in enumerate(losses)), sep="\n")
