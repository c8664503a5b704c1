"""Language models of Transformers, tiny, from the package's own registry: each cut against uncut."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library

TOLERANCE = 1e-12
NUM_STAGES = 3
VOCABULARY = 99
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "state_size", "rotary_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


class Outcome(NamedTuple):
    """How a family fares: the relative differences of loss and gradients, and how many parameters are tied; or why it is not cut."""

    family: str
    loss: float = 0.0
    gradients: float = 0.0
    tied: int = 0
    error: str | None = None


def families() -> list[str]:
    """The families that have a causal language model."""
    library("transformers")
    return list(library("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """The family's configuration with small sizes, without dropout."""
    kind = library("transformers").CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    sizes |= {name: 0.0 for name, value in known.items() if "drop" in name and type(value) is float}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if known.get("layer_types"):
        sizes["layer_types"] = (list(known["layer_types"]) * 6)[:6]
    config = kind(**sizes)
    config._experts_implementation = "eager"  # the other one has no float64
    return config


def tiny_model(family: str) -> nn.Module:
    """A model of the family with random weights, in float64."""
    torch.manual_seed(0)
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
    return model.double()


def text() -> tuple[dict[str, Any], Tensor]:
    """Tokens with a 2-D mask that leaves some out."""
    ids = torch.randint(3, VOCABULARY, (8, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids


def next_token_loss(output: Any, ids: Tensor) -> Tensor:
    """The usual loss of a language model."""
    logits = output.logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def outcome_of(family: str) -> Outcome:
    """How the family fares in this process, stage after stage."""
    try:
        model = tiny_model(family)
        plain = copy.deepcopy(model)
        inputs, ids = text()
        expected = next_token_loss(plain(**inputs, use_cache=False), ids)
        expected.backward()
    except Exception as error:
        return Outcome(family, error=f"not tried: it cannot be made tiny by the usual names of sizes ({_in_a_line(error)})")
    try:
        return _compared(family, model, plain, inputs, ids, expected)
    except zb.InputError as error:
        return Outcome(family, error=f"refused: {_in_a_line(error)}")
    except Exception as error:
        return Outcome(family, error=f"fails: {_in_a_line(error)}")


def _compared(family: str, model: nn.Module, plain: nn.Module, inputs: dict[str, Any], ids: Tensor, expected: Tensor) -> Outcome:
    cut = zb.split(model)
    given: Any = inputs
    stages = [cut(stage, NUM_STAGES) for stage in range(NUM_STAGES)]
    for stage in stages:
        given = stage(**given)
    loss = next_token_loss(given, ids)
    loss.backward()
    held = {name: parameter for stage in stages for name, parameter in stage.named_parameters(remove_duplicate=False)}
    worst = 0.0
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        gradient, own = parameter.grad, held[name].grad
        if gradient is not None and gradient.any():
            worst = max(worst, difference(own if own is not None else torch.zeros_like(gradient), gradient))
    found = difference(loss, expected)
    error = None if max(found, worst) <= TOLERANCE else f"differs: loss {found:.0e}, gradients {worst:.0e}"
    return Outcome(family, found, worst, len(cut.tied(NUM_STAGES)), error)


def difference(ours: Tensor, other: Tensor) -> float:
    """How far apart two tensors are, relative to the second; infinite where one is not a number."""
    found = ((ours - other).norm() / (other.norm() + 1e-30)).item()
    return found if found == found else float("inf")


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "\\|")
    return f"{type(error).__name__}: {text[:300]}"
