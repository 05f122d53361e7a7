"""Rules for a program's compute: every task once, in order, with all gradients of its batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.task import KINDS
from fxpipe.verify.facts import Facts
from fxpipe.verify.spans import microbatches


def complete(facts: Facts) -> Iterator[Fault]:
    """Every forward once; a backward for all of them or none, whole or in halves; the updates."""
    seen: set[tuple[object, ...]] = set()
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            match instruction:
                case ins.Barrier() | ins.Pause():
                    continue
                case ins.Update(stage):
                    key: tuple[object, ...] = ins.Update, stage
                case ins.Run(kind, stage, i):
                    key = kind, stage, i
                case ins.Norm(stage) | ins.Clip(stage):
                    key = type(instruction), stage
                case _:
                    key = type(instruction), instruction.stage, instruction.microbatch
            if key in seen:
                yield facts.fault(device, position, "it is there twice", "keep one")
            seen.add(key)
    clips = any(key[0] in (ins.Norm, ins.Clip) for key in seen)
    for stage, device in enumerate(facts.program.placement):
        lacks: dict[str, list[int]] = defaultdict(list)
        for i in range(facts.program.microbatches):
            if (ins.Forward, stage, i) not in seen:
                lacks["forward"].append(i)
            has = [
                kind
                for kind in (ins.Backward, ins.InputGrad, ins.WeightGrad)
                if (kind, stage, i) in seen
            ]
            if facts.trains and not has:
                lacks["backward"].append(i)
            elif has == [ins.InputGrad]:
                lacks["weight gradient"].append(i)
            elif has == [ins.WeightGrad]:
                lacks["input gradient"].append(i)
            elif ins.Backward in has and len(has) > 1:
                yield Fault(
                    f"stage {stage} has a whole backward of micro-batch {i} and a half of it",
                    "keep backward, or input_grad and weight_grad",
                    device,
                )
        for name, indices in lacks.items():
            yield Fault(f"stage {stage} has no {name} of {microbatches(indices)}", "add it", device)
        for part, name in ((ins.Norm, "norm"), (ins.Clip, "clip")):
            if clips and (part, stage) not in seen:
                yield Fault(f"stage {stage} has no {name}", "clip every stage or none", device)
        if facts.updates and stage not in facts.updates:
            yield Fault(f"stage {stage} has no update", "update every stage or none", device)


def ascending(facts: Facts) -> Iterator[Fault]:
    """A stage's forwards take the micro-batches in order, and so does what adds to its gradients.

    Buffers such as BatchNorm's statistics are written, and gradients are added, in that order.
    Forwards take whole batches in order, too; each batch has gradients of its own.
    """
    for device, compute in enumerate(facts.compute):
        forwards: dict[int, list[tuple[int, int]]] = defaultdict(list)
        gradients: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, x in compute:
            if isinstance(x, ins.Forward):
                forwards[x.stage].append((x.microbatch, position))
            elif isinstance(x, ins.Backward | ins.WeightGrad):
                gradients[x.stage].append((x.microbatch, position))
        for run in (*forwards.values(), *gradients.values()):
            latest = -1
            for i, position in run:
                if i < latest:
                    yield facts.fault(
                        device,
                        position,
                        f"it comes after micro-batch {latest}",
                        "let a stage take the micro-batches in ascending order",
                    )
                latest = max(latest, i)
        for run in forwards.values():
            first, last = run[0][1], run[-1][1]
            steps, position = facts.moment(device, first)
            if facts.moment(device, last) >= (steps + 1, position):
                yield facts.fault(
                    device,
                    last,
                    f"it comes after position {first} of the next batch",
                    "finish a batch's forwards on a stage before those of the next begin",
                )


def kept(facts: Facts) -> Iterator[Fault]:
    """A forward keeps what comes after it needs, and no more."""
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            if not isinstance(instruction, ins.Forward):
                continue
            again = (instruction.stage, instruction.microbatch) in facts.recomputed
            if instruction.again != again:
                what, cure = (
                    ("it keeps no buffers for its recompute", "write 'again'")
                    if again
                    else ("it keeps buffers and is never recomputed", "remove 'again'")
                )
                yield facts.fault(device, position, what, cure)
            if instruction.keeps != (facts.trains and not again):
                what, cure = (
                    ("it keeps what no backward uses up", "remove 'keep'")
                    if instruction.keeps
                    else ("it keeps nothing for its backward", "write 'keep'")
                )
                yield facts.fault(device, position, what, cure)


def updated(facts: Facts) -> Iterator[Fault]:
    """An update uses up all gradients of its batch: no more come, and nobody looks at them."""
    for device, compute in enumerate(facts.compute):
        done: set[int] = set()
        summed: set[int] = set()
        for position, x in compute:
            match x:
                case ins.Update(stage):
                    done.add(stage)
                case ins.Norm(stage) | ins.Clip(stage) if stage in done:
                    yield facts.fault(
                        device,
                        position,
                        "it needs gradients that the update has used up",
                        "move it before that",
                    )
                case ins.Backward(stage) | ins.WeightGrad(stage) if stage in summed:
                    yield facts.fault(
                        device,
                        position,
                        "it adds to gradients whose norm is taken",
                        "move it before the norm",
                    )
                case ins.Norm(stage):
                    summed.add(stage)
                case ins.Backward(stage) | ins.WeightGrad(stage) if stage in done:
                    yield facts.fault(
                        device, position, "it comes after the update", "move it before that"
                    )
                case ins.Run(kind, stage) if stage in done and _uses_gradients(kind):
                    yield facts.fault(
                        device,
                        position,
                        "it needs gradients that the update has used up",
                        "move it before that",
                    )


def _uses_gradients(kind: str) -> bool:
    return "gradients" in (*KINDS[kind].reads, *KINDS[kind].writes)


def followed(facts: Facts) -> Iterator[Fault]:
    """A user's own task comes after all that it follows."""
    for device, compute in enumerate(facts.compute):
        if not any(isinstance(x, ins.Run) for _, x in compute):
            continue
        last: dict[tuple[str | None, int, int | None], int] = {}  # of one micro-batch, and of all
        for k, (_, x) in enumerate(compute):
            if not isinstance(x, ins.Barrier | ins.Pause | ins.Norm):
                letter = ins.letter_of(x)
                i = None if isinstance(x, ins.Update | ins.Clip) else x.microbatch
                last[letter, x.stage, i] = last[letter, x.stage, None] = k
        for k, (position, x) in enumerate(compute):
            if not isinstance(x, ins.Run):
                continue
            for letter in KINDS[x.kind].follows:
                i = x.microbatch if KINDS[letter].per_microbatch else None
                if (late := last.get((letter, x.stage, i), k)) > k:
                    yield facts.fault(
                        device,
                        position,
                        f"it comes before position {compute[late][0]}, which it follows",
                        "move it behind that",
                    )


def barriers(facts: Facts) -> Iterator[Fault]:
    """A barrier parts all gradients from all updates, and stands there for nothing else.

    So a failure anywhere in the step leaves every weight as it was. Where batches overlap, or
    read older versions, there is none: the versions do its work.
    """
    delayed = any(
        isinstance(x, ins.Forward) and x.version < 0
        for compute in facts.compute
        for _, x in compute
    )
    if not any(facts.meetings) and (facts.program.depth or delayed):
        return
    for device, compute in enumerate(facts.compute):
        passed = False
        for position, instruction in compute:
            match instruction:
                case ins.Barrier() | ins.Pause() if facts.program.depth:
                    yield facts.fault(
                        device, position, "batches overlap, and none may wait here", "remove it"
                    )
                case ins.Barrier() if not facts.updates:
                    yield facts.fault(device, position, "no update follows", "remove it")
                case ins.Barrier():
                    passed = True
                case ins.Update() if not passed and not facts.program.depth:
                    yield facts.fault(
                        device, position, "no barrier comes before it", "put one on every device"
                    )
                case (
                    ins.Forward()
                    | ins.Recompute()
                    | ins.Backward()
                    | ins.InputGrad()
                    | ins.WeightGrad()
                ) if passed:
                    yield facts.fault(
                        device, position, "it comes after a barrier", "move the barrier behind it"
                    )


def meetings(facts: Facts) -> Iterator[Fault]:
    """Every device has the same barriers and pauses in the same order."""
    kinds = [[type(x) for _, x in own] for own in facts.meetings]
    usual = max(kinds, key=kinds.count, default=[])
    for device, own in enumerate(kinds):
        if own != usual:
            yield Fault(
                f"its barriers and pauses are [{_names(own)}], and those of other devices are "
                f"[{_names(usual)}]",
                "give every device the same ones in the same order",
                device,
            )


def _names(kinds: list[type[ins.Barrier | ins.Pause]]) -> str:
    return ", ".join(kind.__name__.lower() for kind in kinds)
