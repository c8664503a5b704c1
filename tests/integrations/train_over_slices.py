"""Steps of tiny decoders of Transformers over slices of a sequence, compared with one device: writes the errors of each family.

torchrun --nproc-per-node 2 train_over_slices.py FOLDER FAMILY...
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zerobubble as zb

WORDS, TOKENS = 64, 23
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"experts_implementation": "eager"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 10}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", {}),
    "olmo2": ("Olmo2", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {}),
    "starcoder2": ("Starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "falcon": ("Falcon", {}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **EXPERTS}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 9, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 9}),
    "cohere": ("Cohere", {}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bloom": ("Bloom", {"n_layer": 4, "n_head": 4, "attn_implementation": "eager"}),
    "llama, eager": ("Llama", {"attn_implementation": "eager"}),
}
IN_FLOAT32 = ("gemma", "gemma2", "gemma3", "cohere", "opt", "bloom", "llama, eager")
"""Models that compute norms, softmax or masks in float32, whatever the type of their parameters."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "mamba": ("Mamba", {"attn_implementation": None}),
    "checkpointed": ("Llama", {}),
}
RUNS = ((1, "1f1b", 2), (2, "1f1b", 2), (4, "zb-h1", 2), (7, "1f1b", 2), (3, "zb-h1", 4))
"""Slices, schedule and microbatches."""


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    name, settings = (FAMILIES | REFUSED)[family]
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    model = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, model)(getattr(transformers, config)(**{**COMMON, **settings})).double().train()
    if family == "checkpointed":
        model.gradient_checkpointing_enable()
    return model


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def padded(tokens: Tensor) -> Tensor:
    """A mask without the first tokens of some sequences, as padding on the left."""
    return (torch.arange(tokens.shape[1]) >= torch.arange(len(tokens))[:, None]).long()


def errors(family: str, slices: int, schedule: str, microbatches: int, *, masked: bool = False) -> tuple[float, float]:
    """The relative errors of the loss and of the gradients of this rank's stages at most."""
    model = made(family)
    whole = copy.deepcopy(model)
    tokens = torch.randint(3, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    named = {"attention_mask": padded(inputs)} if masked else {}
    expected = loss_fn(whole(inputs, **named, use_cache=False), targets)
    expected.backward()
    theirs = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False) if p.grad is not None}
    with zb.Pipeline(zb.split(model, example=inputs[:1]), schedule, microbatches, loss_fn, slices=slices) as pipe:
        loss = pipe.step(inputs, targets, kwargs=named or None)
        mine = {name: p.grad for module in pipe.modules.values() for name, p in module.named_parameters() if p.grad is not None}
        worst = max(float((mine[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-6)) for name in mine)
        return float((loss.detach() - expected.detach()).abs() / expected.detach()), worst


def main(folder: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    for family in families:
        found: dict[str, Any] = {}
        try:
            for run in RUNS:
                found[" ".join(map(str, run))] = errors(family, *run)
            if family == "llama":
                found["masked"] = errors(family, 3, "zb-h1", 2, masked=True)
        except zb.ZeroBubbleError as error:
            found["refused"] = str(error)
        (folder / f"{family}.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
