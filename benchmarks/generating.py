"""Time generation over two devices beside the model's own ``generate``, both with two threads.

    python -m benchmarks.generating

All take turns, and the medians over the rounds are stored.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report

WIDTH, LAYERS, WORDS, PROMPT, MOST, ROWS = 384, 8, 2000, 16, 48, 8
OWN = "model.generate"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    machine = describe()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=128,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=8,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    prompts = torch.randint(2, WORDS, (ROWS, PROMPT))
    torch.set_num_threads(1)
    generators = [
        fxpipe.Generator(
            copy.deepcopy(model),
            devices=2,
            rows=ROWS,
            length=PROMPT + MOST,
            chunk=PROMPT,
            microbatches=microbatches,
        )
        for microbatches in (2, 4)
    ]

    def own() -> None:
        torch.set_num_threads(2)
        model.generate(prompts, max_new_tokens=MOST, do_sample=False)
        torch.set_num_threads(1)

    contestants: dict[str, Callable[[], object]] = {
        OWN: own,
        "fxpipe, 2 micro-batches": lambda: generators[0].generate(prompts, MOST),
        "fxpipe, 4 micro-batches": lambda: generators[1].generate(prompts, MOST),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(options.rounds + 1):
        for name in random.sample(list(contestants), len(contestants)):
            begin = time.perf_counter()
            contestants[name]()
            if round_:  # the first compiles
                seconds[name].append(time.perf_counter() - begin)
    rates = {name: ROWS * MOST / median(times) for name, times in seconds.items()}
    Report(
        name="generating",
        title="Generation over two CPU devices, beside model.generate",
        settings={
            "model": f"GPT-2, {LAYERS} layers of width {WIDTH}, {WORDS} words",
            "prompts": f"{ROWS} of {PROMPT} tokens",
            "generated": f"{MOST} tokens each, the most likely ones",
            "threads": "2: model.generate has both, fxpipe one a device",
            "rounds": options.rounds,
        },
        figures=[
            *(Figure(name, rate, "tokens/s") for name, rate in rates.items()),
            *(
                Figure(f"{name}, over {OWN}", rate / rates[OWN])
                for name, rate in rates.items()
                if name != OWN
            ),
        ],
        machine=machine,
        samples=seconds,
    ).publish()
    for generator in generators:
        generator.close()


if __name__ == "__main__":
    main()
