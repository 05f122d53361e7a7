"""Weights of the hub come into a pipe, and go back, to the bit; each rank reads its own alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpipe
from fxpipe.errors import CheckpointError, InputError
from fxpipe.extensions.hub import files
from fxpipe.pipeline import Pipeline
from tests.helpers.ranks import on_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def written(folder: Path, tied: bool = False) -> Any:
    """A model whose weights are in the folder, in several files."""
    model = llama(tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="4KB")
    return model


def without_data(tied: bool = False) -> Any:
    """The same model on the meta device, with the data of buffers that no state dict has."""
    whole = llama(tied)
    buffers = dict(whole.named_buffers())
    with torch.device("meta"):
        model = llama(tied)
    for name, buffer in buffers.items():
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._buffers[own] = buffer
    model.tie_weights()
    return model


def compiled(model: nn.Module, devices: Any) -> Pipeline:
    words = torch.arange(8).reshape(2, 4)
    return fxpipe.compile(
        model, devices, microbatches=2, example=((), {"input_ids": words, "labels": words})
    )


@pytest.mark.smoke
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_from_the_hub_and_go_back_to_the_bit(tmp_path: Path, tied: bool) -> None:
    model = written(tmp_path / "there", tied)
    assert (tmp_path / "there" / files.INDEX.format("model")).is_file()
    with compiled(without_data(tied), 2) as pipe:
        pipe.load_hub(tmp_path / "there")
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        pipe.save_hub(tmp_path / "back", most=3000)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def neox() -> Any:
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, num_attention_heads=2, max_position_embeddings=16)
    )


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=2)
    )


def stored_otherwise(make: Any, folder: Path) -> Any:
    """A model with a seed of its own, whose weights are in the folder."""
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("make", [neox, mixtral])
def test_tensors_that_transformers_stores_otherwise_are_read_and_written_in_its_way(
    tmp_path: Path, make: Any
) -> None:
    model = stored_otherwise(make, tmp_path / "there")
    names = files.entries(tmp_path / "there").keys()
    assert names != model.state_dict().keys()
    with compiled(make(), 2) as pipe:
        assert pipe.load_hub(tmp_path / "there") == ([], [])
        assert all(torch.equal(x, pipe.state_dict()[n]) for n, x in model.state_dict().items())
        pipe.save_hub(tmp_path / "back")
    assert files.entries(tmp_path / "back").keys() == names
    again = type(model).from_pretrained(tmp_path / "back")
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in model.state_dict().items())


def experts_on_rank(mesh: Any, folder: Path) -> dict[str, Tensor]:
    with compiled(mixtral(), mesh) as pipe:
        pipe.load_hub(folder / "there")
        pipe.save_hub(folder / "back")
        return dict(pipe.state_dict())


def test_each_rank_puts_the_experts_of_its_own_layers_together(tmp_path: Path) -> None:
    state = stored_otherwise(mixtral, tmp_path / "there").state_dict()
    parts = on_ranks(2, experts_on_rank, tmp_path)
    assert {name for part in parts for name in part} == {*state}
    assert all(torch.equal(value, state[name]) for part in parts for name, value in part.items())
    for folder in ("there", "back"):
        again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in again.items())


@pytest.mark.smoke
def test_weights_of_a_base_model_load_and_a_new_head_stays_as_it_is(tmp_path: Path) -> None:
    base = llama().model
    base.save_pretrained(tmp_path)  # without the prefix
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with compiled(model, 2) as pipe:
        with pytest.raises(CheckpointError, match=r"no 'lm_head.weight'.*strict=False"):
            pipe.load_hub(tmp_path)
        assert not any(map(torch.any, model.parameters()))
        assert pipe.load_hub(tmp_path, strict=False) == (["lm_head.weight"], [])
    assert all(
        torch.equal(x, model.state_dict()[f"model.{n}"]) for n, x in base.state_dict().items()
    )
    assert not model.lm_head.weight.any()


def test_weights_of_diffusers_have_the_names_of_its_files(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")

    def unet() -> Any:
        levels = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
        return diffusers.UNet2DModel(8, 1, 1, **levels, block_out_channels=(32,), norm_num_groups=4)

    model, x, t = unet(), torch.rand(2, 1, 8, 8), torch.arange(2)
    model.save_pretrained(tmp_path / "there")

    def loss(out: Any, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(out.sample, y)

    given = (x, t), {"target": x}
    with fxpipe.compile(unet(), 2, microbatches=2, loss=loss, example=given) as pipe:
        pipe.load_hub(tmp_path / "there")
        pipe.save_hub(tmp_path / "back", most=100_000)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "back")
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in model.state_dict().items())


def on_rank(mesh: Any, folder: Path) -> tuple[dict[str, Tensor], int]:
    read: list[int] = []
    found = files.loaded

    def counting(*args: Any) -> Any:
        for name, tensor in found(*args):
            read.append(tensor.nbytes)
            yield name, tensor

    with compiled(without_data(), mesh) as pipe:
        with patch("fxpipe.extensions.hub.pipe.loaded", counting):
            pipe.load_hub(folder / "there")
        pipe.save_hub(folder / "back")
        return dict(pipe.state_dict()), sum(read)


def test_a_rank_reads_and_writes_its_own_stages_alone(tmp_path: Path) -> None:
    model = written(tmp_path / "there")
    parts = on_ranks(2, on_rank, tmp_path)
    state = model.state_dict()
    assert {n for part, _ in parts for n in part} == {*state}
    for part, read in parts:
        assert all(torch.equal(value, state[name]) for name, value in part.items())
        assert read == sum(value.nbytes for value in part.values())
    index = json.loads((tmp_path / "back" / files.INDEX.format("model")).read_text())
    assert {*index["weight_map"]} == {*state}
    assert len({*index["weight_map"].values()}) == 2
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def generated(model: Any) -> Any:
    words = torch.ones(1, 4).long()
    return model.generate(words, max_new_tokens=3, min_new_tokens=3, do_sample=False)


def asked_of_a_part(mesh: Any, folder: Path) -> tuple[list[str], Tensor]:
    """What is said of calls that need the whole model, and what those say in turn generate."""
    model, words, said = written(folder / str(mesh.get_rank())), torch.ones(2, 4).long(), []
    with compiled(model, mesh) as pipe:
        pipe.step(input_ids=words, labels=words)
        whole: Any = pipe
        calls: list[Any] = [
            lambda: whole.save_pretrained(folder / "refused"),
            lambda: torch.save(model.state_dict(), folder / "refused.pt"),
        ]
        for call in calls:
            with pytest.raises(InputError) as error:
                call()
            said.append(str(error.value))
        again = written(folder / f"again-{mesh.get_rank()}")
        assert torch.equal(generated(whole), generated(again))
        pipe.save_hub(folder / "whole")
    return said, generated(transformers.LlamaForCausalLM.from_pretrained(folder / "whole"))


def test_over_ranks_what_needs_the_whole_model_is_refused_with_a_line_that_works(
    tmp_path: Path,
) -> None:
    expected = generated(written(tmp_path / "model"))
    for said, tokens in on_ranks(2, asked_of_a_part, tmp_path):
        assert all("pipe.save_hub(folder)" in line for line in said)
        assert torch.equal(tokens, expected)
    assert not (tmp_path / "refused.pt").exists()


def lose_a_file(folder: Path) -> None:
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()


def point_outside(folder: Path) -> None:
    index = json.loads((folder / files.INDEX.format("model")).read_text())
    index["weight_map"]["lm_head.weight"] = "../other.safetensors"
    (folder / files.INDEX.format("model")).write_text(json.dumps(index))


def damage(folder: Path) -> None:
    next(iter(sorted(folder.glob("*.safetensors")))).write_bytes(b"nothing")


def edit(folder: Path, change: Any) -> None:
    """Change the tensors of a folder, in one file."""
    tensors = {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / files.SINGLE.format("model"))


def resize(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(9)}))


def another_model(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"pooler.weight": torch.ones(3)}))


def lack(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_file, "has no file 'model-00001.*download the folder again"),
        (point_outside, "'lm_head.weight' in '../other.safetensors', which is no file"),
        (damage, "is damaged, or no file of safetensors"),
        (resize, r"'model.norm.weight' has the shape \(9,\) in .*, and \(8,\) in Llama"),
        (another_model, "has 'pooler.weight', which LlamaForCausalLM has not"),
        (lack, "has no 'model.norm.weight', which LlamaForCausalLM needs"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "has neither model"),
    ],
)
def test_what_is_wrong_is_refused_by_name_before_anything_changes(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    written(tmp_path)
    spoil(tmp_path)
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with compiled(model, 2) as pipe:
        with pytest.raises(CheckpointError, match=message):
            pipe.load_hub(tmp_path)
        assert all(torch.equal(pipe.state_dict()[name], x) for name, x in before.items())


def test_a_buffer_that_no_checkpoint_has_is_told_with_the_line_to_write(tmp_path: Path) -> None:
    written(tmp_path)
    with torch.device("meta"):
        model = llama()
    with (
        fxpipe.compile(model, 2, microbatches=2) as pipe,
        pytest.raises(InputError, match=r"inv_freq.*include_buffers=False|nothing is compiled"),
    ):
        pipe.load_hub(tmp_path)


def on_a_mesh(_: Any, folder: Path, names: tuple[str, str]) -> dict[str, Tensor]:
    """Load a folder over two stages, each over two processes, and save another. The weights of
    this rank after it, parts of them as whole tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = llama()
    options: dict[str, Any] = {}
    if "tp" in names:
        plan: dict[str, Any] = {
            f"model.layers.{at}.mlp.up_proj": ColwiseParallel() for at in range(2)
        }
        plan |= {f"model.layers.{at}.mlp.gate_proj": ColwiseParallel() for at in range(2)}
        plan |= {f"model.layers.{at}.mlp.down_proj": RowwiseParallel() for at in range(2)}
        parallelize_module(model, mesh["tp"], plan)
    else:
        options["extensions"] = [fxpipe.Sharding("zero3")]
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    words = torch.arange(8).reshape(2, 4)
    with fxpipe.compile(
        model,
        mesh,
        microbatches=2,
        partition=["model.layers.1"],
        example=((), {"input_ids": words, "labels": words}),
        **options,
    ) as pipe:
        pipe.load_hub(folder / "there")
        pipe.save_hub(folder / "back")
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in pipe.state_dict().items()
        }


@pytest.mark.deep
@pytest.mark.parametrize("names", [("pp", "tp"), ("tp", "pp"), ("dp", "pp")])
def test_weights_in_parts_come_from_the_hub_and_go_back_whole(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    state = written(tmp_path / "there").state_dict()
    parts = on_ranks(4, on_a_mesh, tmp_path, names)
    assert {name for part in parts for name in part} == {*state}
    assert all(torch.equal(value, state[name]) for part in parts for name, value in part.items())
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.items())
