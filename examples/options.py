"""The command line of the demo."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import zerobubble as zb


@dataclass(frozen=True)
class Options:
    """What to train and how. `pace` is None to decide by the machine, `steps` None for as many as fit into `minutes`."""

    ranks: int
    schedule: str
    compare: tuple[str, ...]
    microbatches: int
    microbatch_size: int
    steps: int | None
    minutes: float
    compare_steps: int
    lr: float
    seed: int
    pace: bool | None
    one_device: bool
    out: Path
    layers: int
    width: int
    heads: int
    context: int

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text in one batch."""
        return self.microbatches * self.microbatch_size * self.context


def parse(arguments: list[str]) -> Options:
    """Parses `arguments`. Ends the process with one sentence and exit code 2 if they are wrong."""
    parser = _parser()
    found = vars(parser.parse_args(arguments))
    found["ranks"] = int(os.environ.get("WORLD_SIZE", found["ranks"]))
    compare = tuple(name for name in found.pop("compare").split(",") if name and name != found["schedule"])
    options = Options(compare=compare, **found)
    fault = _fault(options)
    if fault:
        parser.error(fault)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT on the source of Python's standard library, through a zero-bubble pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    switch = argparse.BooleanOptionalAction
    run = parser.add_argument_group("training")
    run.add_argument("--ranks", type=int, default=4, help="processes in the pipeline; under torchrun its number counts")
    run.add_argument("--schedule", default="zb-v", help=f"one of {', '.join(zb.schedules.SCHEDULES)}")
    run.add_argument("--microbatches", type=int, default=8, help="microbatches per batch")
    run.add_argument("--microbatch-size", type=int, default=1, help="sequences in a microbatch")
    run.add_argument("--minutes", type=float, default=3, help="minutes that the demo may take; they determine the number of steps")
    run.add_argument("--steps", type=int, default=None, help="batches to train on, however long they take")
    run.add_argument("--lr", type=float, default=5e-4, help="learning rate of AdamW")
    run.add_argument("--seed", type=int, default=0, help="fixes the initial weights and the batches")
    report = parser.add_argument_group("comparison and report")
    report.add_argument("--compare", default="1f1b,zb-h1", help="schedules to compare with, separated by commas")
    report.add_argument("--compare-steps", type=int, default=8, help="batches for each compared schedule")
    report.add_argument("--one-device", action=switch, default=True, help="train the same model on one device and compare losses")
    report.add_argument(
        "--pace", action=switch, default=None, help="stretch every pass to a nominal time; the default if ranks outnumber cores"
    )
    report.add_argument("--out", type=Path, default=Path("demo-report"), help="folder for the report")
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=int, default=8, help="transformer blocks, the same number in every stage")
    model.add_argument("--width", type=int, default=320, help="width of the model")
    model.add_argument("--heads", type=int, default=5, help="attention heads")
    model.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    return parser


def _fault(options: Options) -> str:
    """Returns a sentence on what is wrong with `options`; empty if nothing is."""
    for name in ("ranks", "microbatches", "microbatch_size", "steps", "layers", "width", "heads", "context"):
        if (number := getattr(options, name)) is not None and number < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {number}"
    if not options.minutes > 0:
        return f"--minutes must be above 0, got {options.minutes:g}"
    if options.out.exists() and not options.out.is_dir():
        return f"--out must be a folder, and {options.out} is a file"
    if options.compare_steps < 2:
        return f"--compare-steps must be at least 2, got {options.compare_steps}"
    if options.width % options.heads:
        return f"--width must be a multiple of --heads, got {options.width} and {options.heads}"
    for name in (options.schedule, *options.compare):
        try:
            num_stages = zb.make(name, options.ranks, options.microbatches).num_stages
        except zb.InputError as error:
            return str(error)
        if options.layers % num_stages:
            return f"--layers must be a multiple of the {num_stages} stages of {name} on {options.ranks} ranks, got {options.layers}"
    return ""
