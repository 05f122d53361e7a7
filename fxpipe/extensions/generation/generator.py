"""Generation of many sequences at once, over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.arguments import check_whole
from fxpipe.errors import InputError
from fxpipe.extensions.generation.in_place import InPlace

Prompt = Sequence[int] | Tensor


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each sequence: sequences × vocabulary → sequences."""
    return logits.argmax(-1)


class Generator:
    """Generates with a causal language model of transformers, cut into stages over devices.

    Each stage keeps the keys and values of its own layers, in a row for each sequence. A step gives
    every row its next tokens: the one that it has just generated, or the next ``chunk`` of its
    prompt. The rows are the samples of a batch, so its micro-batches follow each other through the
    stages as in training. A row whose sequence has ended takes the next prompt at once, while the
    others go on (continuous batching; Orca, Yu et al., OSDI 2022).

    Attributes:
        pipe: the pipeline, in evaluation mode.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Any,
        *,
        rows: int = 8,
        length: int = 512,
        chunk: int = 32,
        microbatches: int | None = None,
        choose: Callable[[Tensor], Tensor] = greedy,
        **options: Any,
    ) -> None:
        """Cut the model; it is compiled at the first step.

        Args:
            model: such as ``LlamaForCausalLM``; its parameters stay its own.
            devices: as for ``fxpipe.compile``.
            rows: how many sequences are generated at once.
            length: the most tokens of a sequence, with its prompt. Caches have this size from the
                start: 2 × layers × rows × (length + 1) × heads of keys × head size.
            chunk: how many tokens of a prompt are read in one step.
            microbatches: as for ``fxpipe.compile``, but at most ``rows``. Many small ones are slow
                where operations are short; one for each device is a good first choice.
            choose: logits (sequences × vocabulary) → the next token of each sequence; over ranks it
                must choose alike on all of them.
            options: further arguments of ``fxpipe.compile``, such as ``partition``.

        Raises:
            InputError: a number is not a whole number from 1 on, transformers is not installed, or
                the model has no configuration of transformers or has layers that do not attend to
                all earlier positions.
        """
        for name, value in {"rows": rows, "length": length, "chunk": chunk}.items():
            check_whole(name, value, 1)
        if find_spec("transformers") is None:
            raise InputError(
                "Generator runs models of transformers; pip install fxpipe[generation]"
            )
        from fxpipe.extensions.generation.decoder import Decoder

        self.rows, self.length, self.chunk = rows, length, chunk
        self._choose = choose
        extensions = [*options.pop("extensions", ()), InPlace()]
        decoder = Decoder(model, rows, length).eval()
        self.pipe = fxpipe.compile(
            decoder, devices, microbatches=microbatches, extensions=extensions, **options
        )

    def generate(
        self, prompts: Iterable[Prompt], most: int, end: int | None = None
    ) -> list[Tensor]:
        """Generate after each prompt.

        Args:
            prompts: token numbers; their lengths may differ.
            most: how many tokens are generated at most.
            end: the token that ends a sequence.

        Returns:
            For each prompt the generated tokens, without the prompt.

        Raises:
            InputError: a prompt is empty, or has with ``most`` more tokens than ``length``.
        """
        done = dict(self.serve(prompts, most, end))
        return [done[number] for number in range(len(done))]

    def serve(
        self, prompts: Iterable[Prompt | None], most: int, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Generate after prompts as they come. Yields the number of each prompt with its generated
        tokens as soon as these have ended.

        The next prompt is asked for when a row is free; None means that none is waiting just now.
        Arguments and errors are those of ``generate``.
        """
        check_whole("most", most, 1)
        source, number = iter(prompts), 0
        rows: list[_Sequence | None] = [None] * self.rows
        asking = True
        while asking or any(rows):
            for row, taken in enumerate(rows):
                if taken is not None or not asking:
                    continue
                try:
                    prompt = next(source)
                except StopIteration:
                    asking = False
                    break
                if prompt is None:
                    break
                rows[row] = self._begun(number, prompt, most, end)
                number += 1
            if any(rows):
                self._step(rows)
            for row, taken in enumerate(rows):
                if taken is not None and taken.ended:
                    rows[row] = None
                    yield taken.number, torch.tensor(taken.generated)

    def close(self) -> None:
        """End the pipeline's threads."""
        self.pipe.close()

    def _begun(self, number: int, prompt: Prompt, most: int, end: int | None) -> _Sequence:
        tokens = [int(token) for token in prompt]
        if not tokens or len(tokens) + most > self.length:
            raise InputError(
                f"prompt {number} has {len(tokens)} tokens, and with most={most} at least one and "
                f"at most {self.length - most} fit; shorten it, or give Generator(..., length=)"
            )
        return _Sequence(number, tokens, most, end)

    def _step(self, rows: Sequence[_Sequence | None]) -> None:
        """Give every row its next tokens."""
        reading = any(row is not None and len(row.next) > 1 for row in rows)
        width = self.chunk if reading else 1
        tokens = torch.zeros(self.rows, width, dtype=torch.int64)
        positions = torch.full_like(tokens, self.length)
        last = torch.zeros(self.rows, dtype=torch.int64)
        for index, row in enumerate(rows):
            if row is not None:
                part = row.next[:width]
                tokens[index, : len(part)] = torch.tensor(part)
                positions[index, : len(part)] = torch.arange(row.read, row.read + len(part))
                last[index] = len(part) - 1
        with torch.no_grad():
            chosen = self._choose(self.pipe(tokens, torch.arange(self.rows), positions, last))
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row is not None:
                row.take(width, token)


@dataclass
class _Sequence:
    """A sequence that a row generates.

    Attributes:
        next: the tokens that the model has not read yet.
        read: how many it has read.
    """

    number: int
    next: list[int]
    most: int
    end: int | None
    read: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return len(self.generated) == self.most or self.end in self.generated[-1:]

    def take(self, width: int, token: int) -> None:
        """Note that ``width`` tokens are read, after which the model chose this one."""
        self.read += min(width, len(self.next))
        self.next = self.next[width:]
        if not self.next:
            self.generated.append(token)
            self.next = [token]
