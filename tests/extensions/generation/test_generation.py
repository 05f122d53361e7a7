"""Generation over stages gives the tokens of the model's own ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import InputError
from tests.helpers.ranks import DeviceMesh, on_ranks

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MOST, LENGTH = 6, 24


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=32, **options
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**SMALL, intermediate_size=32)
    model: nn.Module = transformers.GPTNeoXForCausalLM(config)
    return model


def exact(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in float64, where rounding changes no token."""
    torch.manual_seed(0)
    return make().double().eval()


def own_tokens(model: nn.Module, prompt: list[int], end: int | None = None) -> list[int]:
    """What the model generates alone, reading all tokens again for each new one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + MOST:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == end:
            break
    return tokens[len(prompt) :]


PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13], [20, 21], [30, 31, 32, 33, 34]]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "make",
    [llama, pytest.param(gpt2, marks=pytest.mark.deep), pytest.param(neox, marks=pytest.mark.deep)],
)
def test_prompts_of_all_lengths_give_the_tokens_of_the_model_alone(
    make: Callable[[], nn.Module],
) -> None:
    model = exact(make)
    expected = [own_tokens(model, prompt) for prompt in PROMPTS]
    generator = fxpipe.Generator(model, 2, rows=3, length=LENGTH, chunk=4)
    again = [generator.generate(PROMPTS, MOST) for _ in range(2)]
    generator.close()
    for results in again:
        assert [tokens.tolist() for tokens in results] == expected


def over(mesh: DeviceMesh) -> list[list[int]]:
    generator = fxpipe.Generator(exact(llama), mesh, rows=2, length=LENGTH, chunk=4)
    made = [tokens.tolist() for tokens in generator.generate(PROMPTS, MOST)]
    generator.close()
    return made


def test_every_rank_gets_the_tokens() -> None:
    model = exact(llama)
    expected = [own_tokens(model, prompt) for prompt in PROMPTS]
    assert on_ranks(2, over) == [expected, expected]


def test_a_free_row_takes_the_next_prompt_while_others_go_on() -> None:
    model = exact(llama)
    expected = [own_tokens(model, prompt) for prompt in PROMPTS]
    end = expected[0][1]  # so that the first sequence ends early
    wanted = {number: own_tokens(model, prompt, end) for number, prompt in enumerate(PROMPTS)}
    generator = fxpipe.Generator(model, 2, rows=2, length=LENGTH, chunk=4)
    asked: list[int] = []

    def prompts() -> Iterator[list[int] | None]:
        for number, prompt in enumerate(PROMPTS):
            yield None  # nothing is waiting just now
            asked.append(number)
            yield prompt

    done: dict[int, list[int]] = {}
    for number, tokens in generator.serve(prompts(), MOST, end):
        assert len(asked) - len(done) <= 2  # no prompt is asked for without a free row
        done[number] = tokens.tolist()
    generator.close()
    assert done == wanted


def test_choosing_sees_the_logits_of_the_last_tokens() -> None:
    model = exact(llama)
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return torch.full((2,), 5)

    generator = fxpipe.Generator(model, 2, rows=2, length=LENGTH, choose=choose)
    assert [t.tolist() for t in generator.generate([[1, 2], [3]], 2)] == [[5, 5], [5, 5]]
    generator.close()
    with torch.no_grad():
        first = model(torch.tensor([[1, 2]])).logits[0, -1]
        second = model(torch.tensor([[3, 5]])).logits[0, -1]
    torch.testing.assert_close(seen[0][0], first)
    torch.testing.assert_close(seen[1][1], second)


def test_caches_are_written_in_place() -> None:
    from fxpipe.extensions.generation.decoder import WRITE
    from fxpipe.extensions.generation.in_place import in_place

    class Cached(nn.Module):
        def forward(self, cache: torch.Tensor, kept: torch.Tensor, at: torch.Tensor) -> Any:
            written = WRITE(cache, [at], torch.ones(1))
            return written, WRITE(kept, [at], torch.ones(1)), kept * 2

    module = in_place(torch.fx.symbolic_trace(Cached()))
    cache, kept = torch.zeros(3), torch.zeros(3)
    written, other, twice = module(cache, kept, torch.tensor([1]))
    assert written is cache
    assert other.tolist() == [0, 1, 0]
    assert kept.tolist() == twice.tolist() == [0, 0, 0]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("prompt", "told"), [([], "prompt 1 has 0 tokens"), ([1] * 20, "at most 18 fit")]
)
def test_a_prompt_that_does_not_fit_is_named(prompt: list[int], told: str) -> None:
    generator = fxpipe.Generator(exact(llama), 2, rows=2, length=LENGTH)
    with pytest.raises(InputError, match=told):
        generator.generate([[1], prompt], MOST)
    generator.close()


def test_models_that_do_not_attend_to_all_positions_are_refused() -> None:
    config = transformers.MistralConfig(**SMALL, intermediate_size=32, sliding_window=8)
    with pytest.raises(InputError, match="a window of 8"):
        fxpipe.Generator(transformers.MistralForCausalLM(config), 2, length=LENGTH)
    with pytest.raises(InputError, match="Linear has no configuration of transformers"):
        fxpipe.Generator(nn.Linear(2, 2), 2)
