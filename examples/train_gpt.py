"""Train a small GPT through a zero-bubble pipeline, next to the same model on one device, and report on it.

    python examples/train_gpt.py                                   starts its own ranks
    torchrun --nproc-per-node 4 examples/train_gpt.py              runs on those of torchrun

`training.py` uses the pipeline, and `gpt.py` has the model. `--help` lists the options.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from math import inf
from pathlib import Path

import options
import torch
import torch.distributed as dist
from gpt import GPTConfig
from launch import is_rank, launch
from options import Options
from outcome import OneDevice, Outcome, pace_sentences, show, write
from pacing import LayerTimes
from terminal import Terminal
from text import standard_library
from training import Run, Task, fitting_steps, measure_layer, train, train_one_device


def main() -> int:
    """Starts the ranks, or runs as one of them."""
    chosen = options.parse(sys.argv[1:])
    if not is_rank():
        return launch(str(Path(__file__).resolve()), sys.argv[1:], chosen.ranks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted rank ends at once and in silence
    return run_rank(chosen)


def run_rank(chosen: Options) -> int:
    """Runs the demo on one rank."""
    begin = time.perf_counter()
    device = pick_device()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    rank = dist.get_rank()
    terminal = Terminal(speaks=rank == 0)
    model = GPTConfig(chosen.layers, chosen.width, chosen.heads, chosen.context, chosen.seed)
    terminal.section(f"A GPT of {model.num_parameters / 1e6:.3g} million parameters on {chosen.ranks} ranks ({device.type})")
    task = Task(chosen, model, standard_library(), device)

    terminal.say(
        "Measuring the passes of this machine ..." + ("" if chosen.steps else f" The demo takes about {chosen.minutes:g} minutes.")
    )
    layer = measure_layer(task)
    pace = find_pace(task, layer, terminal)
    end = begin + 60 * chosen.minutes
    steps = chosen.steps or fitting_steps(task, layer, pace, end - time.perf_counter())
    terminal.section(f"Training with {chosen.schedule}, {steps} steps")
    trained = run_schedule(task, chosen.schedule, steps, pace, terminal)
    if chosen.compare:
        terminal.section(f"The same first {chosen.compare_steps} steps with other schedules")
    compared = [run_schedule(task, name, chosen.compare_steps, pace, terminal) for name in chosen.compare]
    if rank == 0:
        until = inf if chosen.steps else end
        one_device = run_one_device(task, steps, until, pace, terminal) if chosen.one_device else None
        outcome = Outcome(task, num_cores(), pace, trained, compared, one_device, time.perf_counter() - begin)
        show(outcome, terminal)
        terminal.section("Written")
        terminal.list(write(outcome))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def find_pace(task: Task, layer: LayerTimes, terminal: Terminal) -> LayerTimes | None:
    """Returns nominal pass times if ranks outnumber cores or `--pace` is given. None means full speed."""
    asked, ranks = task.options.pace, task.options.ranks
    crowded = task.device.type == "cpu" and num_cores() < ranks
    if not (crowded if asked is None else asked):
        return None
    pace = layer.paced(ranks / num_cores())
    for sentence in pace_sentences(num_cores(), ranks, pace):
        terminal.say(sentence)
    return pace


def run_schedule(task: Task, name: str, steps: int, pace: LayerTimes | None, terminal: Terminal) -> Run:
    """Trains with one schedule, showing progress."""
    with terminal.progress(name, steps, task.options.tokens_per_step) as on_step:
        return train(task, name, steps, pace, on_step)


def run_one_device(task: Task, steps: int, until: float, pace: LayerTimes | None, terminal: Terminal) -> OneDevice:
    """Trains on this rank alone at full speed, showing progress. The other ranks wait without using the machine.

    If the pipelines are paced, its speed is shown at their nominal times, so that speeds are comparable.
    """
    options = task.options
    terminal.section("The same training on one device" + (", at full speed, shown at the nominal times" if pace else ""))
    nominal = pace.step_seconds(options.layers, options.microbatches) if pace else None
    with terminal.progress("one device", steps, options.tokens_per_step, nominal) as on_step:
        losses, seconds = train_one_device(task, steps, on_step, until)
    return OneDevice(losses, nominal or seconds)


def pick_device() -> torch.device:
    """Returns this rank's GPU if the machine has one per rank, else the CPU."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
