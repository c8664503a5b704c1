"""Reads the shape of a decoder from a configuration of Transformers, without Transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerobubble.cost_model.models import Experts, Latent, Model, model_named
from zerobubble.errors import InputError
from zerobubble.whole_files import unusable

USUAL_TOKENS = 4096
"""Tokens of a sequence, unless the model has fewer positions."""
USUAL_BATCH_TOKENS = 2**19
"""Tokens of a step."""
_PLAIN_MLP = frozenset({
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "mpt", "nemotron", "opt",
    "phi", "starcoder2", "xglm",
})  # fmt: skip
"""Families whose MLP has two products. All other decoders of Transformers have a gate."""
_TABLES = frozenset({"biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt"})
"""Families with a table of positions."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocabulary": ("vocab_size",),
}
"""The names of the required sizes in the configurations of all families."""
_POSITIONS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_ROUTED = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
_OTHER_LAYERS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads", "rwkv_version", "lru_width")
"""Fields of families with layers other than attention and MLP."""


def known_model(model: str | Model) -> Model:
    """Returns `model`, looked up by name or read from a .json file or a folder if it is text. Raises `InputError` if there is none."""
    if isinstance(model, Model):
        return model
    return read_model(model) if model.endswith(".json") or Path(model).is_dir() else model_named(model)


def with_sequence(model: Model, tokens: int) -> Model:
    """Returns `model` for sequences of `tokens`, with as many tokens in a step."""
    batch = None if model.batch is None else max(model.batch * model.sequence // tokens, 1)
    return replace(model, sequence=tokens, batch=batch)


def read_model(path: str) -> Model:
    """Returns the model of a config.json, or of a folder with one. Raises `InputError` for anything but a decoder."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unusable("read", file, error) from error
    except ValueError as error:
        remedy = "give a model's config.json"
        raise InputError(
            "the configuration {path} cannot be read: {reason}; {remedy}", path=path, reason=str(error), remedy=remedy
        ) from error
    if not isinstance(fields, dict):
        raise InputError("{path} is not a configuration of Transformers", path=path, remedy="give a model's config.json")
    name = file.parent.name if file.name == "config.json" else file.stem
    try:
        return model_of(fields, str(fields.get("_name_or_path") or name or fields.get("model_type")))
    except InputError as error:
        raise InputError("the configuration {path}: {reason}", path=path, reason=str(error)) from error


def model_of(fields: Mapping[str, Any], name: str) -> Model:
    """Returns the model that these fields of a configuration describe. Raises `InputError` if a field is missing, or for other layers."""
    fields = fields["text_config"] if isinstance(fields.get("text_config"), Mapping) else fields
    family = str(fields.get("model_type", "a model"))
    if fields.get("is_encoder_decoder") or any(fields.get(other) for other in _OTHER_LAYERS):
        message = "{family} is not a decoder of attention and MLP or experts, which the cost model estimates"
        raise InputError(message, family=family, remedy="measure its costs with Pipeline.profile, or cut it with `zerobubble split`")
    sizes = {size: _whole(fields, *names) for size, names in _NAMES.items()}
    if missing := [_NAMES[size][0] for size, value in sizes.items() if value is None]:
        raise InputError("{family} has no {missing}", family=family, missing=" and no ".join(missing), remedy="give a model's config.json")
    required = {size: value for size, value in sizes.items() if value is not None}
    sequence = min(_whole(fields, *_POSITIONS) or USUAL_TOKENS, USUAL_TOKENS)
    is_plain = family in _PLAIN_MLP
    return Model(
        name,
        **required,
        kv_heads=1 if fields.get("multi_query") else _whole(fields, "num_key_value_heads", "num_kv_heads") or required["heads"],
        inner=_whole(fields, *_INNER) or 4 * required["hidden"],
        sequence=sequence,
        gated=not is_plain,
        dropout=is_plain,
        tied=bool(fields.get("tie_word_embeddings", True)),
        fused_attention=True,
        latent=_latent(fields),
        experts=_experts(fields, required["layers"]),
        batch=max(USUAL_BATCH_TOKENS // sequence, 1),
        head_width=_whole(fields, "head_dim"),
        positions=_whole(fields, *_POSITIONS),
        position_table=family in _TABLES,
    )


def _whole(fields: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of these fields that is given; raises `InputError` if it is no integer."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError("{field} must be an integer, got {got!r}", field=name, got=value, remedy="give a model's config.json")
        return value
    return None


def _latent(fields: Mapping[str, Any]) -> Latent | None:
    keys = _whole(fields, "kv_lora_rank")
    if keys is None:
        return None
    plain, rotary, values = (_whole(fields, name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Latent(_whole(fields, "q_lora_rank") or (_whole(fields, "hidden_size") or 0), keys, plain, rotary, values)


def _experts(fields: Mapping[str, Any], layers: int) -> Experts | None:
    routed, chosen = _whole(fields, *_ROUTED), _whole(fields, *_CHOSEN)
    if not routed or not chosen:
        return None
    inner = _whole(fields, "moe_intermediate_size", *_INNER) or 0
    shared = _whole(fields, "n_shared_experts") or 0
    if not shared and (width := _whole(fields, "shared_expert_intermediate_size")):
        shared = max(width // inner, 1)
    return Experts(routed, chosen, inner, shared, dense_layers=min(_whole(fields, "first_k_dense_replace") or 0, layers))
