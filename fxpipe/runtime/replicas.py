"""What the replicas of a pipeline give each other: sums of gradients, and parts of new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.ir import instruction as ins

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


def reduce_scatter(machine: Machine, instruction: ins.ReduceScatter) -> None:
    stage, batch = instruction.stage, instruction.batch
    gradients = machine.store.gradients.pop((stage, batch), [])
    machine.channels.reduce_scatter(machine.device, stage, machine.step + batch, gradients, -1)


def all_gather(machine: Machine, instruction: ins.AllGather) -> None:
    stage, batch = instruction.stage, instruction.batch
    buckets = machine.program.buckets.get(stage, 1)
    sums = machine.channels.all_gather(machine.device, stage, machine.step + batch, buckets)
    machine.store.gradients[stage, batch] = sums


def take_part(machine: Machine, instruction: ins.TakePart) -> None:
    stage, batch = instruction.stage, instruction.batch
    buckets = machine.program.buckets.get(stage, 1)
    part = machine.channels.take_part(machine.device, stage, machine.step + batch, buckets)
    machine.store.gradients[stage, batch] = part


def gather_weights(machine: Machine, instruction: ins.GatherWeights) -> None:
    stage, batch = instruction.stage, machine.step + instruction.batch
    parts = machine.channels.gather_weights(machine.device, stage, batch)
    machine.weights.gather(stage, batch + 1, parts)
