"""Models of Transformers in the deferred split: the gradients of autograd, and the share of weight gradients that W does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.split_matrix.ways import Ours, Plain, double_precision
from tests.libraries import library
from zerobubble.runtime.split.eligibility import CAN_SEE_HOOKS
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.stage import make_stage

pytestmark = [
    pytest.mark.skipif(not CAN_SEE_HOOKS, reason="before 2.8 torch does not tell who saves tensors: matrices of modules stay in B"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # peft asks it, too
]

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_layer_start_index", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "d_kv", "state_size", "ssm_state_size", "mamba_d_state", "sliding_window", "qk_rope_head_dim"), 8
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "qk_nope_head_dim", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_attention_groups", "expand", "mamba_expand", "linear_num_key_heads"), 2),
    **dict.fromkeys(("dropout", "hidden_dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout", "dropout_rate"), 0.0),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Small sizes by the names that configurations have for them."""
LARGEST = 5_000_000
"""Parameters of a model that is small enough for a test."""


class Logits(nn.Module):
    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, use_cache=False, **self.given).logits
        return found


def configured(kind: str, **more: Any) -> Any:
    """A small configuration of a model type, with a layer of each of its first two types."""
    made = library("transformers").CONFIG_MAPPING[kind]
    whole = made()
    fixed = {name for name in SIZES if isinstance(known := getattr(made, name, None), property) and known.fset is None}
    sizes = {name: size for name, size in SIZES.items() if hasattr(whole, name) and name not in fixed}
    for name in ("layer_types", "mlp_layer_types"):
        types = list(dict.fromkeys(getattr(whole, name, None) or ()))
        if types:
            sizes[name] = (types * 2)[:2]
    if "kv_lora_rank" in sizes:  # keys and values of every head come from one small vector
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return made(**{**sizes, **more})


def made_of(config: Any, experts: str = "eager", auto: str = "AutoModelForCausalLM") -> nn.Module:
    """The model of a configuration with random matrices, in the default type of numbers."""
    make: Callable[..., nn.Module] = getattr(library("transformers"), auto).from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > LARGEST:
        pytest.skip(f"{size:,} parameters")
    torch.manual_seed(0)
    model = make(config, attn_implementation="eager", experts_implementation=experts).to(torch.get_default_dtype())
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def error_of(module: nn.Module) -> float:
    """How far the gradients of the split are from those of autograd, relative to their norm; infinite where one is None in one alone."""
    theirs, mine = gradients(module, Plain), gradients(module, Ours)
    return max(difference(mine[name], wanted) for name, wanted in theirs.items())


def difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    if mine is None or wanted is None:
        return 0.0 if mine is wanted else math.inf
    error = (mine - wanted).norm().item()
    return 0.0 if error == 0 else error / max(wanted.norm().item(), 1e-300)


def gradients(module: nn.Module, way: type[Plain] | type[Ours]) -> dict[str, Tensor | None]:
    """The gradients of two microbatches, one of which is in flight while the other goes back."""
    module.zero_grad()
    torch.manual_seed(1)
    trained = way(module, [(torch.randint(3, 60, (2, 7)),) for _ in range(2)])
    passes = {"F": trained.forward, "B": trained.backward, "W": trained.weight}
    with trained.stage.stepping() if isinstance(trained, Ours) else nullcontext():
        for step in ("F0", "F1", "B0", "B1", "W0", "W1"):
            passes[step[0]](int(step[1:]))
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def report_of(module: nn.Module) -> SplitReport:
    stage = make_stage("deferred", module, 0)
    stage.splitter.count()
    with stage.stepping():
        (y,) = stage.forward(0, (torch.randint(3, 60, (2, 7)),))
        stage.backward(0, (torch.ones_like(y),))
        stage.weight(0)
    return stage.report()


def share_of(module: nn.Module) -> float:
    share = report_of(module).share
    assert share is not None
    return share


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    with double_precision():
        yield


@pytest.mark.parametrize(
    ("kind", "is_checkpointed"), [("gpt2", True), ("mixtral", False), ("mixtral", True), ("gpt_oss", False), ("deepseek_v3", False)]
)
def test_blocks_leave_nearly_all_to_w(kind: str, is_checkpointed: bool) -> None:
    model = made_of(configured(kind))
    if is_checkpointed:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    module = Logits(model)
    assert error_of(module) <= 1e-12
    assert share_of(module) >= (0.95 if kind == "gpt2" else 0.9)


def test_gathered_experts_wait() -> None:
    module = Logits(made_of(configured("qwen3_moe"), experts="batched_mm"))
    assert error_of(module) <= 1e-12
    assert share_of(module) >= 0.9


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped products")
def test_grouped_experts_wait() -> None:
    with single_precision():
        module = Logits(made_of(configured("qwen2_moe"), experts="grouped_mm"))
        assert error_of(module) <= 1e-5
        assert share_of(module) >= 0.9


@contextmanager
def single_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield


def test_of_lora_the_small_matrices_alone_wait() -> None:
    peft = library("peft")
    llama = made_of(configured("llama"))
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))
    module = Logits(model)
    assert error_of(module) <= 1e-12
    report = report_of(module)
    assert report.share == 1.0
    assert report.at_once == ()


def test_the_position_bias_of_t5_has_its_gradient() -> None:
    model = made_of(configured("t5", num_decoder_layers=2), auto="AutoModelForSeq2SeqLM")
    module = Logits(model, decoder_input_ids=torch.randint(3, 60, (2, 5)))
    assert error_of(module) <= 1e-12
    assert share_of(module) >= 0.95
    assert all(p.grad is not None and p.grad.any() for name, p in module.named_parameters() if "relative_attention_bias" in name)


COUNTED_TOO_MUCH = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hrm_text", "hy_v4", "longcat_flash"}
"""Models in which parts without a gradient (indexers, first rounds of a loop) or casts of small matrices weigh much at these sizes."""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_language_model_that_can_be_made_small() -> None:
    """Those that Transformers registers; what fails without a split, for its sizes do not fit each other, is left out."""
    compared, wrong, small = [], {}, {}
    for kind in library("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            module = Logits(made_of(configured(kind)))
            gradients(module, Plain)
        except (Exception, pytest.skip.Exception):  # as many kinds of errors as there are ways to write a configuration
            continue
        compared.append(kind)
        error, share = error_of(module), report_of(module).share
        if not error <= 1e-12:
            wrong[kind] = error
        if share is not None and share < 0.9:
            small[kind] = share
    assert not wrong
    assert len(compared) >= 130
    assert set(small) <= COUNTED_TOO_MUCH
