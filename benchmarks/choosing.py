"""Compare what ``schedule="auto"`` chooses with the best of all candidates, by running them.

Each case is a model with a batch, with and without a limit on memory over two CPU devices. For
each placement of stages, the stages that "auto" cuts the model into run all schedules with a flush,
with all powers of two as numbers of micro-batches. With a limit, the stages of each device keep,
recompute, offload, or do both; of those that fit, what does more than another one that fits is left
out. Candidates that are predicted to be far slower than others, or cannot fit by their bounds, are
not run. The fastest then take turns with the choice, in a pipe of its own.

Steps run, and the processor times of their tasks are put together as if each device had a processor
to itself, so that other load on the machine changes little. What threads wait for each other beyond
that is missing.

The time to decide is the processor time until the first step can run, beyond that of the same pipe
with the choice given.

Run it with ``python -m benchmarks.choosing``. ``--choose FILE`` only writes the choices to a file;
``--before FILE`` adds the choices that another version has written.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import inf
from pathlib import Path
from statistics import median
from time import process_time, thread_time_ns
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet
from benchmarks.report import Figure, Grid, Report, timed
from fxpipe.extend import _REGISTRY
from fxpipe.extensions.planner.auto import auto_schedule
from fxpipe.extensions.planner.bounds import Modes
from fxpipe.extensions.planner.candidates import Candidate, library_over
from fxpipe.extensions.planner.stages import FAMILIES, with_modes
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.passes.schedule import Recompute
from fxpipe.runtime import interpreter

DEVICES = ("cpu", "cpu")
ROUNDS = 5
FINALISTS = 4
FAR = 1.3
"""A candidate that is predicted to take so many times the least is not run, and one that took that
is not run with more micro-batches."""


@dataclass(frozen=True)
class Case:
    """A model with its batch.

    Attributes:
        build: makes the model.
        batch: makes inputs and targets.
        loss: of outputs and targets.
        share: the limit is so far on the way from the least that any step needs to what 1F1B with
            eight micro-batches needs.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    share: float = 0.4


def fat() -> nn.Module:
    widths = (128, 128, 128, 4096, 128, 128, 128)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


def transformer() -> nn.Module:
    layers = (
        nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
    )
    return nn.Sequential(*layers)


CASES = {
    "MLP, one fat layer": Case(
        fat, lambda: (torch.rand(256, 128), torch.rand(256, 128)), mse_loss, 0.1
    ),
    "transformer": Case(
        transformer, lambda: (torch.rand(32, 32, 64), torch.rand(32, 32, 64)), mse_loss
    ),
    "U-Net": Case(
        lambda: UNet(2, 16, depth=2),
        lambda: (torch.rand(32, 3, 32, 32), torch.rand(32, 1, 32, 32)),
        mse_loss,
    ),
    "conv net": Case(
        lambda: ResNet((1, 1, 1, 1), 8, 10),
        lambda: (torch.rand(64, 3, 32, 32), torch.randint(10, (64,))),
        cross_entropy,
    ),
}


def pipe_of(name: str, limit: int | None, **options: Any) -> fxpipe.Pipeline:
    """A pipe that trains a model, always from the same weights."""
    torch.manual_seed(0)
    case = CASES[name]
    if limit is not None:
        options["memory_limits"] = limit
    return fxpipe.compile(
        case.build(), DEVICES, loss=case.loss, optimizer=torch.optim.SGD, **options
    )


def prepared(name: str, limit: int | None, **options: Any) -> tuple[fxpipe.Pipeline, float]:
    """A pipe that is ready for its first step, and the processor seconds that this took."""
    x, y = CASES[name].batch()
    gc.collect()
    start = process_time()
    pipe = pipe_of(name, limit, **options)
    pipe.prepare(x, target=y)
    return pipe, process_time() - start


def limit_of(name: str) -> int:
    """The limit of a case, in bytes a device."""
    batch = len(CASES[name].batch()[0])
    ends = []
    for microbatches, recompute in ((batch // 2, "always"), (8, "never")):
        pipe, _ = prepared(
            name, None, schedule="1f1b", microbatches=microbatches, recompute=recompute
        )
        with pipe:
            ends.append(max(memory.peak for memory in pipe.simulate().memory))
    least, usual = ends
    return int(least + CASES[name].share * (usual - least))


class Bench:
    """Runs candidates over the stages of one pipe.

    Attributes:
        pipe: the pipe, prepared with whatever was chosen.
    """

    def __init__(self, name: str, limit: int | None, family: str) -> None:
        """Raises FxpipeError if the limit cannot be kept with stages that are placed as the
        family's."""
        self._case, self._limit = CASES[name], limit
        with patch.dict(_REGISTRY["schedule"], auto=partial(auto_schedule, families=(family,))):
            self.pipe, _ = prepared(name, limit, schedule="auto")
        self._compiler: Any = self.pipe._compiler
        if self.pipe.schedule.placement != find_recipe(family).place(len(DEVICES)):
            self.pipe.close()
            raise fxpipe.PartitionError("only other stages keep the limit")

    def is_far(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a candidate, by its lower bounds, does not fit, or takes longer than that."""
        stages, limit = self._compiler._stages, self._limit
        try:
            if limit is not None and max(stages.peaks(candidate)) > limit:
                return True
            return bool(stages.seconds(candidate) > seconds)
        except fxpipe.InputError:  # no schedule of so many micro-batches
            return True

    def take(self, candidate: Candidate) -> float | None:
        """Prepare a candidate: the predicted seconds of a step, None if it does not fit or run."""
        compiler, x_y = self._compiler, self._case.batch()
        extensions = compiler.options.extensions
        compiler._follow(
            compiler.timetable.changed(
                recipe=candidate.recipe,
                recompute=candidate.recompute,
                extensions=with_modes(extensions, candidate.offload),
            )
        )
        self.pipe._calls.microbatches = candidate.microbatches
        try:
            self.pipe.prepare(x_y[0], target=x_y[1])
        except fxpipe.FxpipeError:
            return None
        found = self.pipe.simulate()
        if self._limit is not None and any(x.peak > self._limit for x in found.memory):
            return None
        return float(found.step_time)

    def seconds(self) -> tuple[float, float]:
        """The seconds of a step, see ``seconds``."""
        return seconds(self.pipe, self._case)


def seconds(pipe: fxpipe.Pipeline, case: Case) -> tuple[float, float]:
    """The seconds of a step if each device has a processor to itself: the processor times of its
    tasks in two steps, put together in the order of the program; and as the clock tells."""
    x, y = case.batch()
    pipe.step(x, target=y)
    with patch.object(interpreter, "perf_counter_ns", thread_time_ns):
        _, clock = timed(lambda: pipe.profile(x, target=y, steps=2))
    return float(pipe.simulate().step_time), clock / 2


def sets(recipe: Recipe, *, limited: bool) -> list[tuple[Modes, Modes]]:
    """What the stages of each device do: recompute and offload, the least first."""
    places = recipe.place(len(DEVICES))
    found = []
    kinds = [*product((0, 1), repeat=2)] if limited else [(0, 0)]
    for chosen in sorted(product(kinds, repeat=len(DEVICES)), key=lambda x: sum(map(sum, x))):
        modes = [tuple(MODES[chosen[home][at]] for home in places) for at in (0, 1)]
        found.append((modes[0], modes[1]))
    return found


MODES: tuple[Recompute, Recompute] = ("never", "always")


def _within(a: Candidate, b: Candidate) -> bool:
    """Whether all that the stages of one candidate do those of another do, too."""
    pairs = zip((*a.recompute, *a.offload), (*b.recompute, *b.offload), strict=True)
    return all(one == "never" or one == other for one, other in pairs)


def every(name: str, limit: int | None) -> list[tuple[float, Candidate, Bench]]:
    """The seconds of a step of all candidates that fit, the fastest first."""
    batch = len(CASES[name].batch()[0])
    counts = [2**n for n in range(1, batch.bit_length())]
    found: list[tuple[float, Candidate, Bench]] = []
    least, likely = inf, inf
    for family in FAMILIES:
        try:
            bench = Bench(name, limit, family)
        except fxpipe.FxpipeError:
            continue
        place = find_recipe(family).placement
        for recipe in library_over(len(DEVICES), place):
            slow: list[Candidate] = []
            for count in counts:
                fitting: list[Candidate] = []
                doing = sets(recipe, limited=limit is not None)
                shortest = inf
                for modes in doing:
                    candidate = Candidate(recipe, count, *modes)
                    if any(_within(x, candidate) for x in fitting):
                        continue
                    if bench.is_far(candidate, FAR * likely):
                        continue
                    predicted = bench.take(candidate)
                    if predicted is None:
                        continue
                    fitting.append(candidate)
                    likely, shortest = min(likely, predicted), min(shortest, predicted)
                    same = [x for x in slow if _within(x, candidate)]
                    if predicted > FAR * likely or same:
                        continue
                    taken, _ = bench.seconds()
                    found.append((taken, candidate, bench))
                    least = min(least, taken)
                    if taken > FAR * least:
                        slow.append(candidate)
                if inf > shortest > 2 * FAR * likely:
                    break
    return sorted(found, key=lambda each: each[0])


def written(candidate: Candidate) -> list[Any]:
    """A candidate for a file."""
    return [
        candidate.recipe.name,
        candidate.microbatches,
        list(candidate.recompute),
        list(candidate.offload),
    ]


def read(name: str, count: int, recompute: Sequence[Any], offload: Sequence[Any]) -> Candidate:
    return Candidate(find_recipe(name), count, tuple(recompute), tuple(offload))


def chosen(name: str, limit: int | None) -> tuple[fxpipe.Pipeline, Candidate, float]:
    """The pipe of a choice, the choice, and the processor seconds to decide."""
    pipe, whole = prepared(name, limit, schedule="auto")
    schedule = pipe.schedule
    tasks = [task for row in schedule.rows for task in row]
    doing = {
        letter: {t.stage for t in tasks if t.kind == letter and t.stage is not None}
        for letter in "RO"
    }
    modes = [tuple(MODES[s in doing[x]] for s in range(schedule.stages)) for x in "RO"]
    candidate = Candidate(find_recipe(schedule.name), schedule.microbatches, *modes)
    plain, alone = prepared(
        name,
        None,
        schedule=schedule.name,
        microbatches=schedule.microbatches,
        recompute=dict.fromkeys(doing["R"], "always") or "never",
        extensions=[fxpipe.Offload(dict.fromkeys(doing["O"], "always"))] if doing["O"] else [],
    )
    plain.close()
    return pipe, candidate, whole - alone


def compare(
    name: str, limit: int | None, before: Candidate | None
) -> tuple[Row, dict[str, list[tuple[float, float]]]]:
    """Run all candidates of a case, and then the fastest, and the choices, in turn."""
    pipe, choice, deciding = chosen(name, limit)
    candidates = every(name, limit)
    finalists = candidates[:FINALISTS]
    if before is not None and not any(before == each for _, each, _ in finalists):
        place = before.recipe.place(len(DEVICES))
        benches = [b for _, c, b in candidates if c.recipe.place(len(DEVICES)) == place]
        finalists += [(inf, before, bench) for bench in benches[:1]]
    times: dict[str, list[tuple[float, float]]] = {}
    with pipe:
        for _ in range(ROUNDS):
            times.setdefault("auto", []).append(seconds(pipe, CASES[name]))
            for _, candidate, bench in finalists:
                if bench.take(candidate) is not None:
                    times.setdefault(str(candidate), []).append(bench.seconds())
    for bench in {id(b): b for _, _, b in candidates}.values():
        bench.pipe.close()
    middle = {key: median(x for x, _ in own) for key, own in times.items()}
    clock = {key: median(x for _, x in own) for key, own in times.items()}
    best = min((key for key in middle if key != "auto"), key=lambda key: middle[key])
    return Row(name, limit, len(candidates), choice, deciding, best, middle, clock, before), times


@dataclass(frozen=True)
class Row:
    """A case with its choice, and the median seconds of the finalists and of ``auto``, by processor
    time and by the clock."""

    name: str
    limit: int | None
    run: int
    choice: Candidate
    deciding: float
    best: str
    seconds: Mapping[str, float]
    clock: Mapping[str, float]
    before: Candidate | None

    @property
    def ratio(self) -> float:
        """The seconds of the choice over those of the best candidate."""
        return self.seconds["auto"] / min(self.seconds[self.best], self.seconds["auto"])

    def cells(self) -> list[str]:
        before = str(self.before) if self.before else "–"
        return [
            self.name,
            "none" if self.limit is None else f"{self.limit / 2**20:.2f} MiB",
            str(self.run),
            str(self.choice),
            self._milliseconds("auto"),
            self.best,
            self._milliseconds(self.best),
            f"{self.ratio:.3f}",
            f"{self.deciding:.1f}",
            before,
            self._milliseconds(before),
        ]

    def _milliseconds(self, key: str) -> str:
        if key not in self.seconds:
            return "–"
        return f"{1e3 * self.seconds[key]:.1f} ({1e3 * self.clock[key]:.1f})"


HEADINGS = (
    *("model", "limit", "candidates run", "choice", "ms", "best candidate", "ms"),
    *("ratio", "to decide, s", "choice before", "ms"),
)


TITLE = 'What schedule="auto" chooses'
SETTINGS = {
    "devices": ", ".join(DEVICES),
    "ms": "of a step if each device has a processor to itself: the processor times of tasks, "
    "put together in the order of the program; in brackets by the clock, beside other load",
    "rounds": f"{ROUNDS}, in which all take turns; the medians of 2 steps in each stand here",
    "to decide": "processor seconds beyond those of the same pipe with the choice given",
    "candidates run": f"those predicted, or by their bounds, within {FAR:g} times the least",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare choices with the best candidates.")
    parser.add_argument("--model", choices=[*CASES], help="run this model only")
    parser.add_argument("--choose", type=Path, help="only choose, and write the choices here")
    parser.add_argument("--before", type=Path, help="choices of another version")
    arguments = parser.parse_args()
    machine = describe()
    torch.set_num_threads(len(DEVICES))  # one for each device
    names = [name for name in CASES if arguments.model in (None, name)]
    if arguments.choose:
        made: dict[str, Any] = {}
        for name in names:
            for limit in (None, limit_of(name)):
                pipe, choice, deciding = chosen(name, limit)
                pipe.close()
                made[f"{name}, {limit is not None}"] = [written(choice), deciding]
                print(name, limit, choice, f"{deciding:.1f} s", flush=True)
        arguments.choose.write_text(json.dumps(made))
        return 0
    before = json.loads(arguments.before.read_text()) if arguments.before else {}
    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    for name in names:
        for limit in (None, limit_of(name)):
            earlier = before.get(f"{name}, {limit is not None}")
            row, times = compare(name, limit, read(*earlier[0]) if earlier else None)
            rows.append(row)
            for key, own in times.items():
                for word, index in (("processor", 0), ("clock", 1)):
                    samples[f"{name}, {limit}, {key}, {word}"] = [each[index] for each in own]
            print(*row.cells(), sep=" | ", flush=True)
    figures = [
        Figure("choice over the best candidate, at most", max(row.ratio for row in rows)),
        Figure("to decide, at most", max(row.deciding for row in rows), "s"),
    ]
    if before:
        slowest = max(deciding for _, deciding in before.values())
        figures.append(Figure("to decide, at most, before", slowest, "s"))
    if not arguments.model:
        grid = Grid(HEADINGS, [row.cells() for row in rows])
        Report("choosing", TITLE, SETTINGS, figures, machine, [grid], samples=samples).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
