"""Plan the training of Llama 3 70B on H100 that are not here, in 8 bits, with 128 samples of 8192
tokens for 64 of them.

NVIDIA's own recipe for 64 H100 is dp 2 × tp 4 × pp 8. Run it with ``python -m
benchmarks.planning``; ``--hosts 512`` plans for 4,096.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch

import fxpipe
from benchmarks.models.llama import TENSORS, Llama, loss
from fxpipe.extensions.paper.presets import H100

EFFICIENCY = 0.5
"""Of products in 8 bits."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8, help="of eight devices each")
    given = parser.parse_args()
    with torch.device("meta"):
        model, tokens = Llama().bfloat16(), torch.zeros(1, 8192, dtype=torch.long)
    device = replace(H100, flops=1978.9e12, efficiency=EFFICIENCY)
    cluster = fxpipe.Cluster(fxpipe.Cluster(device, 8), given.hosts)
    start = time.process_time()
    found = fxpipe.plan(
        model,
        cluster,
        batch=16 * given.hosts,
        example=((tokens,), {"target": tokens}),
        loss=loss,
        tensors=TENSORS,
        optimizer=torch.optim.AdamW,
        held=(4, 12),
    )
    print(found)
    print(f"{cluster.devices} devices, {time.process_time() - start:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
