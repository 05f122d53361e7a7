"""Train in many settings drawn at random, on simulated devices and on CPU devices, and compare.

    python -m tests.simcuda.nightly 1000 [seed]

makes so many runs, ten in each setting, one after another; the seed of the first setting is 0 or
the given one. It prints what is wrong with each, and in the end how often it met what, and what
never. Ends with 1 if anything was wrong.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter

from tests.simcuda.drawn import EXTRAS, INPUTS, OPTIONS, SCHEDULES, SUMMED, draw, wrong
from tests.simcuda.training import MODELS

RUNS = 10
"""A setting: they share what is compiled."""


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start, bad, refused, made, met = time.monotonic(), 0, 0, 0, Counter[str]()
    for seed in itertools.count(first):
        if made >= count:
            break
        problems = wrong(seed, RUNS)
        if problems is None:
            refused += 1
            continue
        made += RUNS
        met.update(draw(seed).parts)
        bad += bool(problems)
        for problem in problems:
            print(problem, flush=True)
    took = (time.monotonic() - start) / made
    print(f"{made} runs in {made // RUNS} settings, {bad} wrong; {refused} settings refused")
    print(f"{took:.1f} s a run")
    print(", ".join(f"{part} {times}" for part, times in met.most_common()))
    every = (*SCHEDULES, *MODELS, *OPTIONS, *SUMMED, *EXTRAS, *INPUTS)
    never = [part for part in every if not met[part]]
    print(f"never met: {', '.join(never) or 'nothing'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
