"""The instructions of a Program, one class each. Every backend and every tool handles them all.

What handles several of them imports this module as ``ins``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.value import Buffer


@dataclass(frozen=True, slots=True)
class Move:
    """What does something with one buffer."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Load(Move):
    """Take a value of this micro-batch from the caller. Roughly: buffers[b] = host.give(b)."""


@dataclass(frozen=True, slots=True)
class Output(Move):
    """Hand a value to the caller. Roughly: host.take(b, buffers[b])."""


@dataclass(frozen=True, slots=True)
class Send(Move):
    """Send to the next stage's device, or a gradient back. Roughly: peer.put(b, buffers[b])."""


@dataclass(frozen=True, slots=True)
class Receive(Move):
    """Wait for what a peer sends. Roughly: buffers[b] = self.get(b)."""


@dataclass(frozen=True, slots=True)
class Stash(Move):
    """Send a value over the stages between, straight to its consumer."""


@dataclass(frozen=True, slots=True)
class Pop(Move):
    """Wait for a value that was stashed for this stage."""


@dataclass(frozen=True, slots=True)
class Free(Move):
    """Drop a buffer. Roughly: del buffers[b]."""


@dataclass(frozen=True, slots=True)
class Offload(Move):
    """Begin to store what a stage keeps outside of the device's memory; never waits.

    Free of what it kept waits for it. Roughly: buffers[b] = store.begin(buffers[saved]).
    """


@dataclass(frozen=True, slots=True)
class Prefetch(Move):
    """Begin to bring it back. Roughly: buffers[b] = buffers.pop(offloaded).begin()."""

    @property
    def stored(self) -> Buffer:
        """What is brought back."""
        return self.buffer._replace(kind="offloaded")


@dataclass(frozen=True, slots=True)
class Await(Move):
    """Wait until it is back. Roughly: buffers[b] = buffers.pop(fetching).wait()."""


@dataclass(frozen=True, slots=True)
class Compute:
    """What runs a graph of a stage for one micro-batch.

    Attributes:
        stage: the stage.
        microbatch: the micro-batch.
        version: of the weights: 0 is the one that this step's number of updates has made, −1 the
            one before it; none is older than the first.
        batch: 0 for this step's, −1 for the one before.
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
        again: whether it will be recomputed, and so keeps the buffers that it reads.
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
        rest: whether partial backwards have run it up to their last bucket; then it runs the rest.
    """

    rest: bool = False


@dataclass(frozen=True, slots=True)
class PartialBackward(Compute):
    """Run a backward up to where a bucket of gradients is complete, and begin to sum these.

    Roughly: saved, g = backward(saved, output_gradients); reduce_scatter(gradients[bucket] + g).
    It is part of the Backward or WeightGrad that follows it.

    Attributes:
        kind: the letter of that: "B" or "W".
        bucket: which one, from 0. What no partial backward completes is the last one.
    """

    kind: str = "B"
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class InputGrad(Compute):
    """The half of a backward that other stages wait for; it uses up ``saved``.

    Roughly: input_gradients, deferred = input_grad(saved, output_gradients).
    """


@dataclass(frozen=True, slots=True)
class WeightGrad(Compute):
    """The other half, which uses up ``deferred``.

    Roughly: gradients[stage] += weight_grad(deferred).

    Attributes:
        rest: as of a Backward.
    """

    rest: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Run a user's own task. Roughly: KINDS[kind].run(stage, parameters, gradients).

    Attributes:
        kind: the letter of its kind.
        stage: the stage.
        microbatch: the micro-batch, or None for a task once a step.
        version: of the weights that it may read.
        batch: 0 for this step's, −1 for the one before.
    """

    kind: str
    stage: int
    microbatch: int | None = None
    version: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class OncePerStep:
    """What does something for a stage once a step.

    Attributes:
        stage: the stage.
        batch: 0 for this step's, −1 for the one before.
    """

    stage: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class ReduceScatter(OncePerStep):
    """Begin to sum what is left of a stage's gradients over the replicas. It waits for nobody.

    Each replica sums one part of them. Roughly: peers[r].put(part) for r, part in parts(gradients).
    """


@dataclass(frozen=True, slots=True)
class AllGather(OncePerStep):
    """Wait for the sums of all replicas. Roughly: gradients[stage] = [peer.sum() for each peer].

    They are a stage's gradients from then on.
    """


@dataclass(frozen=True, slots=True)
class TakePart(OncePerStep):
    """Wait for the sum of this replica's part of them. Roughly: gradients[stage] = self.sum().

    It is a stage's gradients from then on: what the replica needs where optimizers are sharded.
    """


@dataclass(frozen=True, slots=True)
class GatherWeights(OncePerStep):
    """Wait for the parts of new weights. Roughly: weights[batch + 1] = [part() for each peer].

    The updates of all replicas have made and sent them; ``batch`` is whose update it was.
    """


@dataclass(frozen=True, slots=True)
class Share(OncePerStep):
    """Give a stage's weights to its copies. Roughly: copy.put(weights[stage]) for each copy."""


@dataclass(frozen=True, slots=True)
class Give:
    """On a copy of a stage: give its gradients to the stage's own device, which adds them.

    Roughly: home.put(gradients.pop(stage)).

    Attributes:
        stage: the stage.
        copy: the device of the copy.
        batch: 0 for this step's, −1 for the one before.
    """

    stage: int
    copy: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Add(OncePerStep):
    """Add what the copies of a stage give, in the order of their devices.

    Roughly: gradients[stage] += sums for each copy.
    """


@dataclass(frozen=True, slots=True)
class Norm(OncePerStep):
    """Tell all stages the norms of a stage's gradients. Roughly: norms = [g.norm() for g in …]."""


@dataclass(frozen=True, slots=True)
class Clip(OncePerStep):
    """Scale a stage's gradients by the norm of those of all stages.

    Roughly: gradients[stage] *= min(1, limit / norm(all norms)).
    """


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every device is here, so that no weight changes before all gradients exist."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Give control back to the caller until it resumes the program with more to load."""


@dataclass(frozen=True, slots=True)
class Update:
    """Step a stage's optimizer. Roughly: weights[writes] = optimizer(weights[reads], gradients).

    Where optimizers are sharded it is a replica's part of them, which the others are sent.

    Attributes:
        stage: the stage.
        reads: the newest version, as Forward counts them.
        writes: the next one.
        batch: whose gradients it uses: 0 for this step's, −1 for the one before.
    """

    stage: int
    reads: int = 0
    writes: int = 1
    batch: int = 0


Sending = Send | Stash
"""What takes a value to another device."""

Receiving = Receive | Pop
"""What brings one from there."""

Arrival = Load | Receiving
"""What brings a value to a device."""

Meeting = Barrier | Pause
"""Where all devices wait for each other."""

Offloading = Offload | Prefetch | Await
"""What goes on beside the computations of a device, and what waits for that."""

Moving = Load | Output | Sending | Receiving | Offloading | Free
Computing = Forward | Recompute | PartialBackward | Backward | InputGrad | WeightGrad
Gathering = AllGather | TakePart | GatherWeights
"""What waits for the other replicas."""

Summing = ReduceScatter | Gathering
"""What sums gradients over the replicas, and gathers the weights that each has updated."""

Copying = Share | Give | Add
"""What a stage and its copies on other devices have to do with each other."""

Instruction = Moving | Computing | Run | Summing | Copying | Norm | Clip | Update | Meeting
"""Any of them, named one by one so that mypy finds what does not handle them all."""

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
"""Instruction → the letter of the task that it runs; some have that of their own ``kind``."""

Lettered = Run | PartialBackward
"""Those with a letter of their own."""


def letter_of(instruction: Instruction) -> str | None:
    """The letter of the task that an instruction runs; None for one that computes nothing."""
    letter = LETTERS.get(type(instruction))
    if letter is None and isinstance(instruction, Lettered):
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
"""Every opcode by its word in the text."""
