"""Models of transformers and diffusers, small and with random weights: nothing is downloaded.

Dropout is off, for a loop without fxpipe draws other masks.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.models.cases import Batch, Case

WORDS = 31
LENGTH = 6
CLASSES = 5


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def llama() -> Any:
    """Rotary positions, RMSNorm, gated layers, and two queries a key."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=WORDS,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=16,
            dropout=0.0,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    )


def vision_transformer() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
    )


def unconditional_unet() -> Any:
    import diffusers  # slow to import

    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
        attention_head_dim=4,
    )


def conditional_unet(middle: str | None = "UNetMidBlock2DCrossAttn") -> Any:
    import diffusers  # slow to import

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(4, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        mid_block_type=middle,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=2,
        attention_head_dim=2,
        cross_attention_dim=12,
    )


def _words(rows: int, first: int = 0) -> Tensor:
    return torch.randint(first, WORDS, (rows, LENGTH))


def _next_words(rows: int) -> Batch:
    words = _words(rows)
    return Batch(kwargs={"input_ids": words, "labels": words})


def _masked_words(rows: int) -> Batch:
    words = _words(rows)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (rows, 1))
    return Batch(kwargs={"input_ids": words, "attention_mask": mask.long(), "labels": words})


def _two_texts(rows: int) -> Batch:
    return Batch(kwargs={"input_ids": _words(rows, 3), "labels": _words(rows, 3)})


def _images(rows: int) -> Batch:
    labels = torch.randint(CLASSES, (rows,))
    return Batch(kwargs={"pixel_values": torch.randn(rows, 3, 16, 16), "labels": labels})


def _noise(rows: int) -> Batch:
    noisy, times = torch.randn(rows, 3, 8, 8), torch.randint(1000, (rows,))
    return Batch((noisy, times), target=torch.randn(rows, 3, 8, 8))


def _conditional_noise(rows: int) -> Batch:
    noisy, times = torch.randn(rows, 4, 8, 8), torch.randint(1000, (rows,))
    return Batch((noisy, times, torch.randn(rows, 5, 12)), target=torch.randn(rows, 4, 8, 8))


def found_noise(output: Any, noise: Tensor) -> Tensor:
    return mse_loss(output.sample, noise)


CASES = (
    Case("GPT-2", gpt2, _next_words),
    Case("BERT", bert, _masked_words),
    Case("Llama", llama, _next_words),
    Case("T5", t5, _two_texts),
    Case("BART", bart, _two_texts),
    Case("ViT", vision_transformer, _images),
    Case("U-Net of diffusers", unconditional_unet, _noise, found_noise),
    Case("conditional U-Net of diffusers", conditional_unet, _conditional_noise, found_noise),
)
