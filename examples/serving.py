"""Serve requests as they come, with a language model that is cut into stages over two devices.

Each client sends a prompt and waits for its answer before it sends the next. The generator takes a
request as soon as a row is free, and goes on with the other rows meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, Queue
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe

CLIENTS, PROMPTS, MOST, WORDS = 5, 3, 8, 100


class Request(NamedTuple):
    prompt: list[int]
    answer: Future[Tensor]


def built() -> LlamaForCausalLM:
    """A small model with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **sizes)).eval()


def client(number: int, inbox: Queue[Request | None]) -> list[tuple[list[int], list[int]]]:
    """Send prompts of several lengths, one after another; returns them with their answers."""
    told = []
    for turn in range(PROMPTS):
        prompt, start = [number + 1] * (1 + 3 * turn), perf_counter()
        answer: Future[Tensor] = Future()
        inbox.put(Request(prompt, answer))
        told.append((prompt, answer.result().tolist()))
        print(f"client {number}: {len(prompt)} tokens answered in {perf_counter() - start:.2f} s")
    return told


def serve(generator: fxpipe.Generator, inbox: Queue[Request | None]) -> None:
    """Answer requests until there is None among them."""
    open_requests: dict[int, Future[Tensor]] = {}

    def prompts() -> Iterator[list[int] | None]:
        number = 0
        while True:
            try:
                request = inbox.get(block=not open_requests)  # idle: wait for the next
            except Empty:
                yield None  # none just now: the rows in use go on
                continue
            if request is None:
                return
            open_requests[number], number = request.answer, number + 1
            yield request.prompt

    for number, tokens in generator.serve(prompts(), most=MOST):
        open_requests.pop(number).set_result(tokens)


def main() -> list[tuple[list[int], list[int]]]:
    """Serve some clients; returns all prompts and answers."""
    inbox: Queue[Request | None] = Queue()
    generator = fxpipe.Generator(built(), ["cpu", "cpu"], rows=4, length=32, chunk=4)
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        clients = [threads.submit(client, number, inbox) for number in range(CLIENTS)]

        def end() -> None:
            wait(clients)
            inbox.put(None)

        threads.submit(end)
        serve(generator, inbox)
    generator.close()
    return [told for each in clients for told in each.result()]


if __name__ == "__main__":
    main()
