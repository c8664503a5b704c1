"""The cost of the backward split in training: processor time of steps of zb-h1 over that of 1F1B, which does not split.

A Llama of 58 million parameters, cut in two by `zb.split`, on two ranks of one thread each, in float32. One model has a pipeline per
schedule. They step in turns, so that changes of the machine affect both. The time of a step is user and system processor time of both
ranks, including page faults, once with glibc's default allocator, and once with one that keeps freed memory. Writes `results.json` next to
this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from ranks import in_ranks, machine, show

from tests.libraries import library

SPLIT, FUSED = "zb-h1", "1f1b"
VOCABULARY = 32000
CASES = [(8, 1, 128), (4, 4, 128)]
"""Microbatches of a step, sequences of a microbatch, tokens of a sequence."""
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""Lets glibc keep freed memory instead of giving it back to the system, which clears every page of it when it is asked for again."""


class Used(NamedTuple):
    """What steps have used so far: seconds of a processor, and pages that the system had to find."""

    seconds: float
    faults: int


def main() -> None:
    """Measure every case and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="turns measured per case")
    options = parser.parse_args()
    rows = []
    for keeps in (False, True):
        if keeps:
            os.environ |= KEEP
        for microbatches, sequences, length in CASES:
            row = {"glibc": "keeps freed memory" if keeps else "as it is"}
            row |= {"microbatches": microbatches, "sequences": sequences, "length": length}
            turns = in_ranks(measure, 2, microbatches, sequences, length, options.turns)
            rows.append(show(row | summary(turns)))
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine(), "split_step": rows}, indent=1) + "\n")


def summary(turns: list[dict[str, Used]]) -> dict[str, Any]:
    """Medians over the turns. The ratios are of one turn each, and of the least time of each, which others disturbed least."""
    seconds = {name: [turn[name].seconds for turn in turns] for name in (SPLIT, FUSED)}
    faults = {name: int(statistics.median(turn[name].faults for turn in turns)) for name in (SPLIT, FUSED)}
    ratios = [split / fused for split, fused in zip(seconds[SPLIT], seconds[FUSED], strict=True)]
    row: dict[str, Any] = {f"{name}_ms": round(1000 * statistics.median(values)) for name, values in seconds.items()}
    row |= {f"{name}_faults": count for name, count in faults.items()}
    row |= {"split_over_fused": round(statistics.median(ratios), 4), "of_least": round(min(seconds[SPLIT]) / min(seconds[FUSED]), 4)}
    return row


def measure(microbatches: int, sequences: int, length: int, turns: int) -> list[dict[str, Used]]:
    """What a step of each schedule used on all ranks, turn by turn."""
    model = llama()
    tokens = torch.randint(0, VOCABULARY, (microbatches * sequences, length))
    pipelines = {name: zb.Pipeline(zb.split(model), name, microbatches, loss_fn) for name in (FUSED, SPLIT)}
    found = []
    for turn in range(turns + 2):
        used = {name: step(pipe, tokens) for name, pipe in (pipelines.items() if turn % 2 else reversed(pipelines.items()))}
        if turn >= 2:
            found.append({name: of_all_ranks(one) for name, one in used.items()})
    for pipe in pipelines.values():
        pipe.close()
    return found


def llama() -> nn.Module:
    """The same on every rank."""
    transformers = library("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))
    return model


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def step(pipe: zb.Pipeline, tokens: Tensor) -> Used:
    """What a step used on this rank; gradients are there already, as after the first microbatch of any step."""
    for module in pipe.modules.values():
        module.zero_grad(set_to_none=False)
    before = resource.getrusage(resource.RUSAGE_SELF)
    pipe.step({"input_ids": tokens}, tokens)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Used(seconds, after.ru_minflt - before.ru_minflt)


def of_all_ranks(used: Used) -> Used:
    sums = torch.tensor(used, dtype=torch.float64)
    dist.all_reduce(sums)
    return Used(sums[0].item(), int(sums[1]))


if __name__ == "__main__":
    main()
