"""The instructions of a Program, one class each. Other modules import this one as ``ins``."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.value import Buffer


@dataclass(frozen=True, slots=True)
class Move:
    """Base of the instructions that move, make or drop one buffer."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Load(Move):
    """Take a value from the caller. Roughly: buffers[b] = host.give(b)."""


@dataclass(frozen=True, slots=True)
class Output(Move):
    """Hand a value to the caller. Roughly: host.take(b, buffers[b])."""


@dataclass(frozen=True, slots=True)
class Send(Move):
    """Send a value to the next stage, or a gradient back. Roughly: peer.put(b, buffers[b])."""


@dataclass(frozen=True, slots=True)
class Receive(Move):
    """Wait for a value that another device sends. Roughly: buffers[b] = self.get(b)."""


@dataclass(frozen=True, slots=True)
class Stash(Move):
    """Send a value past the next stage, straight to the stage that uses it."""


@dataclass(frozen=True, slots=True)
class Pop(Move):
    """Wait for a value that was stashed for this stage."""


@dataclass(frozen=True, slots=True)
class Free(Move):
    """Drop a buffer. Roughly: del buffers[b]."""


@dataclass(frozen=True, slots=True)
class Offload(Move):
    """Begin to copy what a stage keeps out of the device's memory; it waits for nothing.

    The Free of what was kept waits for the copy. Roughly: buffers[b] = store.begin(buffers[saved]).
    """


@dataclass(frozen=True, slots=True)
class Prefetch(Move):
    """Begin to bring back what was offloaded.

    Roughly: buffers[b] = buffers.pop(offloaded).begin().
    """

    @property
    def stored(self) -> Buffer:
        """The buffer that is brought back."""
        return self.buffer._replace(kind="offloaded")


@dataclass(frozen=True, slots=True)
class Await(Move):
    """Wait until a prefetch is done. Roughly: buffers[b] = buffers.pop(fetching).wait()."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Base of the instructions that run a graph of a stage for one micro-batch.

    Attributes:
        version: the version of the weights. In step t, 0 is the version that t updates have made,
            −1 the one before it; a version older than the first stands for the first.
        batch: 0 for this step's batch, −1 for the one before.
    """

    stage: int
    microbatch: int
    version: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Forward(Compute):
    """Run a stage's forward graph. Roughly: outputs, saved = forward(weights[version], inputs).

    Attributes:
        keeps: whether it keeps what its backward needs.
        again: whether it will be recomputed, for which it keeps the buffers that it reads.
    """

    keeps: bool = True
    again: bool = False


@dataclass(frozen=True, slots=True)
class Recompute(Compute):
    """Run a stage's forward graph once more, for what its backward needs.

    Roughly: _, saved = forward(weights[version], inputs), with the buffers of the first time.
    """


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """Run a stage's backward graph, which uses up ``saved``, and add to its gradients.

    Roughly: input_gradients, g = backward(saved, output_gradients); gradients[stage] += g.

    Attributes:
        rest: whether partial backwards have run up to the last bucket, so that only that is left.
    """

    rest: bool = False


@dataclass(frozen=True, slots=True)
class PartialBackward(Compute):
    """Run a backward until a bucket of gradients is complete, and begin to sum that.

    Roughly: saved, g = backward(saved, output_gradients); reduce_scatter(gradients[bucket] + g).
    It is part of the Backward or WeightGrad that follows it, which completes the last bucket.

    Attributes:
        kind: "B" for a part of a Backward, "W" for a part of a WeightGrad.
        bucket: the bucket, from 0.
    """

    kind: str = "B"
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class InputGrad(Compute):
    """Run the half of a backward that other stages wait for; it uses up ``saved``.

    Roughly: input_gradients, deferred = input_grad(saved, output_gradients).
    """


@dataclass(frozen=True, slots=True)
class WeightGrad(Compute):
    """Run the other half of a backward; it uses up ``deferred``.

    Roughly: gradients[stage] += weight_grad(deferred).

    Attributes:
        rest: as in Backward.
    """

    rest: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Run a user's own task. Roughly: KINDS[kind].run(stage, parameters, gradients).

    Attributes:
        kind: the letter of its kind.
        microbatch: the micro-batch, or None for a task once a step.
        version: the version of the weights that it may read, as in Compute.
        batch: 0 for this step's batch, −1 for the one before.
    """

    kind: str
    stage: int
    microbatch: int | None = None
    version: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class OncePerStep:
    """Base of the instructions that run for a stage once a step.

    Attributes:
        batch: 0 for this step's batch, −1 for the one before.
    """

    stage: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class ReduceScatter(OncePerStep):
    """Begin to sum the rest of a stage's gradients over the replicas; it waits for nothing.

    Each replica sums one part. Roughly: peers[r].put(part) for r, part in parts(gradients).
    """


@dataclass(frozen=True, slots=True)
class AllGather(OncePerStep):
    """Wait for the sums of all replicas. Roughly: gradients[stage] = [peer.sum() for each peer].

    From then on the sums are the stage's gradients.
    """


@dataclass(frozen=True, slots=True)
class TakePart(OncePerStep):
    """Wait for this replica's part of the sums. Roughly: gradients[stage] = self.sum().

    From then on it is the stage's gradients: all that the replica needs with sharded optimizers.
    """


@dataclass(frozen=True, slots=True)
class GatherWeights(OncePerStep):
    """Wait for all parts of new weights. Roughly: weights[batch + 1] = [part() for each peer].

    The update of ``batch`` on each replica has made its part and sent it.
    """


@dataclass(frozen=True, slots=True)
class Share(OncePerStep):
    """Send a stage's weights to its copies. Roughly: copy.put(weights[stage]) for each copy."""


@dataclass(frozen=True, slots=True)
class Give:
    """On a copy of a stage: send its gradients to the stage's own device, which adds them.

    Roughly: home.put(gradients.pop(stage)).

    Attributes:
        copy: the device of the copy.
        batch: 0 for this step's batch, −1 for the one before.
    """

    stage: int
    copy: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Add(OncePerStep):
    """Add the gradients that the copies of a stage give, in the order of their devices.

    Roughly: gradients[stage] += sums for each copy.
    """


@dataclass(frozen=True, slots=True)
class Norm(OncePerStep):
    """Send a stage's gradient norms to all stages. Roughly: norms = [g.norm() for g in …]."""


@dataclass(frozen=True, slots=True)
class Clip(OncePerStep):
    """Scale a stage's gradients by the norm over all stages.

    Roughly: gradients[stage] *= min(1, limit / norm(all norms)).
    """


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every device is here, so that no weight changes before all gradients exist."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Give control back to the caller, who resumes the program with more to load."""


@dataclass(frozen=True, slots=True)
class Update:
    """Step a stage's optimizer. Roughly: weights[writes] = optimizer(weights[reads], gradients).

    Where optimizers are sharded, each replica updates a part and sends it to the others.

    Attributes:
        reads: the newest version, counted as in Compute.
        writes: the next version.
        batch: the batch whose gradients it uses: 0 for this step's, −1 for the one before.
    """

    stage: int
    reads: int = 0
    writes: int = 1
    batch: int = 0


Sending = Send | Stash
"""Instructions that take a value to another device."""

Receiving = Receive | Pop
"""Instructions that wait for a value from another device."""

Arrival = Load | Receiving
"""Instructions that bring a value to a device."""

Meeting = Barrier | Pause
"""Instructions at which all devices wait for each other."""

Offloading = Offload | Prefetch | Await
"""Copies that go on beside the computations of a device, and the wait for them."""

Moving = Load | Output | Sending | Receiving | Offloading | Free
Computing = Forward | Recompute | PartialBackward | Backward | InputGrad | WeightGrad
Gathering = AllGather | TakePart | GatherWeights
"""Instructions that wait for the other replicas."""

Summing = ReduceScatter | Gathering
"""Instructions that sum gradients over the replicas or gather the weights that each updated."""

Copying = Share | Give | Add
"""Instructions between a stage and its copies on other devices."""

Instruction = Moving | Computing | Run | Summing | Copying | Norm | Clip | Update | Meeting
"""Every instruction. They are listed one by one so that mypy reports code that misses one."""

LETTERS: dict[type[Instruction], str] = {
    Forward: "F",
    Recompute: "R",
    Backward: "B",
    InputGrad: "I",
    WeightGrad: "W",
    ReduceScatter: "A",
    Give: "A",
    Clip: "C",
    Update: "U",
}
"""Instruction → the letter of its task; ``Run`` and ``PartialBackward`` hold theirs in ``kind``."""


def letter_of(instruction: Instruction) -> str | None:
    """The letter of the task that an instruction runs; None for one that computes nothing."""
    letter = LETTERS.get(type(instruction))
    if letter is None and isinstance(instruction, Run | PartialBackward):
        return instruction.kind
    return letter


def batch_of(instruction: Instruction) -> int:
    """The batch that an instruction belongs to: 0 for this step's, −1 for the one before."""
    if isinstance(instruction, Move):
        return instruction.buffer.batch
    return 0 if isinstance(instruction, Meeting) else instruction.batch


OPCODES: dict[str, type[Instruction]] = {
    "load": Load,
    "output": Output,
    "send": Send,
    "recv": Receive,
    "stash": Stash,
    "pop": Pop,
    "offload": Offload,
    "prefetch": Prefetch,
    "await": Await,
    "forward": Forward,
    "recompute": Recompute,
    "partial_backward": PartialBackward,
    "backward": Backward,
    "input_grad": InputGrad,
    "weight_grad": WeightGrad,
    "run": Run,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "take_part": TakePart,
    "gather_weights": GatherWeights,
    "share": Share,
    "give": Give,
    "add": Add,
    "norm": Norm,
    "clip": Clip,
    "free": Free,
    "barrier": Barrier,
    "pause": Pause,
    "update": Update,
}
"""Opcode, as texts of programs have it → instruction."""
