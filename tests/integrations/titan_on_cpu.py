"""torchtitan 0.3.0 on CPU ranks, for tests: what its trainer expects of a GPU, in one place.

`prepare` must run before `torchtitan.trainer` is imported.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 2048
WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]


class _Device:
    """What torchtitan asks of `torch.cuda`, answered for the CPU."""

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=2**36))
    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *args, **kwargs: None)

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        names = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
        return dict.fromkeys(names, 0)


def prepare() -> None:
    """Lets torchtitan run on this CPU."""
    torch.set_num_threads(1)
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = _Device
    utils.get_local_device = lambda: torch.device("cpu")
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None  # torch 2.13 has none
    from torch.nn.attention import flex_attention
    from torchtitan.models.common import attention

    flex_attention.create_mask = _mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)
    attention._compiled_create_block_mask = flex_attention.create_block_mask  # compilation takes 20 s of CPU in each process
    from torchtitan.distributed import fsdp

    fsdp.disable_fsdp_gradient_division = _sum_gradients


def _sum_gradients(model: Any) -> None:
    """Disables the division of gradients by FSDP2 with plain sums: gloo cannot multiply in a reduction."""
    for part in model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _mask(mod: Any, batch: int | None, heads: int | None, queries: int, keys: int, device: Any = None) -> torch.Tensor:
    """The mask of flex attention as a dense tensor, by broadcasting: vmap, as in torch, takes as long as a small model's step."""
    shape = (batch or 1, heads or 1, queries, keys)
    places = (torch.arange(size).view(-1, *[1] * (3 - dim)) for dim, size in enumerate(shape))
    return mod(*places).expand(shape).contiguous()


def _dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Attention with the mask of `block_mask`: flex attention has no backward pass on CPUs."""
    from torch.nn.attention.flex_attention import AuxOutput

    mask = _mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=None, max_scores=None)


def write_tokenizer(folder: Path) -> str:
    """Writes a tokenizer whose words are w0, w1, ... and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {word: 3 + number for number, word in enumerate(WORDS)}
    special = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for number, name in enumerate(("<bos>", "<eos>", "<unk>"))
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}))
    return str(folder)


def use_texts(num_texts: int = 200) -> None:
    """Replaces the texts of `c4_test` and `c4_validation` by short ones of counted words."""
    from datasets import Dataset
    from torchtitan.hf_datasets import text_datasets

    for name, start in (("c4_test", 0), ("c4_validation", 10_000)):
        loader = partial(_texts, Dataset, start, num_texts)
        text_datasets.DATASETS[name] = text_datasets.DatasetConfig(name, loader, text_datasets._process_c4_text)


def _texts(kind: Any, start: int, num_texts: int, path: str) -> Any:
    texts = []
    for number in range(start, start + num_texts):
        length = 20 + number * 7 % 60
        texts.append(" ".join(WORDS[(number * 131 + place * (1 + number % 3)) % 512] for place in range(length)))
    return kind.from_dict({"text": texts})
