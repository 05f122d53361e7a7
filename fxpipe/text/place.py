"""The ``place`` line of schedules and programs: which stages each device holds."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.text.scan import Scanner

_EMPTY = "-"


def print_place(placement: tuple[int, ...], devices: int) -> str:
    """``place 0 7 | 1 6 | -``: the stages of each device, and ``-`` for a device without any."""
    held: list[list[str]] = [[] for _ in range(devices)]
    for stage, device in enumerate(placement):
        if 0 <= device < devices:  # the verifier reports the others; printing must not fail
            held[device].append(str(stage))
    return "place " + " | ".join(" ".join(stages) or _EMPTY for stages in held)


def parse_place(scan: Scanner, stages: int | None = None) -> tuple[list[int], ...]:
    """Read such a line: device → its stages.

    Args:
        scan: the line, from its first word on.
        stages: the number of stages if it is known already.

    Raises:
        ParseError: a stage is out of range, has no device, or has two.
    """
    scan.literal("place", "'place' and the stages of each device, such as place 0 | 1")
    scan.gap("the stages of device 0")
    homes: dict[int, int] = {}
    held = [_cell(scan, 0, stages, homes)]
    while not scan.ended():
        scan.literal("|", "'|' between the stages of two devices")
        scan.blanks()
        held.append(_cell(scan, len(held), stages, homes))
    for stage in range(len(homes) if stages is None else stages):
        if stage not in homes:
            raise scan.error(f"stage {stage} has no device; name it in one of the places")
    return tuple(held)


def placement_of(held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Stage → device, from device → its stages."""
    homes = {stage: device for device, stages in enumerate(held) for stage in stages}
    return tuple(homes[stage] for stage in range(len(homes)))


def _cell(scan: Scanner, device: int, stages: int | None, homes: dict[int, int]) -> list[int]:
    """The stages of one device; noted in ``homes`` too."""
    cell: list[int] = []
    if scan.text.startswith(_EMPTY, scan.at):
        scan.literal(_EMPTY)
        return cell
    while not cell or not (scan.ended() or scan.text.startswith("|", scan.at)):
        start = scan.at
        stage = scan.number(f"a stage of device {device}, or '-' where it holds none")
        if stages is not None and stage >= stages:
            raise scan.error(f"there is no stage {stage}; the header says stages={stages}", start)
        if stage in homes:
            raise scan.error(
                f"stage {stage} is on device {homes[stage]} already; give it one device", start
            )
        homes[stage] = device
        cell.append(stage)
    return cell
