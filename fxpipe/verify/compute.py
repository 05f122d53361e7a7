"""Rules for a program's compute: its tasks, the weight versions that they use, and barriers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.task import BUILT_IN
from fxpipe.ir.walk import Key, needs_of
from fxpipe.verify.facts import Facts
from fxpipe.verify.tasks import (
    Window,
    ascending,
    complete,
    dependencies,
    gradients_used_up,
)


def tasks(facts: Facts) -> Iterator[Fault]:
    """The rules of a schedule's tasks: each once, in order, with all gradients of its batch."""
    yield from complete(facts.window, updates=bool(facts.updates))
    yield from ascending(facts.window)
    yield from dependencies(facts.window, _needs_of(facts.window))
    yield from gradients_used_up(facts.window)


def _needs_of(window: Window) -> Callable[[Key], list[Key]]:
    """Task → the tasks before it from which it gets no buffer: of these ``flow`` tells nothing."""
    needs = needs_of(window.schedule)

    def unseen(key: Key) -> list[Key]:
        kind, _, stage = key
        if kind == "norm":
            return [(k, i, stage) for k in "BW" for i in range(window.schedule.microbatches)]
        if kind == "C":
            return [("norm", None, stage)]
        if kind == "U":
            return [*needs(key), ("norm", None, stage)]
        return [] if kind in BUILT_IN else needs(key)

    return unseen


def kept(facts: Facts) -> Iterator[Fault]:
    """A forward keeps what comes after it needs, and no more."""
    for device, compute in enumerate(facts.compute):
        for position, instruction in compute:
            if not isinstance(instruction, ins.Forward):
                continue
            again = ("R", instruction.microbatch, instruction.stage) in facts.window.spots
            if instruction.again != again:
                what, cure = (
                    ("it keeps no buffers for its recompute", "write 'again'")
                    if again
                    else ("it keeps buffers and is never recomputed", "remove 'again'")
                )
                yield facts.fault(device, position, what, cure)
            if instruction.keeps != (facts.window.trains and not again):
                what, cure = (
                    ("it keeps what no backward uses up", "remove 'keep'")
                    if instruction.keeps
                    else ("it keeps nothing for its backward", "write 'keep'")
                )
                yield facts.fault(device, position, what, cure)


def versions(facts: Facts) -> Iterator[Fault]:
    """A stage reads one version for all of a batch, which exists by then; its update makes one.

    Batch t reads version t − d of a stage, the same d for all its instructions and all batches;
    versions before the first are the first. The update of batch t makes version t + 1 of version t.
    """
    forwards: dict[tuple[int, int], int] = {}
    read: Counter[tuple[int, int]] = Counter()
    for compute in facts.compute:
        for _, x in compute:
            if isinstance(x, ins.Forward):
                forwards.setdefault((x.stage, x.microbatch), x.version)
                read[x.stage, x.version] += 1
    usual: dict[int, int] = {}
    for (stage, version), _ in read.most_common():
        usual.setdefault(stage, version)
    for device, compute in enumerate(facts.compute):
        done: set[int] = set()
        for position, x in compute:
            here = -facts.moment(device, position)[0]
            wrong: tuple[str, str] | None
            match x:
                case ins.Forward(stage, _, version):
                    wrong = _unknown(facts, device, position, stage, version)
                    if wrong is None and version != usual[stage]:
                        wrong = (
                            f"it reads version {version + here}, and most forwards of its stage "
                            f"read {usual[stage] + here}",
                            f"write v{usual[stage] + here}",
                        )
                case ins.Run(_, stage, _, version):
                    wrong = _unknown(facts, device, position, stage, version)
                    expected = 1 if stage in done else usual.get(stage, version)
                    if wrong is None and version != expected:
                        wrong = (
                            f"its batch reads version {expected + here} here",
                            f"write v{expected + here}",
                        )
                case ins.Compute():
                    version = x.version
                    wrong = _unknown(facts, device, position, x.stage, version)
                    first = forwards.get((x.stage, x.microbatch), version)
                    if first != version:
                        wrong = f"its forward read version {first + here}", f"write v{first + here}"
                case ins.Update(stage, reads, writes):
                    done.add(stage)
                    wrong = None
                    if (reads, writes) != (0, 1):
                        wrong = (
                            f"it makes version {writes + here} of version {reads + here}",
                            f"write v{here} -> v{here + 1}: an update makes the next version of "
                            "the newest",
                        )
                case _:
                    continue
            if wrong is not None:
                yield facts.fault(device, position, *wrong)


def _unknown(
    facts: Facts, device: int, position: int, stage: int, version: int
) -> tuple[str, str] | None:
    """What is wrong where a version is not there yet.

    Version t + v is made by the update of batch t + v − 1, which stands in step t + v − 1 − its
    batch. Without updates there is only the caller's, version 0.
    """
    steps, _ = facts.moment(device, position)
    newest = 0
    if (update := facts.updates.get(stage)) is not None:
        made, at = update.moment
        # the newest v with (v - 1 + made, at) before this moment
        newest = steps - made + (at < position)
    if version <= newest:
        return None
    here = -steps
    return (
        f"version {version + here} does not exist here",
        f"read version {newest + here}, or an older one, all over its batch",
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
