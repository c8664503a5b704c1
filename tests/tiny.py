"""Any language model that Transformers registers, made so small that tests can train it: small sizes, random numbers, no dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.libraries import library

VOCABULARY = 99
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim", "emb_dim", "dim_model"), 32),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "backbone_hidden_size", "hidden_size_global"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dff", "dim_ff"), 48),
    **dict.fromkeys(("hidden_dim", "d_inner", "ffn_hidden_size", "feed_forward_size", "mlp_hidden_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_num_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_layer_start_index", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "d_kv", "state_size", "ssm_state_size", "mamba_d_state", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "sliding_window", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_attention_groups", "expand", "mamba_expand", "linear_num_key_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Small sizes by the names that configurations have for them."""
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
"""The names for numbers of layers."""

Special = Callable[[int], Mapping[str, Any]]
"""`(num_layers) -> settings` of a configuration."""


class Family(NamedTuple):
    """Settings that a configuration class needs in addition to small sizes, and why; `in_float32` names parts that stay in float32.

    A model that `draws` random numbers in training is used in evaluation mode: its stages would draw other numbers than the whole model.
    """

    settings: Special
    why: str
    in_float32: str = ""
    draws: bool = False


SPECIAL: dict[str, Family] = {
    "blt": Family(lambda _: {"encoder_hash_byte_group_vocab": 101, "encoder_hash_byte_group_size": [3, 4]}, "small tables of hashes"),
    "cohere_compass_text": Family(
        lambda _: {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        "rotary settings by type of layer",
    ),
    "dbrx": Family(
        lambda _: {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "parts of the configuration in dicts",
    ),
    "dots3_note_text": Family(
        lambda _: {
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
            **{"swa_head_dim": 12, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8},
            **{"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
        },
        "small sliding layers and indexers",
    ),
    "falcon_h1": Family(lambda _: {"mamba_d_ssm": 64}, "head sizes that match the state"),
    "gemma3n": Family(lambda _: {"vision_config": {"architecture": "test_efficientnet", "hidden_size": 32}}, "a small image encoder"),
    "gemma3n_text": Family(lambda layers: {"num_kv_shared_layers": layers // 3}, "fewer layers that share keys and values"),
    "gemma4_text": Family(
        lambda layers: {"global_head_dim": 8, "num_kv_shared_layers": layers // 3}, "small global heads, layers that share keys and values"
    ),
    "gpt_neo": Family(lambda layers: {"attention_types": [[["global", "local"], layers // 2]], "window_size": 4}, "a type for each layer"),
    "inkling2_text": Family(lambda _: {}, "routers in float32", in_float32="gate"),
    "lfm2_moe": Family(lambda layers: {"layer_types": ["conv", "full_attention"] * (layers // 2)}, "a type for each layer"),
    "mamba2": Family(lambda _: {"head_dim": 16, "n_groups": 2}, "head sizes that match the state"),
    "musicgen_decoder": Family(lambda _: {"num_codebooks": 1}, "one codebook, as its own example has"),
    "musicgen_melody_decoder": Family(lambda _: {"num_codebooks": 1}, "one codebook, as its own example has"),
    "phimoe": Family(lambda _: {}, "evaluation mode, since its router draws random numbers in training", draws=True),
    "qwen4_exp_text": Family(
        lambda _: {
            **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2},
            **{"hc_lowrank": 8, "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 2},
            **{"heads_per_ngram": 2, "split_ngram_parts": 1},
        },
        "small indexers and tables of n-grams",
    ),
    "reformer": Family(
        lambda layers: {
            **{"is_decoder": True, "attention_head_size": 8, "axial_pos_shape": (2, 5), "axial_pos_embds_dim": (8, 24), "hash_seed": 0},
            **{"attn_layers": ["local", "lsh"] * (layers // 2), "local_attn_chunk_length": 5, "lsh_attn_chunk_length": 5, "num_buckets": 2},
        },
        "a type for each layer, chunks that fit the text",
    ),
    "xmod": Family(lambda _: {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"}, "a language"),
    "zamba": Family(lambda _: {"attention_hidden_size": 64}, "attention over twice the width"),
    "zamba2": Family(lambda _: {"attention_hidden_size": 64}, "attention over twice the width"),
    "zaya": Family(lambda _: {"num_experts_per_tok": 1}, "one expert a token"),
}
"""By the `model_type` of a configuration."""


def model_class(family: str, mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING") -> Any:
    """The class of the family's model in one of the package's mappings, if not said that of causal language models."""
    transformers = library("transformers")
    return getattr(transformers, mapping)[transformers.CONFIG_MAPPING[family]]


def shrunk(kind: Any, num_layers: int, **more: Any) -> Any:
    """A configuration of class `kind`, and those in it, with small sizes."""
    whole = kind()
    whole.allow_global_per_layer_attribute_access = True
    sizes = {name: size for name, size in SIZES.items() if _has(whole, name)}
    sizes |= {name: num_layers for name in LAYERS if _has(whole, name)}
    known = whole.to_dict()
    sizes |= {name: 0.0 for name, value in known.items() if "drop" in name and type(value) is float}
    for name, value in known.items():
        if name.endswith(("layer_types", "layers_block_type")) and isinstance(value, list) and value:
            sizes[name] = (list(dict.fromkeys(value)) * num_layers)[:num_layers]
    if "kv_lora_rank" in known:  # keys and values of every head come from one small vector
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    special = SPECIAL.get(kind.model_type)
    sizes |= special.settings(num_layers) if special else {}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(whole, name, None)
        if part is not None and name not in sizes:
            sizes[name] = shrunk(type(part), num_layers)
    return kind(**{**sizes, **more})


def _has(config: Any, name: str) -> bool:
    """Whether a configuration has this setting; some have properties in its place, which raise when they are set."""
    return not isinstance(getattr(type(config), name, None), property) and hasattr(config, name)


def made(kind: Any, config: Any, experts: str = "eager") -> nn.Module:
    """A model of class `kind` with random matrices, in the default type of numbers."""
    library("transformers").logging.set_verbosity_error()
    torch.manual_seed(0)
    model: nn.Module = kind._from_config(config, attn_implementation="eager", experts_implementation=experts)
    model = model.to(torch.get_default_dtype())
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1)
    special = SPECIAL.get(config.model_type)
    if special and special.in_float32:
        for name, part in model.named_modules():
            if name.rpartition(".")[2] == special.in_float32:
                part.float()
    return model.eval() if special and special.draws else model.train()
