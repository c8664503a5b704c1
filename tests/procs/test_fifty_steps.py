"""Fifty steps of training with cut models on four ranks, in float32: the losses of one device.

Language models learn the source of Python's standard library, image models to classify rendered digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from examples.text import batch, standard_library
from tests.libraries import library
from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.ranks import Ranks

pytestmark = pytest.mark.spread

STEPS, MICROBATCHES, RANKS = 50, 4, 4
TOLERANCE = 1e-5
SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
}


def language_model(family: str) -> nn.Module:
    transformers = library("transformers")
    sizes = {
        "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 64}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "qwen2_moe": SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    }
    config = transformers.AutoConfig.for_model(family, **sizes.get(family, SIZES))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def t5() -> nn.Module:
    transformers = library("transformers")
    sizes = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}
    made: nn.Module = transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0, **sizes))
    return made


def vit() -> nn.Module:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    made: nn.Module = transformers.ViTForImageClassification(
        # with weights as small as usual it would not learn in fifty steps
        transformers.ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=10, initializer_range=0.2, **sizes)
    )
    return made


def resnet() -> nn.Module:
    made: nn.Module = library("torchvision.models").resnet18(num_classes=10)
    made.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    return made


def tokens_loss(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def image_loss(output: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)


Step = tuple[Any, Tensor]
"""The inputs and targets of a step."""


def sentences() -> Iterator[Step]:
    text = standard_library().train
    for step in range(STEPS):
        ids, targets = batch(text, sequences=8, length=24, seed=step)
        yield {"input_ids": ids}, targets


def sentences_to_copy() -> Iterator[Step]:
    """The decoder must reproduce the encoder's input."""
    for inputs, _ in sentences():
        ids = inputs["input_ids"]
        yield {"input_ids": ids, "decoder_input_ids": nn.functional.pad(ids[:, :-1], (1, 0))}, ids


SEGMENTS = (0x3F, 0x06, 0x5B, 0x4F, 0x66, 0x6D, 0x7D, 0x07, 0x7F, 0x6F)
"""For each digit the lit ones of seven segments, as bits: top, two on the right from above, bottom, two on the left from below, middle."""
STROKES = ((0, 1, 0, 5), (0, 5, 4, 5), (4, 9, 4, 5), (8, 9, 0, 5), (4, 9, 0, 1), (0, 5, 0, 1), (4, 5, 0, 5))
"""The rows and columns of each segment, with their ends: first row, row behind, first column, column behind."""


def digit(number: int) -> Tensor:
    """A digit of seven segments, 9 by 5 pixels."""
    drawn = torch.zeros(9, 5)
    for segment, (top, bottom, left, right) in enumerate(STROKES):
        if SEGMENTS[number] >> segment & 1:
            drawn[top:bottom, left:right] = 1
    return drawn


def digits(size: int) -> Callable[[], Iterator[Step]]:
    """Digits at about the same place of noisy images of `size` by `size` pixels."""

    def steps() -> Iterator[Step]:
        random = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            labels = torch.randint(0, 10, (16,), generator=random)
            images = 0.2 * torch.randn(16, 1, size, size, generator=random)
            for image, label in zip(images, labels.tolist(), strict=True):
                top, left = torch.randint(0, 3, (2,), generator=random).tolist()
                image[0, top : top + 9, left : left + 5] += digit(label)
            yield images, labels

    return steps


Case = tuple[Callable[[], nn.Module], Callable[[], Iterator[Step]], Callable[..., Tensor]]
CASES: dict[str, Case] = {
    **{
        family: (lambda family=family: language_model(family), sentences, tokens_loss) for family in ("gpt2", "llama", "gemma", "qwen2_moe")
    },
    "t5": (t5, sentences_to_copy, tokens_loss),
    "vit": (vit, digits(16), image_loss),
    "resnet": (resnet, digits(32), image_loss),
}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "resnet":
        return torch.optim.SGD(parameters, lr=0.005, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=3e-3 if name == "vit" else 1e-3)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    library("transformers").logging.set_verbosity_error()
    return CASES[name][0]()


def pipelined(group: Any, name: str, schedule: str) -> list[float]:
    _, steps, loss_fn = CASES[name]
    losses = []
    example = next(steps())[0]
    with zb.Pipeline(zb.split(model_of(name), example=example), schedule, MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = optimizer_of(name, pipe.parameters())
        for inputs, targets in steps():
            losses.append(pipe.step(inputs, targets).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def on_one_device(name: str) -> list[float]:
    """The same with a model that is not cut, which accumulates the gradients of the same microbatches."""
    _, steps, loss_fn = CASES[name]
    model = model_of(name)
    optimizer = optimizer_of(name, model.parameters())
    losses = []
    for inputs, targets in steps():
        total = 0.0
        for j in range(MICROBATCHES):
            part = {key: value.chunk(MICROBATCHES)[j] for key, value in inputs.items()} if isinstance(inputs, dict) else None
            output = model(**part) if part is not None else model(inputs.chunk(MICROBATCHES)[j])
            loss = loss_fn(output, targets.chunk(MICROBATCHES)[j]) / MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reference(group: Any, name: str) -> list[float]:
    return on_one_device(name)


@pytest.mark.long
@pytest.mark.parametrize(("turn", "name"), [pytest.param(turn, name, id=name) for turn, name in enumerate(CASES)])
def test_fifty_steps_have_the_losses_of_one_device(world: Ranks, turn: int, name: str) -> None:
    """On one of two schedules in turn, with ZEROBUBBLE_EXHAUSTIVE=1 on both.

    One device is a rank of its own, so it has as many threads as each of the four.
    """
    (expected,) = world.run(reference, name, ranks=1, seconds=550)
    assert sum(expected[-10:]) < sum(expected[:10])
    for schedule in ("zb-v", "1f1b") if EXHAUSTIVE else (("zb-v", "1f1b")[turn % 2],):
        for losses in world.run(pipelined, name, schedule, ranks=RANKS, seconds=550):
            worst = max(abs(ours - other) / abs(other) for ours, other in zip(losses, expected, strict=True))
            assert worst <= TOLERANCE, (schedule, worst)
