"""Transformers models in graph stages match one device without a mask, and with a 2-D or a 4-D mask."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from tests.procs.versions import needs_checkpoints_in_graphs
from tests.refusals import states
from tests.thinned import every
from zerobubble.runtime.split.tracing.grouped_products import HAS_GROUPED_PRODUCTS
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.payload import Payload, flatten_pytree

pytestmark = pytest.mark.in_process

SHAPE = (2, 6)
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 1, "use_cache": False}),
    "gemma, tied": (
        "GemmaForCausalLM",
        "GemmaConfig",
        {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False},
    ),
    "gemma 3, windows": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": 4,
            "use_cache": False,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 8}),
    "mixtral, whose router is recorded by hooks": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **SIZES,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "use_cache": False,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.0,  # transformers computes a part of this loss in float32
            "experts_implementation": "batched_mm",
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    ),
}


def masks() -> dict[str, Tensor | None]:
    padded = torch.ones(SHAPE, dtype=torch.int64)
    padded[0, -2:] = 0
    causal = torch.ones(SHAPE[1], SHAPE[1], dtype=torch.bool).tril()
    return {
        "none": None,
        "2-D of ones": torch.ones(SHAPE, dtype=torch.int64),
        "2-D": padded,
        "2-D on the left": padded.flip(1),
        "4-D": causal.expand(SHAPE[0], 1, *causal.shape).contiguous(),
    }


def model(family: str, **other_sizes: int) -> nn.Module:
    transformers = library("transformers")
    kind, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **other_sizes})).double()
    return made


def compare(stage: Stage, oracle: nn.Module, mask: Tensor | None, seed: int, tolerance: float = 1e-12) -> None:
    """F, B and W of a microbatch leave the loss and the gradients of one device; dropout draws what it draws there."""
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {"input_ids": torch.randint(1, 32, SHAPE, generator=generator)}
    arguments |= {"labels": arguments["input_ids"]} | ({} if mask is None else {"attention_mask": mask})
    stage.begin(None)
    stage.module.zero_grad()
    oracle.zero_grad()
    tensors, structure = flatten_pytree(arguments)
    torch.manual_seed(seed)
    (loss,) = stage.forward(0, Payload.from_tensors(tensors, structure), lambda output: output.loss)
    torch.manual_seed(seed)
    expected = oracle(**arguments).loss
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    stage.backward(0, (torch.ones_like(loss),))
    stage.weight(0)
    expected.backward()
    for (name, p), q in zip(stage.module.named_parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm(), name


def train_with_all_masks(family: str) -> int:
    """Microbatches with one mask after another through one stage; gives the number of its traces."""
    module = model(family)
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    for seed, mask in enumerate((*masks().values(), *masks().values())):
        if "router" in family:  # the balancing loss of transformers takes only 2-D masks
            module.config.output_router_logits = oracle.config.output_router_logits = mask is None or mask.dim() == 2
        compare(stage, oracle, mask, seed)
    return len(stage.splitter.traces)


@pytest.mark.long
def test_llama_trains_with_every_mask() -> None:
    """A mask that hides nothing is another trace than one that does, since attention is then causal by itself."""
    assert train_with_all_masks("llama") == 4


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_other_families_train_with_every_mask(family: str) -> None:
    assert train_with_all_masks(family) == 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_adapters_leave_the_activations_of_all_models() -> None:
    """Code of adapters reaches the registry `ACT2FN`, a dict that makes an instance of a class on access."""
    peft, registry = library("peft"), library("transformers.activations").ACT2FN
    before = dict(OrderedDict.items(registry))
    module = peft.get_peft_model(model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    for seed in range(2):
        compare(stage, oracle, None, seed)
    assert len(stage.splitter.traces) == 1
    assert dict(OrderedDict.items(registry)) == before
    model("llama")


@pytest.mark.long
def test_experts_that_no_graph_takes_are_named() -> None:
    module = model("mixtral, whose router is recorded by hooks")
    module.set_experts_implementation("eager")
    with pytest.raises(zb.InputError) as caught:
        compare(make_stage("graph", module, 0), module, None, 0)
    states(str(caught.value), "stage 0", "model.layers.0.mlp.experts")
    states(str(caught.value), "depends", "numbers")
    states(str(caught.value), "model.set_experts_implementation('batched_mm')")


@pytest.mark.long
@pytest.mark.skipif(not HAS_GROUPED_PRODUCTS, reason="this torch has no grouped products")
@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]))
def test_grouped_experts_have_the_bits_of_one_device_and_wait(dtype: torch.dtype) -> None:
    """torch traces grouped products only in bfloat16, and has none in float64."""
    module = model("mixtral, whose router is recorded by hooks").to(dtype)
    module.set_experts_implementation("grouped_mm")
    module.config.output_router_logits = False
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    for seed in range(2):
        compare(stage, oracle, masks()["2-D"], seed, tolerance=0.0)
    report = stage.splitter.report()
    assert report.share == 1.0
    assert not any("experts" in each.parameter for each in report.in_b)


@pytest.mark.long
@pytest.mark.sweep
@needs_checkpoints_in_graphs
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_switch_for_checkpoints_is_honored(is_frozen: bool) -> None:
    """It sets a hook on the embedding, so that checkpoints find an input with a gradient where the embedding is frozen."""
    module = model("gpt2")
    module.gradient_checkpointing_enable()
    module.get_input_embeddings().requires_grad_(not is_frozen)
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    for seed in range(2):
        compare(stage, oracle, masks()["2-D"], seed)


@pytest.mark.long
def test_stages_of_a_model_that_was_cut_are_traced() -> None:
    """The stand-ins for units of other stages, and leaving the model's code behind the last unit, are Python alone."""
    oracle = model("llama", num_hidden_layers=2)
    build = zb.split(deepcopy(oracle))
    first, last = (make_stage("graph", build(stage, 2), stage) for stage in range(2))
    ids = torch.randint(1, 32, SHAPE, generator=torch.Generator().manual_seed(0))
    for num_traces, name in enumerate(("2-D", "2-D of ones"), 1):
        given = {"input_ids": ids, "attention_mask": masks()[name]}
        for module in (first.module, last.module, oracle):
            module.zero_grad()
        for stage in (first, last):
            stage.begin(None)
        tensors, structure = flatten_pytree(given)
        outputs = first.forward(0, Payload.from_tensors(tensors, structure))
        assert isinstance(outputs, Payload)
        received = outputs.with_tensors([y.detach().requires_grad_(y.requires_grad) for y in outputs])
        (loss,) = last.forward(0, received, loss_of)
        first.backward(0, last.backward(0, (torch.ones_like(loss),)))
        for stage in (first, last):
            stage.weight(0)
        expected = loss_of(oracle(**given))
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
        for stage in (first, last):
            for name, parameter in stage.module.named_parameters():
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)
        del outputs, received, loss  # they hold the nodes that add to gradients, as hooks on parameters do
        assert len(first.splitter.traces) == len(last.splitter.traces) == num_traces


def loss_of(output: Any) -> Tensor:
    return output.logits.square().mean()
