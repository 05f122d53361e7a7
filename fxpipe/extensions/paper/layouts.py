"""How the devices of a cluster are shared among replicas, stages and tensor-parallel groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fxpipe.errors import InputError
from fxpipe.extensions.paper.cluster import Cluster
from fxpipe.extensions.simulator.costs import Link

LARGEST_PIPELINE = 128
"""The most devices of a pipeline that is planned."""


@dataclass(frozen=True)
class Layout:
    """The places of a pipeline's devices.

    Devices of a tensor-parallel group are next to each other; then come those of the other replicas
    of the same stage, and last those of other stages, or the other way round.

    Attributes:
        cluster: the devices.
        replicas: of the pipeline.
        group: how many devices work on a stage together.
        stages: how many devices, or groups of devices, a pipeline has.
        replicas_near: whether replicas of a stage are nearer to each other than stages.
    """

    cluster: Cluster
    replicas: int
    group: int
    stages: int
    replicas_near: bool = False

    @property
    def shape(self) -> dict[str, int]:
        """The dimensions of the mesh, by name, the outermost first."""
        outer = ("pp", "dp") if self.replicas_near else ("dp", "pp")
        sizes = {"dp": self.replicas, "pp": self.stages, "tp": self.group}
        return {name: sizes[name] for name in (*outer, "tp")}

    def device(self, replica: int, stage: int) -> int:
        """The first device of a group, by its number in the cluster."""
        if self.replicas_near:
            return (stage * self.replicas + replica) * self.group
        return (replica * self.stages + stage) * self.group

    @cached_property
    def links(self) -> dict[tuple[int, int], Link]:
        """(from, to) → the link between two devices of the first pipeline, and from a device to
        itself that to the other replicas. What a device sends over one level takes one link."""
        found: dict[tuple[int, int], Link] = {}
        level = self.cluster.level
        links = self.cluster.links
        for a in range(self.stages):
            here = self.device(0, a)
            for b in range(self.stages):
                if a != b:
                    found[a, b] = links[level(here, self.device(0, b))]
            if self.replicas > 1:
                others = [level(here, self.device(r, a)) for r in (1, self.replicas - 1)]
                found[a, a] = links[max(others)]
        return found

    @property
    def group_link(self) -> Link:
        """The link inside of a tensor-parallel group."""
        return self.cluster.link_between(0, self.group - 1)

    def __str__(self) -> str:
        text = f"dp {self.replicas} × pp {self.stages}"
        return text + (f" × tp {self.group}" if self.group > 1 else "")


def layouts(
    cluster: Cluster,
    *,
    divided: bool,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
) -> Iterator[Layout]:
    """All layouts that use every device of a cluster.

    Args:
        cluster: the cluster.
        divided: whether stages may be divided by tensor parallelism, within a host.
        dp: the number of replicas, if it is given.
        tp: likewise, of devices of a group.
        pp: likewise, of stages.

    Raises:
        InputError: a number that is given does not divide the devices.
    """
    total, host = cluster.devices, cluster.counts[0]
    for name, size, of in (("dp", dp, total), ("tp", tp, host), ("pp", pp, total)):
        if size is not None and (not isinstance(size, int) or size < 1 or of % size):
            what = "devices of a host" if name == "tp" else "devices"
            raise InputError(f"{name} is {size!r}; give a number that divides the {of} {what}")
    given = (dp or 1) * (tp or 1) * (pp or 1)
    if total % given:
        raise InputError(
            f"dp, tp and pp are {dp}, {tp} and {pp}, which do not divide the {total} devices of "
            f"{cluster}; give others"
        )
    if tp is not None and tp > 1 and not divided:
        raise InputError(
            f'tp is {tp}; say how submodules are divided: tensors={{"layers.*.attn": '
            '"columns/rows"}'
        )
    for group in [tp] if tp else _divisors(host if divided else 1):
        for stages in [pp] if pp else _divisors(total // group):
            replicas, rest = divmod(total, group * stages)
            if rest or stages > LARGEST_PIPELINE or (dp is not None and replicas != dp):
                continue
            layout = Layout(cluster, replicas, group, stages)
            yield layout
            other = Layout(cluster, replicas, group, stages, replicas_near=True)
            if (
                len(cluster.counts) > 1
                and min(stages, replicas) > 1
                and layout.links != other.links
            ):
                yield other


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]
