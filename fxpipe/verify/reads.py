"""Rules for the weight versions that a program's instructions read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.verify.facts import Facts


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
            here = facts.batch(device, position)
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
                case ins.Recompute() | ins.Backward() | ins.InputGrad() | ins.WeightGrad():
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
        made, at = facts.moment(*update)
        # the newest v with (v - 1 + made, at) before this moment
        newest = steps - made + (at < position)
    if version <= newest:
        return None
    here = -steps
    return (
        f"version {version + here} does not exist here",
        f"read version {newest + here}, or an older one, all over its batch",
    )
