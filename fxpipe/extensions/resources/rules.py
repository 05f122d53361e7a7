"""What a stage has besides buffers, such as its whole weights, is there where it is needed.

Instructions declare what they require, provide and remove. The first step begins with what the
first instruction removes that changes anything of a stage, and each later step with what the one
before it has left. Where nothing changes anything, a stage has its weights and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.ir import instruction as ins
from fxpipe.ir.effects import WEIGHTS
from fxpipe.ir.program import Program
from fxpipe.ir.walk import Place
from fxpipe.text.program import print_instruction
from fxpipe.verify.run import AbstractRun

Owned = tuple[str, int]
"""A resource and its stage."""


def misused(ran: AbstractRun) -> Iterator[tuple[Place, ins.Wrong]]:
    """Yield each instruction that requires or removes what its stage has not, or provides what it
    has already; or that waits for an exchange that nothing has begun."""
    program = ran.program
    for device, row in enumerate(program.lists):
        begun: set[object] = set()
        for at, x in ran.lives[device]:
            begun.add(x.begins(program))
            if not x.needs and x.awaits(program) not in {None, *begun}:
                what = "its batch begins nothing before it that it could wait for"
                yield Place(device, at), (what, "begin that before it")
        # moves and meetings have no stage
        own = [(at, x) for at, x in enumerate(row) if x.requires or x.provides or x.removes]
        changes = [(at, x) for at, x in own if x.provides or x.removes]
        if not changes and all(x.requires == (WEIGHTS,) for _, x in own):
            continue
        found = _Device(program, device).run(own, changes)
        yield from ((Place(device, at), wrong) for at, wrong in sorted(found.items()))


class _Device:
    def __init__(self, program: Program, device: int) -> None:
        self._program, self._device = program, device
        self._there: set[Owned] = set()
        self._last: dict[Owned, int] = {}  # the position that has provided or removed it last

    def run(
        self,
        own: Sequence[tuple[int, ins.Instruction]],
        changes: Sequence[tuple[int, ins.Instruction]],
    ) -> dict[int, ins.Wrong]:
        """Run so many steps that each batch is in flight beside all others, and the flush. Returns
        position → what is wrong at its first run."""
        for at, x in changes:
            if x.stage not in {stage for _, stage in self._last}:
                self._there.update((kind, x.stage) for kind in x.removes)
            for kind in (*x.removes, *x.provides):
                self._last[kind, x.stage] = at
        depth, found = self._program.depth, dict[int, ins.Wrong]()
        for step in range(2 * depth + 2):
            for at, x in own:
                if not depth or 0 <= step + x.batch <= depth + 1:
                    if (wrong := self._wrong(x)) is not None:
                        found.setdefault(at, wrong)
                    self._change(at, x)
        return found

    def _change(self, at: int, x: ins.Instruction) -> None:
        for kind in (*x.removes, *x.provides):
            self._last[kind, x.stage] = at
        self._there.difference_update((kind, x.stage) for kind in x.removes)
        self._there.update((kind, x.stage) for kind in x.provides)

    def _wrong(self, x: ins.Instruction) -> ins.Wrong | None:
        for kind in (*x.requires, *x.removes):
            if not self._has(kind, x.stage):
                return self._lacking(kind, x.stage)
        for kind in x.provides:
            if kind not in x.removes and self._has(kind, x.stage):
                where = self._where(kind, x.stage)
                return f"stage {x.stage} has the {kind} already{where}", "keep one"
        return None

    def _has(self, kind: str, stage: int) -> bool:
        owned = kind, stage
        return owned in self._there or (kind == WEIGHTS and owned not in self._last)

    def _lacking(self, kind: str, stage: int) -> ins.Wrong:
        what = f"it needs the {kind} of stage {stage}"
        if (where := self._where(kind, stage)) == "":
            return f"{what}, which nothing on this device provides", "provide them before it"
        return f"{what}, which are gone{where}", "provide them anew before it, or remove them later"

    def _where(self, kind: str, stage: int) -> str:
        at = self._last.get((kind, stage))
        if at is None:
            return ""
        return f": {print_instruction(self._program.lists[self._device][at])}, position {at}"
