"""Models split by `zb.split` into graph stages on two ranks: loss and gradients match one device, with every mask."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.procs.versions import takes_an_hour
from zerobubble.runtime.split.compiled import compiler

pytestmark = pytest.mark.spread

NUM_MICROBATCHES = 2
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
ONE_KEY = {**SIZES, "num_key_value_heads": 1, "use_cache": False}
EXPERTS = {**ONE_KEY, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", ONE_KEY),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**ONE_KEY, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 32, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 32}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**ONE_KEY, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    ),
}


class Output(NamedTuple):
    logits: Tensor


class Plain(nn.Module):
    """Blocks, and code around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return Output(self.head(x))


def model(family: str, sizes: dict[str, Any]) -> nn.Module:
    """A small model with random matrices in float64, without dropout. `sizes` are others than usual."""
    if family == "plain":
        torch.manual_seed(0)
        return Plain().double()
    transformers = library("transformers")
    kind, config, usual = MODELS[family]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**usual | sizes)).double()
    for parameter in made.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1)
    for part in made.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, float) and (name == "p" or "dropout" in name)]:
            setattr(part, name, 0.0)
        if hasattr(part, "set_experts_implementation"):
            part.set_experts_implementation("batched_mm")
    return made


def given(family: str, mask: str, length: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(1, 32, (2 * NUM_MICROBATCHES, length), generator=torch.Generator().manual_seed(seed))
    padded = torch.ones_like(ids)
    padded[::2, -2:] = 0
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(len(ids), 1, length, length)
    masks = {"none": {}, "2-D": {"attention_mask": padded}, "4-D": {"attention_mask": causal.contiguous()}}
    return {"input_ids": ids, **masks[mask], **({"decoder_input_ids": ids} if family == "t5" else {})}, ids


def loss_fn(output: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())


def errors(
    group: Any,
    family: str,
    schedule: str,
    split: str,
    masks: tuple[str, ...],
    lengths: tuple[int, ...],
    sizes: dict[str, Any] | None = None,
) -> tuple[float, int]:
    """The largest relative difference of a loss or a gradient on this rank, and how often the compiler was called there."""
    num_compiled = []
    compile_graph, compile_with_symbols = compiler.compile_graph, compiler.compile_with_symbols
    compiler.compile_graph = lambda *given: num_compiled.append(1) or compile_graph(*given)  # type: ignore[func-returns-value]
    compiler.compile_with_symbols = lambda *given: num_compiled.append(1) or compile_with_symbols(*given)  # type: ignore[func-returns-value]
    oracle = model(family, sizes or {})
    worst = 0.0
    try:
        example = torch.zeros(2, 6, dtype=torch.long) if family == "plain" else None
        with zb.Pipeline(
            zb.split(deepcopy(oracle), example=example), schedule, NUM_MICROBATCHES, loss_fn, group=group, split=split, timeout=1800
        ) as pipe:
            for seed, (mask, length) in enumerate((mask, length) for mask in masks for length in lengths):
                worst = max(worst, error_of_step(pipe, oracle, *given(family, mask, length, seed)))
    finally:
        compiler.compile_graph, compiler.compile_with_symbols = compile_graph, compile_with_symbols
    return worst, len(num_compiled)


def error_of_step(pipe: Any, oracle: nn.Module, inputs: dict[str, Tensor], ids: Tensor) -> float:
    for module in (oracle, *pipe.modules.values()):
        module.zero_grad()
    loss = pipe.step(inputs, ids)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(NUM_MICROBATCHES):
        rows = slice(2 * i, 2 * i + 2)
        part = loss_fn(oracle(**{name: tensor[rows] for name, tensor in inputs.items()}), ids[rows]) / NUM_MICROBATCHES
        part.backward()
        expected += part.detach()
    wanted = {name: parameter.grad for name, parameter in oracle.named_parameters(remove_duplicate=False)}
    found = [difference(loss, expected)]
    for module in pipe.modules.values():
        found += [difference(parameter.grad, wanted[name]) for name, parameter in module.named_parameters()]
    return max(found)


def difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    if mine is None or wanted is None or not wanted.any():
        return 0.0 if mine is wanted or not any(t is not None and t.any() for t in (mine, wanted)) else math.inf
    return ((mine - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_plain_model_in_graph_stages(world: Ranks, schedule: str) -> None:
    for error, _ in world.run(errors, "plain", schedule, "graph", ("none",), (6, 9), ranks=2):
        assert error <= 1e-12


@pytest.mark.long
def test_gpt2_in_graph_stages(world: Ranks) -> None:
    for error, _ in world.run(errors, "gpt2", "zb-h1", "graph", ("2-D",), (6,), ranks=2):
        assert error <= 1e-12


@takes_an_hour
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("family", MODELS)
def test_families_in_graph_stages(world: Ranks, family: str, schedule: str) -> None:
    for error, _ in world.run(errors, family, schedule, "graph", ("none", "2-D", "4-D"), (6, 9), ranks=2, seconds=1500):
        assert error <= 1e-12


def compiled(world: Ranks, family: str, tolerance: float, sizes: dict[str, Any]) -> None:
    lengths = (6, 12, 20, 31, 7, 9)
    for error, num_compiled in world.run(errors, family, "zb-h1", "compiled", ("2-D",), lengths, sizes, ranks=2, seconds=3000):
        assert error <= tolerance
        assert num_compiled == 2 * 3  # F, B and W, for the first length and for all others


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_gpt2_in_compiled_stages_of_many_lengths(world: Ranks) -> None:
    """With a block in each stage: inductor takes as much longer as there are more, one rank after the other."""
    compiled(world, "gpt2", 1e-12, {"n_layer": 2})


@takes_an_hour
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "tolerance"), [("gpt2", 1e-12), ("llama", 1e-6)])
def test_families_in_compiled_stages_of_many_lengths(world: Ranks, family: str, tolerance: float) -> None:
    """Llama computes its norms and its rotary tables in float32, which compiled code rounds in its own way."""
    compiled(world, family, tolerance, {})
