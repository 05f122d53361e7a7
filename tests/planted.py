"""Plant one fault at a time in a copy of the project, and see whether the tests notice it.

    python -m tests.planted [part of a name …]

Ten faults in lowering, ten in the runtime, ten in the other passes, and fifteen in the compiler,
the verifier, the search and what they stand on. Each is planted in the copy,
and the tests that should notice run until one fails. Prints each fault with that test. Ends with 1
if a fault goes unnoticed, or cannot be planted because the code has changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

FOLDERS = ("fxpipe", "passes", "schedules", "tests", "examples", "docs", "benchmarks")
"""What the copy has of the project, beside pyproject.toml."""


class Fault(NamedTuple):
    """A text in a file, what stands there instead, and the tests that should notice: of an
    extension its folder, of which `make test` runs what is marked with ``smoke``."""

    file: str
    before: str
    after: str
    tests: str


LOWER = "fxpipe/passes/lowering/lower.py"
COMMUNICATE = "fxpipe/passes/lowering/communicate.py"
FREE = "fxpipe/passes/lowering/free.py"
STREAMS = "fxpipe/extensions/streams/events.py"
INTERPRETER = "fxpipe/runtime/interpreter.py"
FORWARD = "fxpipe/ir/opcodes/forward.py"
BACKWARD = "fxpipe/ir/opcodes/backward.py"
CLIPPING = "fxpipe/extensions/clipping/clipping.py"
HOST = "fxpipe/runtime/host.py"
VERSIONS = "fxpipe/extensions/overlapping/versions.py"
HALVES = "fxpipe/passes/differentiate/part_backward.py"

LOWERING = {
    "every task reads the newest weights": Fault(
        LOWER,
        "        version = batch - self._delays[stage]\n        if own := KINDS[kind].make:",
        "        version = batch\n        if own := KINDS[kind].make:",
        "tests/passes/lowering/test_lower.py",
    ),
    "updates wait for no other device": Fault(
        LOWER, "            yield ins.Barrier()\n", "", "tests/passes/lowering/test_lower.py"
    ),
    "the outputs of a call are not waited for": Fault(
        LOWER,
        'if task.kind in "BI" and not paused:',
        'if task.kind in "U" and not paused:',
        "tests/passes/lowering/test_lower.py tests/runtime/test_calls.py",
    ),
    "norms are told before the gradients are complete": Fault(
        LOWER,
        "self._last.get(task.stage) == task:",
        'task.kind in "BW" and task.microbatch == 0:',
        "tests/passes/lowering/test_lower.py tests/extensions/clipping/test_clipping.py",
    ),
    "a sum of gradients is not waited for": Fault(
        "fxpipe/extensions/sums.py",
        "                if waits or reads or later.kind",
        "                if reads or later.kind",
        "tests/extensions/replicas",
    ),
    "a value of the next batch is taken for one of this batch": Fault(
        COMMUNICATE,
        "arrival._replace(batch=arrival.batch + windows)",
        "arrival._replace(batch=arrival.batch)",
        "tests/passes/lowering/test_lower.py tests/schedules/test_overlapping.py",
    ),
    "a skip is received only once it is used": Fault(
        COMMUNICATE,
        "        for place in range(first, end):",
        "        for place in range(max(first, end - 1), end):",
        "tests/passes/lowering/test_lower.py tests/schedules/test_flushing.py",
    ),
    "a value is freed after each of its uses": Fault(
        FREE, "                seen.add(value)\n", "", "tests/passes/lowering/test_lower.py"
    ),
    "an arrival takes memory that is still in use": Fault(
        STREAMS,
        "            needs.add(memory)\n",
        "            pass\n",
        "tests/extensions/streams/test_races.py",
    ),
    "memory is freed while another device copies it": Fault(
        STREAMS,
        "for spot in self._used[device].get(value, ()):",
        "for spot in ():",
        "tests/extensions/streams/test_races.py",
    ),
}

RUNTIME = {
    "one consumer's gradient stands for all": Fault(
        BACKWARD,
        "[reduce(add, [values[buffer] for buffer in group]) for group in groups]",
        "[values[group[0]] for group in groups]",
        "tests/ir/test_opcodes.py",
    ),
    "a micro-batch does not see what the one before wrote to buffers": Fault(
        FORWARD,
        "[store.state.get(argument.target, buffer) for argument, buffer in arguments]",
        "[buffer for argument, buffer in arguments]",
        "tests/models/test_exactness.py",
    ),
    "a micro-batch counts as kept for ever": Fault(
        INTERPRETER,
        "        self.kept[buffer.source] -= 1\n",
        "",
        "tests/runtime/test_memory.py tests/extensions/overlapping/test_overlapping_steps.py",
    ),
    "gradients in flight keep the number of their batch": Fault(
        INTERPRETER,
        "{(s, batch - steps): g for (s, batch), g in self.gradients.items()}",
        "{(s, batch): g for (s, batch), g in self.gradients.items()}",
        "tests/extensions/overlapping/test_in_flight.py "
        "tests/extensions/overlapping/test_overlapping_steps.py",
    ),
    "small gradients are scaled up": Fault(
        CLIPPING, ".clamp(max=1.0)", "", "tests/extensions/clipping/test_clipping.py"
    ),
    "the loss's scale stays in the gradients": Fault(
        CLIPPING,
        "        factor = 1 / self._scales.get(batch, 1.0)\n",
        "        factor = 1.0\n",
        "tests/extensions/clipping/test_clipping.py",
    ),
    "every micro-batch's loss weighs the same": Fault(
        HOST,
        "(weights * scale).to(dtype).unbind()",
        "(0 * weights + scale / len(weights)).to(dtype).unbind()",
        "tests/loss_weight tests/runtime/test_batch.py tests/models/test_exactness.py",
    ),
    "all micro-batches draw the same numbers": Fault(
        HOST, "mix(seed, before + i)", "mix(seed, before)", "tests/models/test_determinism.py"
    ),
    "an update takes the learning rate of now": Fault(
        VERSIONS,
        "groups = self._groups.pop((stage, reads), [])",
        "groups = [frozen(g) for g in self.stages[stage].optimizer.param_groups]",
        "tests/runtime/test_one_optimizer.py tests/extensions/overlapping/test_in_flight.py",
    ),
    "a recompute reads buffers as they are by then": Fault(
        FORWARD,
        ".forward(weights, kept[:count], inputs)",
        ".forward(weights, _, inputs)",
        "tests/compiler/test_recompute.py",
    ),
}

PASSES = {
    "a convolution's two halves stay apart when both come early": Fault(
        HALVES,
        "if (of_input in early) == (of_weight in early):",
        "if False:",
        "tests/passes/differentiate/test_part_backward.py",
    ),
    "a weight gradient delays what the next stage waits for": Fault(
        HALVES,
        "if node in carriers and len(leads[node]) > 1 and",
        "if node in carriers and len(leads[node]) > 9 and",
        "tests/passes/differentiate/test_part_backward.py",
    ),
    "draws of different operations are alike": Fault(
        "fxpipe/passes/graph/randomness.py",
        "            node.args = (*args, seed, number)\n",
        "            node.args = (*args, seed, 0)\n",
        "tests/passes/graph/test_randomness.py",
    ),
    "a tied parameter stands on the last stage that reads it": Fault(
        "fxpipe/passes/partition/cut.py",
        "min(owners.get(a.target, self.stages), self._first_reader(a.target))",
        "max(self._reading_stages(a.target), default=0)",
        "tests/partition/test_cut.py",
    ),
    "a value goes to the first stage that reads it alone": Fault(
        "fxpipe/passes/partition/cut.py",
        "targets - {source})]",
        "targets - {source})][:1]",
        "tests/partition/test_cut.py tests/models/test_exactness.py",
    ),
    "the slowest of the slow stages is not weighed by its device's speed": Fault(
        "fxpipe/passes/partition/work.py",
        "compute[k] / machine.speeds[k]",
        "compute[k]",
        "tests/partition",
    ),
    "a value that two stages receive counts once": Fault(
        "fxpipe/passes/partition/work.py",
        "        for target in targets - {source}:\n",
        "        for target in sorted(targets - {source})[:1]:\n",
        "tests/partition",
    ),
    "a bucket takes its gradients in the order of the parameters": Fault(
        "fxpipe/extensions/replicas/buckets.py",
        "sorted(gradients, key=lambda index: order[_maker(gradients[index])])",
        "sorted(gradients)",
        "tests/extensions/replicas",
    ),
    "memory is free again while a view of it is still read": Fault(
        "fxpipe/extensions/simulator/liveness.py",
        "spans[storage] = span._replace(last=max(span.last, last))",
        "spans[storage] = span",
        "tests/extensions/simulator/test_liveness.py",
    ),
    "deferred statistics forget the module's momentum": Fault(
        "fxpipe/extensions/deferred_batchnorm/defer_batchnorm.py",
        "tracked, module.momentum)",
        "tracked, 0.1)",
        "tests/extensions/deferred_batchnorm",
    ),
}

MEMO = "fxpipe/compiler/memo.py"
SIZES = "fxpipe/compiler/sizes.py"

OTHERS = {
    "what a kept call was made of is forgotten": Fault(
        MEMO,
        "            kept.update(new)\n            new = [part",
        "            kept.update(new)\n            new = [] and [part",
        "tests/compiler/test_memo.py",
    ),
    "a result stands under the key of before it was made": Fault(
        MEMO,
        "        found = self._find(kind, key(), fits)\n",
        "        known = key()\n        found = self._find(kind, known, fits)\n"
        "        key = lambda: known\n",
        "tests/compiler/test_memo.py",
    ),
    "each batch of another size is the first of its kind": Fault(
        SIZES,
        "            alone = self._first[known] == shapes\n",
        "            alone = True\n",
        "tests/compiler/test_sizes.py",
    ),
    "a dimension that a graph cannot leave open is asked for again": Fault(
        SIZES,
        "self._rigid.get(kind, frozenset()) | fixed",
        "self._rigid.get(kind, frozenset())",
        "tests/compiler/test_sizes.py",
    ),
    "a graph for any size takes a size of 1": Fault(
        "fxpipe/passes/tracing/any_size.py",
        "any(leaf.shape[dim] < 2 for dim in dims)",
        "any(leaf.shape[dim] < 1 for dim in dims)",
        "tests/passes/tracing/test_any_size.py",
    ),
    "nodes that belong together part in a second graph": Fault(
        "fxpipe/passes/partition/assignment.py",
        "            latest = max(placed[name] for name in bond)\n",
        "            latest = 0\n",
        "tests/partition/test_partition.py",
    ),
    "a copy of an input shares elements as the traced one did": Fault(
        "fxpipe/kernels/graph.py",
        "        if size > 1 and stride < extent:\n",
        "        if size > 1 and stride < 0:\n",
        "tests/passes/graph/test_layouts.py",
    ),
    "a bound of the search is above the best schedule": Fault(
        "fxpipe/extensions/search/bounds.py",
        "            idle = max(0.0, wait - _forwards(problem, device))\n",
        "            idle = max(0.0, wait)\n",
        "tests/extensions/search",
    ),
    "a walk passes a wait for the position before": Fault(
        "fxpipe/ir/walk.py",
        "(position if other == row else passed[other]) <= on:",
        "(position if other == row else passed[other]) < on:",
        "tests/ir/test_walk.py",
    ),
    "a trace begins while a worker of another pipe runs": Fault(
        "fxpipe/locks.py",
        "        return all(worker.idle for worker in self._workers)\n",
        "        return True\n",
        "tests/test_locks.py",
    ),
    "a value may be read after it was freed": Fault(
        "fxpipe/verify/run.py",
        "            if buffer in there:\n                there[buffer] = False\n",
        "",
        "tests/verify",
    ),
    "ignored targets count": Fault(
        "fxpipe/compiler/loss_weight/terms.py",
        "        return kept.sum()\n",
        "        return kept.numel()\n",
        "tests/loss_weight",
    ),
    "a number that is asked twice is asked once": Fault(
        "fxpipe/compiler/number.py",
        "return tuple(_answer(question, values) for question in asked.values())",
        "return tuple(_answer(question, values) for question in [*asked.values()][:1])",
        "tests/compiler/test_number.py tests/compiler/test_reads.py",
    ),
    "an entry that is added to a dictionary is no change": Fault(
        "fxpipe/compiler/python_state/snapshot.py",
        "            if length is not None and len(held) != length:\n",
        "            if False:\n",
        "tests/python_state",
    ),
    "the first half of a backward gives its weight gradients away": Fault(
        BACKWARD,
        '            values[self.own("deferred")] = result.deferred\n',
        '            values[self.own("deferred")] = result.deferred[::-1]\n',
        "tests/runtime/test_orders.py tests/schedules/test_frozen.py",
    ),
}

FAULTS = {**LOWERING, **RUNTIME, **PASSES, **OTHERS}


def plant(fault: Fault, copy: Path) -> bool:
    """Write the fault into the copy; returns whether its text stands there exactly once."""
    path = copy / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        return False
    path.write_text(text.replace(fault.before, fault.after))
    return True


def noticed(fault: Fault, copy: Path) -> str:
    """The first test that fails in the copy; empty if none does."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-n", "0"),
            *("-m", "not deep and not pages", *fault.tests.split()),  # as make test does
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "quick"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed is not None else "" if done.returncode == 0 else done.stdout[-300:]


def main(parts: list[str]) -> int:
    faults = {n: f for n, f in FAULTS.items() if not parts or any(part in n for part in parts)}
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for name, fault in faults.items():
            if not plant(fault, copy):
                told = "CANNOT BE PLANTED: the code has changed"
            else:
                told = noticed(fault, copy) or "NOT NOTICED"
                shutil.copy(ROOT / fault.file, copy / fault.file)
            unnoticed += told.isupper() or told.startswith("CANNOT")
            print(f"{name}: {told}", flush=True)
    print(f"{len(faults) - unnoticed} of {len(faults)} noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
