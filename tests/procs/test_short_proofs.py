"""A proof by a tiny model takes little time and memory however long the example is: its own example is short, if the same code runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.libraries import library
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.units import find_units
from zerobubble.models.proof.tiny import MOST_PROVED, tiny_models

TOKENS = 4096
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}
PADDING = torch.ones(8, TOKENS, dtype=torch.long)
PADDING[:, :100] = 0


def large(family: str, **settings: Any) -> nn.Module:
    """A model without values, too large to be copied."""
    transformers = library("transformers")
    config = transformers.AutoConfig.for_model(family, **(SIZES | settings))
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def first_tiny(model: nn.Module, **example: Tensor) -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.zeros(8, TOKENS, dtype=torch.long)
    tiny, (_, arguments) = next(tiny_models(model, ((), {"input_ids": tokens, "use_cache": False, **example})))
    return tiny, arguments


@pytest.mark.parametrize(
    ("family", "settings", "example"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"attention_mask": PADDING, "labels": torch.zeros(8, TOKENS, dtype=torch.long)}),
        ("llama", {"attn_implementation": "eager"}, {"attention_mask": PADDING}),
        ("mistral", {"sliding_window": 1024}, {}),
        ("qwen2", {"num_key_value_heads": 2}, {"position_ids": torch.arange(TOKENS).remainder(1000).expand(8, -1)}),
    ],
)
def test_the_example_of_a_tiny_model_is_short(family: str, settings: dict[str, Any], example: dict[str, Tensor]) -> None:
    """Both padding and tokens stay, and a window is shorter than the example if it was."""
    tiny, arguments = first_tiny(large(family, **settings), **example)
    for name in ("input_ids", *example):
        assert arguments[name].shape == (2, 64)
    if "attention_mask" in example:
        assert set(arguments["attention_mask"].unique().tolist()) == {0, 1}
    if "sliding_window" in settings:
        assert tiny.config.sliding_window == 1024 * 64 // TOKENS  # type: ignore[union-attr]


def test_an_example_stays_long_if_the_model_runs_other_code_on_a_short_one() -> None:
    """Even if both sides of a branch are on one line."""
    model = large("llama")
    kind: Any = type(model)

    class Scaled(kind):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            return super().forward(input_ids, **others).logits * (0.5 if input_ids.shape[1] > 1000 else 1.0)

    model.__class__ = Scaled
    _, arguments = first_tiny(model)
    assert arguments["input_ids"].shape == (8, TOKENS)


def test_a_tiny_model_of_many_layers_is_small() -> None:
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    tiny, _ = first_tiny(large("llama", **sizes))
    assert sum(parameter.numel() for parameter in tiny.parameters()) <= MOST_PROVED


class Chain(nn.Module):
    """Parts one after another. Calls `on_output` with each output."""

    def __init__(self, *parts: nn.Module, on_output: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.on_output = on_output

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            self.on_output(x)
        return x


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_an_observed_forward_releases_outputs() -> None:
    """Without the garbage collector, which is paused while a model is observed."""
    outputs: list[weakref.ref[Tensor]] = []

    def note(output: Tensor) -> None:
        outputs.append(weakref.ref(output))
        assert sum(ref() is not None for ref in outputs) <= 3  # locals of running frames hold two

    model = Chain(*(nn.Linear(4, 4) for _ in range(8)), on_output=note)
    with without_collections():
        flow = ObservedModel(model, find_units(model)).flow((torch.zeros(2, 4),), {}, training=True)
    assert len(flow.calls) == 8


def test_an_observed_output_takes_no_memory() -> None:
    """An output of 160 GB, as the scores of a large vocabulary for long sequences."""
    model = Chain(nn.Linear(4, 1_000_000), nn.Flatten(), on_output=lambda _: None)
    flow = ObservedModel(model, find_units(model)).flow((torch.zeros(40_000, 4),), {}, training=True)
    assert len(flow.calls) == 1
