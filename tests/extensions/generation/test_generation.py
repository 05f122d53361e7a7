"""Tokens that stages generate are those of the model's own ``generate``."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extensions.generation import generate as generate_module
from fxpipe.extensions.generation.caches import states_of
from fxpipe.extensions.generation.generate import NAME, generate
from fxpipe.pipeline import Pipeline
from tests.helpers.ranks import on_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
RANKS = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Mistral": {**HEADS, "sliding_window": 6},
    "Gemma3Text": {
        **HEADS,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DeepseekV3": {
        **EXPERTS,
        **RANKS,
        "num_attention_heads": 2,
        "v_head_dim": 12,
        "moe_intermediate_size": 8,
    },
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
}
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 2},
    {"num_beams": 2},
]
BATCH: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}


def made(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **CONFIGS[name]})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


held_here = generate_module._held


def prompts(length: int = 7) -> dict[str, Tensor]:
    """Four of them, of which two are shorter."""
    words = torch.arange(4 * length).reshape(4, length) % 60 + 3
    mask = torch.ones_like(words)
    mask[1, :3] = mask[3, :1] = 0
    return {"input_ids": words * mask, "attention_mask": mask}


def seeded(call: Any, **options: Any) -> Tensor:
    torch.manual_seed(1)
    found: Tensor = call(**prompts(), **BATCH, **options)
    return found


def over(pipe: Pipeline, **options: Any) -> Tensor:
    return seeded(lambda **given: generate(pipe, **given), **options)


@pytest.mark.smoke
def test_stages_generate_what_the_model_does_and_training_goes_on() -> None:
    model = made("Llama")
    expected = seeded(model.generate, **WAYS[0])
    x, caches = prompts()["input_ids"], list[Any]()

    def look(pipe: Pipeline) -> Sequence[Tensor]:
        caches.extend(map(weakref.ref, held_here(pipe)))
        return held_here(pipe)

    with (
        patch.object(generate_module, "_held", look),
        fxpipe.compile(model, ["cpu"] * 2, microbatches=2) as pipe,
    ):
        pipe.step(input_ids=x, labels=x)
        model.model.norm.train()
        modes = [module.training for module in model.modules()]
        assert torch.equal(over(pipe, **WAYS[0]), expected)
        assert [module.training for module in model.modules()] == modes
        assert not any(NAME in name for name, _ in model.named_modules())
        gc.collect()
        assert {weak() for weak in caches} == {None}
        model.eval()
        pipe.step(input_ids=x, labels=x)
        assert not pipe.metrics["compile_seconds"]


@pytest.mark.smoke
def test_a_layer_that_occurs_twice_keeps_its_weights() -> None:
    model = made("Llama")
    model.again = model.model.layers[0]
    before = [*model.parameters()]
    states_of(model)
    assert all(map(operator.is_, model.parameters(), before))


@pytest.mark.parametrize("name", CONFIGS)
def test_models_sample_and_search_beams_over_stages(name: str) -> None:
    model = made(name)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2) as pipe:
        for way in WAYS:
            assert torch.equal(over(pipe, **way), seeded(model.generate, **way)), way


def test_prompts_of_lengths_that_were_there_compile_nothing() -> None:
    model = made("GPT2")
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2) as pipe:
        for length in (5, 1, 8):
            generate(pipe, **prompts(length), **BATCH)
        planned = pipe._compiler.plans.made
        for length in (8, 5, 1):
            found = generate(pipe, **prompts(length), **BATCH, do_sample=False)
            expected = model.generate(**prompts(length), **BATCH, do_sample=False)
            assert torch.equal(found, expected)
        assert pipe._compiler.plans.made == planned


def on_rank(mesh: Any) -> tuple[list[Tensor], set[str], set[str]]:
    """What a rank generates; the caches of its stages, and those that it has written."""
    model, held, written = made("Llama"), set[str](), set[str]()

    def look(pipe: Pipeline) -> Sequence[Tensor]:
        own = held_here(pipe)
        for name, buffer in model.get_submodule(NAME).named_buffers():
            held.update([name] if any(buffer is each for each in own) else [])
            written.update([name] if buffer.any() else [])
        return own

    with (
        patch.object(generate_module, "_held", look),
        fxpipe.compile(model, mesh, microbatches=2, example=((), prompts())) as pipe,
    ):
        whole: Any = pipe
        found = [seeded(whole.generate, **way) for way in WAYS]
    return found, held, written


def test_ranks_generate_the_same_tokens() -> None:
    model, expected = made("Llama"), []
    for way in WAYS:
        torch.manual_seed(1)
        torch.manual_seed(int(torch.randint(2**62, ())))  # which the first rank draws for all
        expected.append(model.generate(**prompts(), **BATCH, **way))
    ranks = on_ranks(2, on_rank)
    for found, held, written in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert held == written
    (_, first, _), (_, last, _) = ranks
    assert first and last and not first & last
    assert first | last == {"keys_0", "values_0", "keys_1", "values_1"}


def test_what_stages_cannot_do_is_refused_with_what_to_do() -> None:
    model = made("GPT2")
    words = prompts()["input_ids"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("give max_new_tokens", {"input_ids": words}),
        ("assistant_model cannot be given", {"input_ids": words, "assistant_model": model}),
        ("takes tokens of shape", {"input_ids": words[0], "max_new_tokens": 1}),
    ]
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2) as pipe:
        for said, given in cases:
            with pytest.raises(InputError, match=said):
                generate(pipe, **given)
