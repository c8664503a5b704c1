"""The shape of a model is read from its config.json: its parameters are those of the published model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import raises
from zerobubble.cli import main
from zerobubble.cost_model.configuration import known_model, model_of, with_sequence

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "llama-3-8b": (LLAMA_8B, 8.03e9),
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}, 124e6),
    "qwen2.5-3b": (
        LLAMA_8B
        | {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        3.09e9,
    ),
    "mixtral-8x7b": (
        LLAMA_8B | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46.7e9,
    ),
    "qwen3-30b-a3b": (
        LLAMA_8B
        | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936}
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30.5e9,
    ),
    "a vision model": ({"model_type": "gemma3", "text_config": LLAMA_8B}, 8.03e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_has_the_parameters_of_its_model(name: str) -> None:
    fields, parameters = PUBLISHED[name]
    model = model_of(fields, name)
    assert model.parameters == pytest.approx(parameters, rel=0.01)
    assert model.sequence == min(fields.get("n_positions", 4096), 4096)


def test_deepseek_has_its_latent_attention_and_experts() -> None:
    fields = LLAMA_8B | {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    }  # fmt: skip
    assert model_of(fields, "deepseek-v3").parameters == zb.cost_model.MODELS["deepseek-v3"].parameters


def test_a_folder_and_its_file_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert known_model(str(tmp_path)) == known_model(str(tmp_path / "config.json"))
    assert known_model(str(tmp_path)).name == tmp_path.name


def test_other_sequences_keep_the_tokens_of_a_step() -> None:
    model = model_of(LLAMA_8B, "llama")
    longer = with_sequence(model, 8 * model.sequence)
    assert model.batch is not None
    assert longer.batch is not None
    assert longer.batch * longer.sequence == model.batch * model.sequence


def test_a_table_of_positions_limits_sequences() -> None:
    fields, _ = PUBLISHED["gpt2"]
    model = model_of(fields, "gpt2")
    assert with_sequence(model, 1024).sequence == model.positions == 1024
    with raises(zb.InputError, "gpt2", 1024, 2048):
        with_sequence(model, 2048)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, {"foreign": "t5"}),
        (LLAMA_8B | {"model_type": "jamba", "mamba_d_state": 16}, {"foreign": "jamba"}),
        ({"model_type": "llama", "hidden_size": 8}, {"foreign": "num_hidden_layers and no num_attention_heads and no vocab_size"}),
        (LLAMA_8B | {"hidden_size": "4096"}, {"foreign": "hidden_size"}),
        ([1], {"foreign": "config.json"}),
    ],
)
def test_other_configurations_are_refused_with_their_file(tmp_path: Path, fields: Any, words: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with raises(zb.InputError, path=str(tmp_path), **words):
        known_model(str(tmp_path))


def test_a_plan_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    done = CliRunner().invoke(main, ["plan", str(config), "--gpu", "H100", "--gpus", "8", "--sequence", "8192", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    best = found["choices"][0]
    assert best["dp"] * best["tp"] * best["cp"] * best["pp"] == found["gpus"] == 8
    assert found["batch"] * 8192 == 2**19


def test_a_configuration_excludes_a_model_and_needs_gpus(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    for arguments in (["--model", "llama3-70b", "--gpu", "H100", "--gpus", "8"], ["--gpu", "H100"], ["--gpus", "8"]):
        assert CliRunner().invoke(main, ["plan", str(config), *arguments]).exit_code == 2
