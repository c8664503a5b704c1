"""Estimates compared with published step times and activation bytes.

The steps of arXiv 2205.05198 on A100 are estimated with one set of parameters. One of them was chosen for these steps, and the sensitivity
to two is included. Throughputs on H100, H800, B200, GB200 and GB300 follow with nothing fitted, the last of them held out. The figures are
arithmetic, equal on every machine. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parent))
from figures import rounded
from published import (
    A100,
    GIB,
    HELD_OUT,
    LEAST_OF_GB200,
    LLAMA3,
    LLAMA3_MICROBATCHES,
    LLAMA3_TFLOPS,
    NOT_CHOSEN_FOR,
    SUSTAINED_BY_GB200,
    THROUGHPUTS,
    Run,
    Throughput,
)

Efficiency = zb.cost_model.Efficiency
WITHIN, WITHIN_BYTES, WITHIN_UNFITTED = 0.04, 0.05, 0.06
BLACKWELL = "B200", "GB200", "GB300"
NEIGHBORS = [(products, wave) for products in (0.98, 1.00, 1.02) for wave in (128, 256, 512)]


def main() -> None:
    """Compare everything and write the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    steps = [show(row) for run in A100 for row in compare_steps(run)]
    memory = [row for run in A100 for row in compare_memory(run)]
    mean = fmean(abs(row["error"]) for row in steps)
    worst_bytes = max(abs(row["error"]) for row in memory)
    neighbors = [show(with_parameters(*pair)) for pair in NEIGHBORS]
    unfitted = [show(compare_throughput(published)) for published in THROUGHPUTS]
    others = [show(compare_throughput(published)) for published in NOT_CHOSEN_FOR]
    held_out = [show(compare_throughput(published)) for published in HELD_OUT]
    means = {
        name: fmean(abs(row["error"]) for row in rows)
        for name, rows in (("unfitted", unfitted), ("not_chosen_for", others), ("held_out", held_out))
    }
    too_large = [row["model"] for row in (*unfitted, *others, *held_out) if row["most_gb"] > row["memory_gb"]]
    beyond = [row["model"] for row in (*unfitted, *others, *held_out) if abs(row["error"]) > row["error_bar"]]
    results = {
        "mean_error": mean,
        "worst_error": max((row["error"] for row in steps), key=abs),
        "worst_error_of_bytes": worst_bytes,
        "mean_errors": means,
        "beyond_their_error_bar": beyond,
        "beyond_their_memory": too_large,
        "holds": mean <= WITHIN and worst_bytes <= WITHIN_BYTES and max(means.values()) <= WITHIN_UNFITTED and not beyond + too_large,
        "steps": steps,
        "activations": memory,
        "chosen_by_the_small": chosen_by(neighbors, A100[:2], A100[2:]),
        "with_other_parameters": neighbors,
        "unfitted": unfitted,
        "not_chosen_for": others,
        "held_out": held_out,
        "with_least_sustained_of_gb200": [show(with_less(published)) for published in THROUGHPUTS if name_of(published.gpu) in BLACKWELL],
        "llama3_as_trained": show(as_llama3_was_trained()),
        "assumptions": list(estimate(A100[1], "selective").assumptions),
    }
    Path(__file__).with_name("results.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def estimate(run: Run, recompute: str, efficiency: Any = None) -> Any:
    """The estimate of a run of the paper; its runs that compute all or nothing again have no sequence parallelism."""
    kept = {"sequence_parallel": recompute == "selective", "efficiency": efficiency or Efficiency()}
    return zb.cost_model.transformer(
        run.model, gpu="A100", tp=8, pp=run.pp, v=run.v, microbatch=run.microbatch, recompute=recompute, **kept
    )


def compare_steps(run: Run, efficiency: Any = None) -> list[dict[str, Any]]:
    """Seconds of a step, ours and published."""
    rows = []
    for recompute, published in (("full", run.full_s), ("selective", run.present_s)):
        step = estimate(run, recompute, efficiency).step(run.schedule, run.microbatches)
        found = {"model": run.model, "schedule": step.schedule, "recompute": recompute, "published_s": published, "ours_s": step.seconds}
        rows.append(found | {"error": step.seconds / published - 1, "update_s": step.update, "utilization": step.utilization})
    return rows


def compare_memory(run: Run) -> list[dict[str, Any]]:
    """GiB of activations on a GPU of the first rank, ours and published."""
    rows = []
    for recompute, published in (("none", run.none_gib), ("selective", run.present_gib)):
        ours = estimate(run, recompute).step(run.schedule, run.microbatches).rank_activations[0] / GIB
        found = {"model": run.model, "recompute": recompute, "published_gib": published, "ours_gib": ours}
        rows.append(show(found | {"error": ours / published - 1}))
    return rows


def with_parameters(products: float, wave: int) -> dict[str, Any]:
    """The errors of the steps with other values of the two parameters that were chosen."""
    errors = {run.model: [row["error"] for row in compare_steps(run, Efficiency(products=products, wave=wave))] for run in A100}
    every = [abs(error) for pair in errors.values() for error in pair]
    return {"products": products, "wave": wave, "mean_error": fmean(every), "worst_error": max(every), "errors": errors}


def chosen_by(neighbors: list[dict[str, Any]], seen: Sequence[Run], unseen: Sequence[Run]) -> dict[str, Any]:
    """The two parameters that fit the models `seen` best, and their mean error on these and on those `unseen`."""

    def mean(row: dict[str, Any], runs: Sequence[Run]) -> float:
        return fmean(abs(error) for run in runs for error in row["errors"][run.model])

    best = min(neighbors, key=lambda row: mean(row, seen))
    found = {"models": [run.model for run in seen], "products": best["products"], "wave": best["wave"]}
    return found | {"mean_error": mean(best, seen), "mean_error_of_others": mean(best, unseen)}


def name_of(gpu: Any) -> str:
    return gpu if isinstance(gpu, str) else gpu.name


def compare_throughput(published: Throughput, gpu: Any = None) -> dict[str, Any]:
    """Tokens per second and TFLOP/s of each GPU, ours and published, and bytes; `gpu` replaces the published one."""
    found = zb.cost_model.transformer(published.model, gpu=gpu or published.gpu, precision=published.precision, **published.setting)
    usual = "interleaved-1f1b" if found.setting.v > 1 else "1f1b"
    step = found.step(published.schedule or usual, published.microbatches)
    ours = step.tokens_per_second / step.gpus
    row = {"model": found.setting.model.name, "gpu": name_of(published.gpu), "gpus": step.gpus, "precision": published.precision}
    row |= {"published_tokens_per_s": published.tokens_per_s, "ours_tokens_per_s": ours}
    row |= {"published_tflops": published.tflops, "ours_tflops": step.flops_per_gpu / 1e12}
    error = row["ours_tflops"] / published.tflops - 1 if published.tokens_per_s is None else ours / published.tokens_per_s - 1
    row |= {"error": error, "most_gb": max(step.rank_bytes) / 1e9, "memory_gb": found.setting.gpu.memory_bytes / 1e9}
    row |= {"kind": found.setting.kind, "error_bar": step.error_bar}
    return row | {"setting": published.setting, "source": published.source}


def with_less(published: Throughput) -> dict[str, Any]:
    """The error where a GB200, and with it the other GPUs of its kind, sustain the least that was measured of it."""
    gpu = zb.cost_model.GPUS[name_of(published.gpu)]
    less = tuple((precision, flops * LEAST_OF_GB200 / SUSTAINED_BY_GB200) for precision, flops in gpu.sustained)
    row = compare_throughput(published, replace(gpu, sustained=less))
    return {name: row[name] for name in ("model", "gpu", "error")}


def as_llama3_was_trained() -> dict[str, Any]:
    """A step of Llama 3 405B over 16,384 H100, divided as in the report."""
    step = zb.cost_model.transformer("llama3-405b", gpu="H100", dp=128, **LLAMA3).step("interleaved-1f1b", LLAMA3_MICROBATCHES)
    return {"published_tflops": LLAMA3_TFLOPS, "ours_tflops": step.flops_per_gpu / 1e12, "most_gb": max(step.rank_bytes) / 1e9}


def show(row: dict[str, Any]) -> dict[str, Any]:
    print(rounded(row), flush=True)
    return row


if __name__ == "__main__":
    main()
