"""Transformers models in the deferred split: gradients match autograd, and most weight gradients are computed in W.

Covers every language model of Transformers that can be made small. Nearly all weight work is in W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import zerobubble as zb
from benchmarks.split_matrix.ways import Ours, Plain, double_precision
from tests.families import families
from tests.libraries import library
from tests.procs.versions import takes_an_hour
from tests.tiny import made, model_class, shrunk
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import arguments_of
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.payload import Payload, flatten_pytree

pytestmark = [
    pytest.mark.spread,
    pytest.mark.skipif(not CAN_SEE_HOOKS, reason="before 2.8 torch does not say who saves tensors: matrices of modules stay in B"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


class Logits(nn.Module):
    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, use_cache=False, **self.given).logits
        return found


def tiny(family: str, experts: str = "eager", mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING") -> nn.Module:
    """A model of the family with two layers, in the default type of numbers."""
    kind = model_class(family, mapping)
    return made(kind, shrunk(kind.config_class, 2), experts)


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "is_checkpointed"), [("gpt2", True), ("mixtral", False), ("mixtral", True), ("gpt_oss", False), ("deepseek_v3", False)]
)
def test_blocks_leave_nearly_all_to_w(kind: str, is_checkpointed: bool) -> None:
    model = tiny(kind)
    if is_checkpointed:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    module = Logits(model)
    assert error_of(module) <= 1e-12
    assert share_of(module) >= (0.95 if kind == "gpt2" else 0.9)


def test_gathered_experts_wait() -> None:
    module = Logits(tiny("qwen3_moe", experts="batched_mm"))
    assert error_of(module) <= 1e-12
    assert share_of(module) >= 0.9


@pytest.mark.long
@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped products")
def test_grouped_experts_wait() -> None:
    with single_precision():
        module = Logits(tiny("qwen2_moe", experts="grouped_mm"))
        assert error_of(module) <= 1e-5
        assert share_of(module) >= 0.9


@contextmanager
def single_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield


@pytest.mark.long
def test_of_lora_the_small_matrices_alone_wait() -> None:
    peft = library("peft")
    llama = tiny("llama")
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))
    module = Logits(model)
    assert error_of(module) <= 1e-12
    report = report_of(module)
    assert report.share == 1.0
    assert report.in_b == ()


@pytest.mark.long
def test_the_position_bias_of_t5_has_its_gradient() -> None:
    model = tiny("t5", mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING")
    module = Logits(model, decoder_input_ids=torch.randint(3, 60, (2, 5)))
    assert error_of(module) <= 1e-12
    assert share_of(module) >= 0.95
    assert all(p.grad is not None and p.grad.any() for name, p in module.named_parameters() if "relative_attention_bias" in name)


DENSE = ("gpt2", "llama", "gemma2", "bloom", "opt", "gpt_neox")
MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.sweep
@pytest.mark.parametrize("family", [*DENSE[:2], *(pytest.param(name, marks=pytest.mark.long) for name in MIXTURES[:1])])
def test_stages_of_cut_models_leave_nearly_all_to_w(family: str) -> None:
    for counted in counts_of_cut(family):
        assert counted.share >= (0.95 if family in DENSE else 0.9)
        assert counted.claimed <= counted.share + 1e-9


@pytest.mark.long
@pytest.mark.parametrize("family", [*DENSE[2:], *MIXTURES[1:]])
def test_stages_of_more_cut_models_leave_nearly_all_to_w(family: str) -> None:
    test_stages_of_cut_models_leave_nearly_all_to_w(family)


class Counted(NamedTuple):
    """What W did of a stage's floating-point operations for weight gradients, by a count of what ran in it, and what the stage claims."""

    share: float
    claimed: float


def counts_of_cut(family: str, num_stages: int = 2) -> list[Counted]:
    """Of each stage that `zb.split` makes of a small model, in one microbatch."""
    model = tiny(family)
    cut = zb.split(model)
    stages = [make_stage("deferred", cut(stage, num_stages), stage) for stage in range(num_stages)]
    inputs = payload({"input_ids": torch.randint(3, 60, (2, 7))})
    given, left, found = [inputs], [], []
    with ExitStack() as stack:
        for stage in stages:
            stage.splitter.count()
            stack.enter_context(stage.stepping())
        for stage in stages:
            left.append(stage.forward(0, given[-1], mean_of_logits if stage is stages[-1] else None))
            given.append(received(left[-1]))
        for stage, outputs in zip(stages, left, strict=True):
            stage.backward(0, tuple(torch.ones_like(tensor) for tensor in outputs if tensor.requires_grad))
            with FlopCounterMode(display=False) as counter:
                stage.weight(0)
            found.append((counter.get_total_flops(), stage.report().share))
    return [
        Counted(in_w / flops_for_weights(stage, arguments), share)
        for stage, arguments, (in_w, share) in zip(stages, given[:-1], found, strict=True)
    ]


def flops_for_weights(stage: Stage, inputs: Any) -> int:
    """Those of a backward pass of autograd, less those of one in which no matrix but an embedding trains."""
    everything = flops_of_backward(stage, inputs)
    trained = [
        parameter for part in stage.module.modules() if not isinstance(part, nn.Embedding) for parameter in part.parameters(recurse=False)
    ]
    trained = [parameter for parameter in trained if parameter.requires_grad and parameter.dim() > 1]
    for parameter in trained:
        parameter.requires_grad = False
    rest = flops_of_backward(stage, inputs)
    for parameter in trained:
        parameter.requires_grad = True
    return everything - rest


def flops_of_backward(stage: Stage, inputs: Any) -> int:
    args, kwargs = arguments_of(inputs)
    output = stage.module(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(dict(output)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    return counter.get_total_flops()


def payload(arguments: dict[str, Any]) -> Any:
    tensors, structure = flatten_pytree(arguments)
    return Payload.from_tensors(tensors, structure)


def received(outputs: Any) -> Any:
    """What the next stage gets of the outputs of one."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
    return Payload.from_tensors(leaves, outputs.structure) if isinstance(outputs, Payload) else tuple(leaves)


def mean_of_logits(output: Any) -> Tensor:
    mean: Tensor = output.logits.mean()
    return mean


CLAIM_LITTLE = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hrm_text", "hy_v4", "longcat_flash"}
"""Models in which parts without a gradient (indexers, first rounds of a loop) or casts of small matrices weigh much at these sizes."""


@takes_an_hour
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_language_model_that_can_be_made_small() -> None:
    """Those that Transformers registers; what fails without a split, since it needs more than tokens, is left out.

    The gradients of blt are not numbers at these sizes.
    """
    compared, wrong, small = [], {}, {}
    for family in (each for each in families() if each != "blt"):
        try:
            module = Logits(tiny(family))
            gradients(module, Plain)
        except Exception:  # as many kinds of errors as there are ways to write a model
            continue
        compared.append(family)
        error, share = error_of(module), report_of(module).share
        if not error <= 1e-12:
            wrong[family] = error
        if share is not None and share < 0.9:
            small[family] = share
    assert not wrong
    assert len(compared) >= 150
    assert set(small) <= CLAIM_LITTLE
