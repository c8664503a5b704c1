"""Split models, used as Transformers' users do: masks, outputs, losses, checkpointing and adapters match one device.

Values that layers record besides their output cross stage boundaries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.families import NUM_LAYERS, next_token_loss, text
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.tiny import shrunk

pytestmark = [pytest.mark.spread, pytest.mark.filterwarnings("ignore")]

MICROBATCHES = 4
TOLERANCE, SMALL = 1e-12, 1e-4
ROUNDING = 1e-6
"""Transformers computes its own loss in float32, whatever type the model is of."""
IGNORED = -100
INPUTS, IDS = text()
SAMPLES, LENGTH = IDS.shape
LABELS = IDS.clone()
LABELS[0, :7] = LABELS[3, 2:] = LABELS[6:] = IGNORED
"""Few in the first microbatch, and none in the last."""


class Case(NamedTuple):
    """A model of a family with changed settings, how it is prepared, what it is called with, and the loss of what it gives."""

    family: str
    inputs: Mapping[str, Any] = INPUTS
    loss_fn: Callable[[Any, Tensor], Tensor] = next_token_loss
    settings: Mapping[str, Any] = {}
    attention: str = "eager"
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    options: Mapping[str, Any] = {}
    labels: Tensor = IDS


def own_loss(output: Any, labels: Tensor) -> Tensor:
    """The loss that the model computes itself from the labels among its inputs."""
    found: Tensor = output.loss
    return found


def loss_with(name: str) -> Callable[[Any, Tensor], Tensor]:
    """The usual loss, and the squares of every tensor of an output that has one of each layer."""

    def loss(output: Any, labels: Tensor) -> Tensor:
        return next_token_loss(output, labels) + sum(each.square().mean() for each in output[name] if each is not None)

    return loss


def first_of_tuple(output: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def num_items(labels: Tensor) -> Tensor:
    return (labels[..., 1:] != IGNORED).sum()


def hidden_mask() -> Tensor:
    """A 4-D mask that leaves out later tokens, and for every other sample the third."""
    mask = torch.zeros(SAMPLES, 1, LENGTH, LENGTH, dtype=torch.float64)
    hidden = torch.finfo(mask.dtype).min
    mask[:, :, torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)] = hidden
    mask[::2, :, 4:, 2] = hidden
    return mask


def checkpointed(*, reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return prepare


def adapted(**options: Any) -> Callable[[nn.Module], nn.Module]:
    """With low-rank adapters that do not begin at 0."""

    def prepare(model: nn.Module) -> nn.Module:
        peft = library("peft")
        made: nn.Module = peft.get_peft_model(
            model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})
        ).double()
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return made

    return prepare


def packed() -> Tensor:
    """Positions of two texts in each sample, which must not see each other."""
    return torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(SAMPLES, -1).contiguous()


def embedded() -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    return {"inputs_embeds": torch.randn(SAMPLES, LENGTH, 32, dtype=torch.float64, generator=random)}


CASES = {
    "hidden states": Case("llama", INPUTS | {"output_hidden_states": True}, loss_with("hidden_states")),
    "hidden states by settings": Case("gpt2", loss_fn=loss_with("hidden_states"), settings={"output_hidden_states": True}),
    "some hidden states": Case("llama", INPUTS | {"output_hidden_states": [1, 4]}, loss_with("hidden_states")),
    "attentions": Case("gpt2", INPUTS | {"output_attentions": True}, loss_with("attentions")),
    "router loss": Case("mixtral", INPUTS | {"output_router_logits": True, "labels": IDS}, own_loss, {"router_aux_loss_coef": 0.5}),
    "router loss by settings": Case("qwen2_moe", INPUTS | {"labels": IDS}, own_loss, {"output_router_logits": True}),
    "router logits": Case("qwen3_moe", INPUTS | {"output_router_logits": True}, loss_with("router_logits")),
    "router logits, checkpointed": Case(
        "mixtral", INPUTS | {"output_router_logits": True}, loss_with("router_logits"), prepare=checkpointed(reentrant=False)
    ),
    "checkpointed": Case("llama", prepare=checkpointed(reentrant=False)),
    "checkpointed, reentrant": Case("gpt2", prepare=checkpointed(reentrant=True)),
    "labels that count unevenly": Case(
        "llama", {"input_ids": IDS, "labels": LABELS}, own_loss, options={"loss_weight": num_items}, labels=LABELS
    ),
    "tuples": Case("llama", INPUTS | {"return_dict": False}, first_of_tuple),
    "4-D mask": Case("gemma2", {"input_ids": IDS, "attention_mask": hidden_mask()}),
    "4-D mask of booleans": Case("llama", {"input_ids": IDS, "attention_mask": hidden_mask() == 0}, attention="sdpa"),
    "position ids": Case("gpt2", INPUTS | {"position_ids": torch.arange(LENGTH).expand(SAMPLES, -1) + 2}),
    "packed texts": Case("llama", {"input_ids": IDS, "position_ids": packed()}, attention="sdpa"),
    "sliding window": Case("gemma3_text", settings={"sliding_window": 5}, attention="sdpa"),
    "sliding window, eager": Case("mistral", settings={"sliding_window": 5}),
    "embeddings": Case("llama", embedded() | {"attention_mask": INPUTS["attention_mask"]}),
    "adapters": Case("llama", prepare=adapted()),
    "adapters of experts": Case(
        "mixtral", INPUTS | {"labels": IDS}, own_loss, {"output_router_logits": True}, prepare=adapted(target_modules=["q_proj", "gate"])
    ),
    "adapters within experts": Case(
        "qwen3_moe", prepare=adapted(target_modules=["v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    ),
    "adapters, checkpointed": Case("llama", prepare=lambda model: checkpointed(reentrant=False)(adapted(use_dora=True)(model))),
}
QUICK = ("hidden states", "router loss")


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    config = shrunk(transformers.CONFIG_MAPPING[case.family], NUM_LAYERS)
    config._experts_implementation = "eager"  # the other one has no float64
    for name, value in case.settings.items():
        setattr(config, name, value)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.attention)
    return case.prepare(model.double())


def on_one_device(model: nn.Module, case: Case) -> float:
    """The loss of a batch of microbatches, each with its weight; leaves the gradients."""
    weigh = case.options.get("loss_weight", len)
    total = sum(int(weigh(labels)) for labels in case.labels.chunk(MICROBATCHES))
    found = 0.0
    for j, labels in enumerate(case.labels.chunk(MICROBATCHES)):
        if weigh(labels):
            part = {name: each.chunk(MICROBATCHES)[j] if isinstance(each, Tensor) else each for name, each in case.inputs.items()}
            loss = case.loss_fn(model(**part, use_cache=False), labels) * (weigh(labels) / total)
            loss.backward()
            found += loss.item()
    return found


def errors(group: Any, name: str, schedule: str) -> tuple[float, dict[str, float]]:
    """The errors of the loss and of the gradient of each parameter of this rank."""
    case = CASES[name]
    model = model_of(case)
    plain = copy.deepcopy(model)
    expected = on_one_device(plain, case)
    with zb.Pipeline(zb.split(model), schedule, MICROBATCHES, case.loss_fn, group=group, **case.options) as pipe:
        loss = pipe.step(dict(case.inputs), case.labels).item()
        ours = [each for module in pipe.modules.values() for each in module.named_parameters(remove_duplicate=False)]
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    return abs(loss - expected) / expected, {name: difference(parameter.grad, theirs[name].grad) for name, parameter in ours}


def difference(ours: Tensor | None, other: Tensor | None) -> float:
    if ours is None or other is None:
        return 0.0 if all(each is None or not each.any() for each in (ours, other)) else float("inf")
    return ((ours - other).norm() / other.norm().clamp_min(SMALL)).item()


def check(world: Ranks, name: str, schedule: str) -> None:
    results = world.run(errors, name, schedule, ranks=2, seconds=550)
    wrong = {parameter: error for _, of_rank in results for parameter, error in of_rank.items() if not error <= TOLERANCE}
    assert not wrong
    assert {parameter for _, of_rank in results for parameter in of_rank} == {
        parameter for parameter, _ in model_of(CASES[name]).named_parameters(remove_duplicate=False)
    }
    assert max(error for error, _ in results) <= (ROUNDING if CASES[name].loss_fn is own_loss else TOLERANCE)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("name", QUICK)
def test_what_layers_record_has_the_numbers_of_one_device(world: Ranks, name: str) -> None:
    check(world, name, "zb-v")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_a_model_in_use_has_the_numbers_of_one_device(world: Ranks, name: str) -> None:
    check(world, name, "zb-v")


TOKENS = 4


class Given(NamedTuple):
    """What `eval_step` gave on the last stage's rank: the kind of the output, how far its items are off, and the tokens that follow."""

    kind: str
    off: dict[str, float]
    tokens: Tensor


def given(group: Any, family: str) -> Given | None:
    """The output for a batch, then for a sequence that grows by the likeliest token, compared with one device."""
    case = Case(family, INPUTS | {"output_hidden_states": True})
    model = model_of(case)
    plain: Any = copy.deepcopy(model).eval()
    expected = plain(**case.inputs, use_cache=False)
    with zb.Pipeline(zb.split(model), "zb-v", MICROBATCHES, next_token_loss, group=group) as pipe:
        _, output = pipe.eval_step(dict(case.inputs))
        ids = written = plain.generate(IDS[:1, :6], max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        for length in range(6, 6 + TOKENS):  # of what one device has written, so that a rank without the output can go on
            _, step = pipe.eval_step({"input_ids": written[:, :length]}, num_microbatches=1)
            if step is not None:
                ids = torch.cat([ids[:, :length], step.logits[:, -1:].argmax(-1)], 1)
                assert torch.equal(ids, written[:, : length + 1])
    if output is None:
        return None
    pairs = {name: zip(*(torch.utils._pytree.tree_leaves(each[name]) for each in (output, expected)), strict=True) for name in expected}
    off = {name: max(difference(ours, other) for ours, other in of_item) for name, of_item in pairs.items()}
    assert list(output) == list(expected)
    return Given(type(output).__name__, off, ids)


@pytest.mark.long
def test_outputs_are_what_the_model_returns_and_greedy_tokens_those_of_one_device(world: Ranks) -> None:
    (found,) = [each for each in world.run(given, "gpt2", ranks=2) if each is not None]
    assert found.kind == "CausalLMOutputWithCrossAttentions"
    assert found.off.keys() == {"logits", "hidden_states"}
    assert max(found.off.values()) <= TOLERANCE
    assert found.tokens.shape == (1, 6 + TOKENS)


def names_of_stages(group: Any, family: str) -> dict[str, Tensor]:
    """What this rank would save."""
    with zb.Pipeline(zb.split(model_of(Case(family))), "zb-v", MICROBATCHES, next_token_loss, group=group) as pipe:
        pipe.step(dict(INPUTS), IDS)
        return {name: each for module in pipe.modules.values() for name, each in module.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen2_moe", marks=pytest.mark.long)])
def test_what_ranks_save_together_loads_into_the_whole_model(world: Ranks, family: str) -> None:
    saved = {name: each for of_rank in world.run(names_of_stages, family, ranks=2) for name, each in of_rank.items()}
    model = model_of(Case(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved, strict=True)
    expected = model_of(Case(family))
    assert all(torch.equal(ours, other) for ours, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert {name: each.shape for name, each in saved.items()} == {name: each.shape for name, each in expected.state_dict().items()}
