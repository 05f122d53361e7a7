"""Rules for a program's compute: every task once, in order, on the right version of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.program import Backward, Barrier, Forward, Pause, Update
from fxpipe.verify.facts import Facts
from fxpipe.verify.spans import microbatches


def complete(facts: Facts) -> Iterator[Fault]:
    """Every forward once; every backward once or none at all; so with the updates."""
    seen: set[tuple[object, ...]] = set()
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            match instruction:
                case Forward(stage, i) | Backward(stage, i):
                    key: tuple[object, ...] = type(instruction), stage, i
                case Update(stage):
                    key = Update, stage
                case _:
                    continue
            if key in seen:
                yield facts.fault(device, position, "it is there twice", "keep one")
            seen.add(key)
    updates = any(key[0] is Update for key in seen)
    for stage, device in enumerate(facts.program.placement):
        for kind, name in ((Forward, "forward"), (Backward, "backward")):
            if kind is Backward and not facts.trains:
                continue
            missing = [i for i in range(facts.program.microbatches) if (kind, stage, i) not in seen]
            if missing:
                yield Fault(
                    f"stage {stage} has no {name} of {microbatches(missing)}", "add it", device
                )
        if updates and (Update, stage) not in seen:
            yield Fault(f"stage {stage} has no update", "update every stage or none", device)


def ascending(facts: Facts) -> Iterator[Fault]:
    """Forwards and backwards of a stage take the micro-batches in order.

    Gradients are added, and buffers such as BatchNorm's statistics written, in that order.
    """
    latest: dict[tuple[type, int], int] = {}
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            if isinstance(instruction, Forward | Backward):
                key = type(instruction), instruction.stage
                before = latest.get(key, -1)
                if instruction.microbatch < before:
                    yield facts.fault(
                        device,
                        position,
                        f"it comes after micro-batch {before}",
                        "let a stage take the micro-batches in ascending order",
                    )
                latest[key] = max(before, instruction.microbatch)


def kept(facts: Facts) -> Iterator[Fault]:
    """A forward keeps what its backward needs, and keeps nothing where there is none."""
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            if isinstance(instruction, Forward) and instruction.keeps != facts.trains:
                what, cure = (
                    ("it keeps nothing for its backward", "write 'keep'")
                    if facts.trains
                    else ("it keeps what no backward uses up", "remove 'keep'")
                )
                yield facts.fault(device, position, what, cure)


def versions(facts: Facts) -> Iterator[Fault]:
    """A micro-batch reads one version of a stage, which exists; an update makes a new one."""
    exists: dict[int, set[int]] = defaultdict(lambda: {0})
    forward: dict[tuple[int, int], int] = {}
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            match instruction:
                case Forward(stage, i, version):
                    wrong = _unknown(version, exists[stage])
                    forward.setdefault((stage, i), version)
                case Backward(stage, i, version):
                    wrong = _unknown(version, exists[stage])
                    read = forward.get((stage, i), version)
                    if read != version:
                        wrong = f"its forward read version {read}", f"write v{read}"
                case Update(stage, reads, writes):
                    wrong = _unknown(reads, exists[stage])
                    if writes in exists[stage]:
                        wrong = f"version {writes} exists already", "write the next version"
                    exists[stage].add(writes)
                case _:
                    continue
            if wrong is not None:
                yield facts.fault(device, position, *wrong)


def _unknown(version: int, exists: set[int]) -> tuple[str, str] | None:
    if version in exists:
        return None
    return f"version {version} does not exist here", f"read version {max(exists)}"


def barriers(facts: Facts) -> Iterator[Fault]:
    """A barrier parts all gradients from all updates, and stands there for nothing else.

    So a failure anywhere in the step leaves every weight as it was.
    """
    updates = any(isinstance(x, Update) for compute in facts.compute for _, x in compute)
    for device, compute in enumerate(facts.compute):
        passed = False
        for position, instruction in compute:
            match instruction:
                case Barrier() if not updates:
                    yield facts.fault(device, position, "no update follows", "remove it")
                case Barrier():
                    passed = True
                case Update() if not passed:
                    yield facts.fault(
                        device, position, "no barrier comes before it", "put one on every device"
                    )
                case Backward() | Forward() if passed:
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


def _names(kinds: list[type[Barrier | Pause]]) -> str:
    return ", ".join(kind.__name__.lower() for kind in kinds)
