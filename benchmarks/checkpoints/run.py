"""The cost of saving and loading 1 GB over 4 ranks, compared with torch.distributed.checkpoint alone, and of steps during a save.

A model and its Adam state, a third each, over 4 ranks of one thread, in float32. torch.distributed.checkpoint writes a dict of the same
tensors under the same names, and reads it into them. Before each turn `sync` flushes pending writes, so that no turn pays for the previous
one. Steps are timed without a save, and during `zb.save(..., wait=False)`. Writes `results.json` next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks, machine, show

RANKS, MICROBATCHES, WIDTH = 4, 4, 1024


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7, help="turns measured")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    options = parser.parse_args()
    layers = max(RANKS, round(options.gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory() as folder:
        found = in_ranks(measure, RANKS, folder, layers, options.turns)
        steps = in_ranks(while_saving, RANKS, folder, layers)
    rows = {"checkpoint": show(summary(found)), "steps_while_saving": show(steps)}
    Path(__file__).with_name("results.json").write_text(json.dumps({"machine": machine(), **rows}, indent=1) + "\n")


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the turns; each ratio is that of the two in one turn."""
    turns = found["turns"]
    row: dict[str, Any] = {"gigabytes": round(found["bytes"] / 1e9, 3), "ranks": RANKS, "turns": len(turns)}
    for what in ("save", "load", "both"):
        seconds = {who: [turn[who][what] for turn in turns] for who in ("ours", "alone")}
        row |= {f"{who}_{what}_s": round(statistics.median(values), 3) for who, values in seconds.items()}
        ratios = [ours / alone for ours, alone in zip(seconds["ours"], seconds["alone"], strict=True)]
        row[f"{what}_over_alone"] = round(statistics.median(ratios), 3)
        row[f"{what}_over_alone_of_least"] = round(min(seconds["ours"]) / min(seconds["alone"]), 3)
    return row


def pipeline(layers: int) -> tuple[zb.Pipeline, torch.optim.Optimizer]:
    """A pipeline that has made a step, so that the optimizer has its tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    pipe = zb.Pipeline(zb.split(model, example=torch.ones(1, WIDTH)), "1f1b", MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-5)
    step(pipe, optimizer, 1)
    return pipe, optimizer


def step(pipe: zb.Pipeline, optimizer: torch.optim.Optimizer, rows: int) -> float:
    """The seconds of one step with microbatches of so many rows."""
    x = torch.ones(rows * MICROBATCHES, WIDTH)
    began = time.perf_counter()
    pipe.step(x, x)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def measure(folder: str, layers: int, turns: int) -> dict[str, Any]:
    """Seconds of saving and loading, turn by turn, each of the slowest rank."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
    pipe, optimizer = pipeline(layers)
    tensors = tensors_of(pipe, optimizer)
    ours = Path(folder, "ours"), lambda path: zb.save(path, pipe, optimizer), lambda path: zb.load(path, pipe, optimizer)
    alone = Path(folder, "alone"), lambda path: dcp.save(tensors, checkpoint_id=path), lambda path: dcp.load(tensors, checkpoint_id=path)
    found = []
    for turn in range(turns + 1):
        order = [("ours", ours), ("alone", alone)]
        seconds = {name: once(*way) for name, way in (order if turn % 2 else order[::-1])}
        if turn > 0:
            found.append(seconds)
    num_bytes = torch.tensor(sum(tensor.nbytes for tensor in tensors.values()))
    dist.all_reduce(num_bytes)
    pipe.close()
    return {"bytes": int(num_bytes), "turns": found}


def tensors_of(pipe: zb.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a checkpoint, those of the rest left out, under their names in ours."""
    found = {}
    for module in pipe.modules.values():
        for name, parameter in module.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            found |= {f"optimizer.{name}.{key}": tensor for key, tensor in optimizer.state[parameter].items()}
    return found


def once(path: Path, save: Callable[[Path], Any], load: Callable[[Path], Any]) -> dict[str, float]:
    """The seconds of one save and one load, and of both."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    seconds = [of_slowest(lambda: save(path)), of_slowest(lambda: load(path))]
    return {"save": seconds[0], "load": seconds[1], "both": sum(seconds)}


def of_slowest(act: Callable[[], Any]) -> float:
    """How long all ranks take, from when all begin."""
    dist.barrier()
    began = time.perf_counter()
    act()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def while_saving(folder: str, layers: int) -> dict[str, Any]:
    """Seconds of steps while nothing is written and while a checkpoint is, and of what `save` itself takes in both forms."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
    pipe, optimizer = pipeline(layers)
    path = Path(folder, "ours")
    waiting = of_slowest(lambda: zb.save(path, pipe, optimizer))
    zb.save(path, pipe, optimizer, wait=False).wait()  # makes room for the copies
    apart, during, calls, whole = [], [], [], []
    for _ in range(3):
        apart += [step(pipe, optimizer, 8) for _ in range(8)]
        began = time.perf_counter()
        handles: list[Any] = []
        calls.append(of_slowest(lambda handles=handles: handles.append(zb.save(path, pipe, optimizer, wait=False))))
        writing = torch.tensor(1)
        while writing.item():
            during.append(step(pipe, optimizer, 8))
            writing = torch.tensor(int(not handles[0].done()))
            dist.all_reduce(writing)
        whole.append(time.perf_counter() - began)
        handles[0].wait()
    pipe.close()
    row = {"step_s": statistics.median(apart), "step_during_save_s": statistics.median(during), "steps_during_save": len(during)}
    row |= {"save_s": waiting, "save_without_waiting_s": statistics.median(calls), "written_after_s": statistics.median(whole)}
    row["during_save_over_apart"] = row["step_during_save_s"] / row["step_s"]
    return {key: round(value, 4) for key, value in row.items()}


if __name__ == "__main__":
    main()
