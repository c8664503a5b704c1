"""The weights of a pipeline's checkpoint are read by `from_pretrained` of Transformers, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from tests.procs.models import build
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from tests.tiny import SIZES, VOCABULARY
from zerobubble.cli import main


def llama_config(*, tied: bool) -> Any:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    return library("transformers").LlamaConfig(**sizes, num_hidden_layers=3, tie_word_embeddings=tied)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def trained(group: Any, path: str, tied: bool) -> Any:
    """The logits after three steps, where the last stage is."""
    torch.manual_seed(0)
    model = library("transformers").LlamaForCausalLM(llama_config(tied=tied))
    with zb.Pipeline(zb.split(model), "zb-h1", 2, next_token_loss, group=group) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for _ in range(3):
            pipe.step({"input_ids": tokens()}, tokens())
            optimizer.step()
            optimizer.zero_grad()
        zb.save(path, pipe, optimizer)
        _, output = pipe.eval_step({"input_ids": tokens()}, num_microbatches=1)
        return None if output is None else output["logits"].tolist()


@pytest.mark.long
def test_a_trained_llama_has_the_same_logits_in_transformers(world: Ranks, tmp_path: Path) -> None:
    transformers = library("transformers")
    for tied in (True, False):
        checkpoint, folder = tmp_path / f"checkpoint-{tied}", tmp_path / f"exported-{tied}"
        logits = next(logits for logits in world.run(trained, str(checkpoint), tied, ranks=2) if logits is not None)
        zb.io.export_weights(checkpoint, folder, llama_config(tied=tied), shard_bytes=20_000)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert ("lm_head.weight" in index["weight_map"]) != tied
        assert len(set(index["weight_map"].values())) > 1
        model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        with torch.no_grad():
            assert torch.equal(model(input_ids=tokens()).logits, torch.tensor(logits))
    with raises(zb.InputError, "lm_head.weight", "tie_word_embeddings=False"):
        zb.io.export_weights(checkpoint, tmp_path / "wrong", llama_config(tied=True))
    small = llama_config(tied=False)
    small.num_hidden_layers = 2
    with raises(zb.InputError, "model.layers.2.input_layernorm.weight", "model", "model"):
        zb.io.export_weights(checkpoint, tmp_path / "wrong", small)
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-9])
    with pytest.raises(zb.InputError) as caught:
        zb.io.export_weights(checkpoint, tmp_path / "wrong", llama_config(tied=False))
    assert str(metadata) in str(caught.value)
    for wrong in ("", "a\0b"):
        with raises(zb.InputError, "folder"):
            zb.io.export_weights(tmp_path / "checkpoint-True", wrong, llama_config(tied=True))
    assert not (tmp_path / "wrong").exists()


def test_the_command_writes_what_one_device_has_saved(tmp_path: Path) -> None:
    transformers = library("transformers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(llama_config(tied=True)).double().eval()
    zb.save(tmp_path / "checkpoint", model)
    model.config.save_pretrained(tmp_path / "config")
    arguments = ["export-weights", str(tmp_path / "checkpoint"), str(tmp_path / "exported"), "--config", str(tmp_path / "config")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert again.dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    nothing = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "checkpoint")])
    assert nothing.exit_code == 2
    states(nothing.output, "Transformers", "configuration", "readable")


def by_hand(group: Any, path: str) -> None:
    with zb.Pipeline(build, "zb-v", 2, next_token_loss, group=group) as pipe:
        zb.save(path, pipe)


def test_stages_without_the_names_of_one_model_are_refused(world: Ranks, tmp_path: Path) -> None:
    world.run(by_hand, str(tmp_path / "last"), ranks=2)
    with raises(zb.InputError, "4 stages", "zb.split"):
        zb.io.export_weights(tmp_path / "last", tmp_path / "exported", llama_config(tied=False))


def lora() -> Any:
    return library("peft").LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)


def trained_with_lora(group: Any, path: str) -> Any:
    """The logits after three steps of the adapters, where the last stage is. The other weights are those of the first model."""
    torch.manual_seed(0)
    model = library("transformers").LlamaForCausalLM(llama_config(tied=False))
    if group.rank() == 0:
        model.save_pretrained(f"{path}-base")
    adapted = library("peft").get_peft_model(model, lora())
    with zb.Pipeline(zb.split(adapted), "zb-h1", 2, next_token_loss, group=group) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            pipe.step({"input_ids": tokens()}, tokens())
            optimizer.step()
            optimizer.zero_grad()
        zb.save(path, pipe, optimizer)
        _, output = pipe.eval_step({"input_ids": tokens()}, num_microbatches=1)
        return None if output is None else output["logits"].tolist()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of Transformers, which peft still reads
def test_an_adapter_has_the_same_logits_in_peft(world: Ranks, tmp_path: Path) -> None:
    """By its configuration, and from the command line by a folder: the same file with the names of peft, and no other weights."""
    peft, transformers = library("peft"), library("transformers")
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "exported"
    logits = next(logits for logits in world.run(trained_with_lora, str(checkpoint), ranks=2) if logits is not None)
    zb.io.export_weights(checkpoint, folder, llama_config(tied=False), adapter=lora())
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (folder / "model.safetensors").exists()
    base = transformers.LlamaForCausalLM.from_pretrained(f"{checkpoint}-base")
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, torch.tensor(logits))
    llama_config(tied=False).save_pretrained(tmp_path / "config")
    again = [str(checkpoint), str(tmp_path / "again"), "--config", str(tmp_path / "config"), "--adapter", str(folder)]
    assert CliRunner().invoke(main, ["export-weights", *again]).exit_code == 0
    assert (tmp_path / "again/adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    with raises(zb.InputError, argument="adapter"):
        zb.io.export_weights(checkpoint, tmp_path / "third", llama_config(tied=False), adapter=8)
