"""Train in many settings drawn at random, on simulated devices and on CPU devices, and compare.

    python -m tests.simcuda.nightly 1000 [seed]

takes so many settings, one after another; the seed of the first is 0 or the given one. It prints
what is wrong with each, and in the end how often it met what. Ends with 1 if anything was wrong.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.simcuda.drawn import draw, wrong


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start, bad, refused, met = time.monotonic(), 0, 0, Counter[str]()
    for seed in range(first, first + count):
        problems = wrong(seed)
        if problems is None:
            refused += 1
            continue
        met.update(draw(seed).parts)
        bad += bool(problems)
        for problem in problems:
            print(problem, flush=True)
    took = (time.monotonic() - start) / count
    print(f"{count - refused} settings, {bad} wrong; {refused} refused; {took:.1f} s each")
    print(", ".join(f"{part} {times}" for part, times in met.most_common()))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
