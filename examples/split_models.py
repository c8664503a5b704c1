"""Train models that were not written for pipelining over pipeline ranks, each cut by `zb.split`.

torchrun --nproc-per-node 2 examples/split_models.py llama

Instead of `llama`, give any name of `MODELS`. The docstring of its function describes the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from text import batch, standard_library
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import zerobubble as zb

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
RHYME = b"one for the money, two for the show, three to get ready and four to go."


class Case(NamedTuple):
    """What to train: `batch` returns the inputs and targets of a step, and `example` an input if the model needs one to be cut."""

    model: nn.Module
    schedule: str
    loss_fn: Callable[[Any, Tensor], Tensor]
    batch: Callable[[int], tuple[Any, Tensor]]
    lr: float = 3e-3
    steps: int = 12
    example: Tensor | None = None
    generates: bool = False


def model_loss(output: Any, _: Tensor) -> Tensor:
    """Returns the loss that the model computes itself, because its inputs contain `labels`."""
    return output.loss


def token_loss(output: Any, targets: Tensor) -> Tensor:
    """Returns the mean over all tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def language_model(name: str = "llama", **settings: Any) -> nn.Module:
    """Returns a small causal language model of Transformers, made from its configuration."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **settings))


def text_batches(labels: bool) -> Callable[[int], tuple[dict[str, Tensor], Tensor]]:
    """Returns a function from a step to inputs and targets, with `labels` if the model computes its loss itself."""
    text = standard_library().train

    def inputs_and_targets(step: int) -> tuple[dict[str, Tensor], Tensor]:
        ids, targets = batch(text, sequences=16, length=64, seed=step)
        return {"input_ids": ids} | ({"labels": ids} if labels else {}), targets

    return inputs_and_targets


def llama() -> Case:
    """A causal language model, with a loss outside the model."""
    return Case(language_model(), "zb-v", token_loss, text_batches(labels=False))


def generate() -> Case:
    """A language model that learns a rhyme, and then generates it without a cache."""
    rhyme = torch.tensor([list(RHYME)] * 2)
    inputs = {"input_ids": rhyme, "labels": rhyme}
    return Case(language_model(), "zb-v", model_loss, lambda _: (inputs, rhyme), lr=5e-3, steps=100, generates=True)


def lora() -> Case:
    """Only low-rank adapters of peft, with recomputed layers. Frozen parameters have no gradient and take no time in W."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(language_model(), LoraConfig(r=8, target_modules="all-linear"))
    adapted.gradient_checkpointing_enable()
    return Case(adapted, "zb-h1", model_loss, text_batches(labels=True), lr=1e-2)


def experts() -> Case:
    """A mixture of experts. The loss of its routers uses the logits of all layers, which travel from stage to stage."""
    routed = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    return Case(language_model("mixtral", output_router_logits=True, **routed), "zb-v", model_loss, text_batches(labels=True))


def t5() -> Case:
    """T5, which learns to copy its input. Every decoder layer uses the output of the encoder."""
    sizes = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}

    def copied(_: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(3, 32, (16, 6))
        shifted = nn.functional.pad(ids[:, :-1], (1, 0))  # the decoder sees the tokens before each token
        return {"input_ids": ids, "decoder_input_ids": shifted}, ids

    return Case(T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes)), "zb-h1", token_loss, copied, steps=20)


def resnet() -> Case:
    """A ResNet of torchvision. Its batch norms see one microbatch at a time, as in gradient accumulation."""
    from torchvision.models import resnet18

    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return Case(resnet18(num_classes=10), "1f1b", nn.functional.cross_entropy, lambda _: (images, labels), example=images[:2], steps=8)


MODELS = {make.__name__: make for make in (llama, generate, lora, experts, t5, resnet)}


def generated(pipe: zb.Pipeline, ids: Tensor, length: int) -> Tensor:
    """Returns `ids` with `length` more tokens by greedy decoding. Only the last stage's rank has the output, and sends it to the others."""
    for _ in range(length):
        _, output = pipe.eval_step({"input_ids": ids}, num_microbatches=1)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, None if output is None else output.logits[:, -1:].argmax(-1))
        ids = torch.cat([ids, next(token for token in gathered if token is not None)], dim=1)
    return ids


def main() -> None:
    """Trains, in one process per rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and random data on every rank
    case = MODELS[sys.argv[1]]()
    count = 2 if case.generates else 4
    pipe = zb.Pipeline(zb.split(case.model, example=case.example), case.schedule, num_microbatches=count, loss_fn=case.loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=case.lr)
    for step in range(case.steps):
        inputs, targets = case.batch(step)
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if case.generates:
        written = generated(pipe, torch.tensor([list(RHYME[:8])]), length=26)
        if pipe.rank == 0:
            print("written:", bytes(written[0].tolist()).decode(errors="replace"))
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
