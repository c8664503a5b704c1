"""A corpus with the statistics of text, a tokenizer of words, and the files that a script leaves."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>", "<mask>")
WORDS = tuple(f"w{index}" for index in range(60))


def sentences(count: int, seed: int = 0) -> list[str]:
    """Returns sentences of 4 to 12 words, in which a word often follows its predecessor."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        words = [draw.randrange(len(WORDS))]
        for _ in range(draw.randint(3, 11)):
            words.append((words[-1] + 1) % len(WORDS) if draw.random() < 0.7 else draw.randrange(len(WORDS)))
        texts.append(" ".join(WORDS[word] for word in words))
    return texts


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that gives each word of `WORDS` a token."""
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate((*WORDS, *SPECIAL))}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<eos>",
        sep_token="<eos>",
    )


def write_results(folder: Path, figures: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes what the test compares: numbers as a user would print them, and the weights of the whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(figures))
    torch.save({name: value.detach().clone() for name, value in weights.items()}, folder / "weights.pt")
