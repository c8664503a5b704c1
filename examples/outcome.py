"""The results of the demo: tables for the terminal, and the files of the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pacing import LayerTimes
from terminal import Terminal
from training import Run, Task

import zerobubble as zb
from zerobubble.costs import NS_PER_MS
from zerobubble.explain import gaps
from zerobubble.export import perfetto_json, timeline_svg
from zerobubble.units import show_bytes, show_ms, show_percent
from zerobubble.view import MemoryRow, Report, ThroughputRow, report_html

BASE = "1f1b"
"""The schedule that is drawn above the trained one."""
FEW = 0.05
"""The largest share of passes over their nominal time with which speeds and bubbles are still those of the schedules."""
CLOSE = 0.05
"""The largest relative difference of a measured step and the predicted one with which they still are."""


@dataclass(frozen=True)
class OneDevice:
    """Training on one device: losses, and seconds per step, at the nominal times if the pipelines are paced."""

    losses: list[float]
    step_seconds: float


@dataclass(frozen=True)
class Outcome:
    """The runs of a demo: the trained one, the compared ones, and that of one device (None if it did not run)."""

    task: Task
    cores: int
    pace: LayerTimes | None
    trained: Run
    compared: list[Run]
    one_device: OneDevice | None
    seconds: float

    @property
    def runs(self) -> list[Run]:
        """All of them, the trained one last."""
        return [*self.compared, self.trained]

    @property
    def loss_difference(self) -> float | None:
        """The largest absolute difference of a step's loss between the pipeline and one device."""
        if self.one_device is None:
            return None
        return max(abs(a - b) for a, b in zip(self.trained.losses, self.one_device.losses, strict=False))

    @property
    def same_losses(self) -> bool:
        """Whether every compared schedule gave, step by step, the losses of the trained one."""
        return all(a == b for run in self.compared for a, b in zip(run.losses, self.trained.losses, strict=False))

    @property
    def drawn(self) -> list[tuple[Run, zb.Timeline]]:
        """The timelines of the report with their runs: a step of 1F1B, then the same step of the trained schedule and its prediction."""
        base = [(run, run.measured) for run in self.compared if run.schedule.name == BASE]
        return [*base, (self.trained, self.trained.measured), (self.trained, self.trained.predicted)]

    def tokens_per_second(self, run: Run | OneDevice) -> float:
        """Bytes of text learned from in a second."""
        return self.task.options.tokens_per_step / run.step_seconds

    def passes(self, run: Run) -> int:
        """Returns the number of passes in the training of `run`."""
        return len(run.losses) * sum(len(row) for row in run.schedule.rows)


def show(outcome: Outcome, terminal: Terminal) -> None:
    """Prints the results."""
    trained = outcome.trained
    if outcome.pace:
        terminal.section("Paced")
        terminal.say(overruns(outcome)[0])
    terminal.section("Loss")
    terminal.say(
        "{:.4f} on held-out text before training, {:.4f} after it".format(*trained.held_out)
        + f"; {trained.losses[0]:.4f} in the first step, {trained.losses[-1]:.4f} in the last, each on a text of its own"
    )
    terminal.say(_loss_sentence(outcome))
    terminal.section("Speed, memory of the fullest rank, and bubble: the share of rank time that is idle")
    titles = ("schedule", "tokens/s", "memory", "makespan predicted", "measured", "rank span predicted", "measured")
    terminal.table(titles, [*_one_device_row(outcome), *(_schedule_row(outcome, run) for run in outcome.runs)])
    terminal.section(f"A step of {trained.schedule.name} against its prediction")
    for sentence in str(trained.difference).splitlines():
        terminal.say(sentence)
    terminal.section(f"Peak activation memory with {trained.schedule.name}")
    rows = [(f"rank {rank}", show_bytes(predicted), show_bytes(measured)) for rank, predicted, measured in _peaks(trained)]
    terminal.table(("", "predicted", "measured"), rows)


def _schedule_row(outcome: Outcome, run: Run) -> tuple[str, ...]:
    predicted, measured = run.predicted, run.measured
    shares = (predicted.bubble_makespan, measured.bubble_makespan, predicted.bubble_span, measured.bubble_span)
    speed, memory = f"{outcome.tokens_per_second(run):,.0f}", show_bytes(_fullest(run))
    return (run.schedule.name, speed, memory, *map(show_percent, shares))


def _one_device_row(outcome: Outcome) -> list[tuple[str, ...]]:
    return [("one device", f"{outcome.tokens_per_second(outcome.one_device):,.0f}", *["–"] * 5)] if outcome.one_device else []


def _fullest(run: Run) -> int:
    """The most activation bytes that a rank held."""
    return max(measured for _, _, measured in _peaks(run))


def _loss_sentence(outcome: Outcome) -> str:
    others = f"; {', '.join(run.schedule.name for run in outcome.compared)} gave the same losses" if outcome.compared else ""
    others = others if outcome.same_losses else "; the compared schedules gave OTHER losses"
    if outcome.loss_difference is None:
        return f"not compared with one device{others}"
    if outcome.loss_difference == 0:
        return f"identical to one device in {_compared_steps(outcome)}, bit for bit{others}"
    return f"differs from one device by at most {outcome.loss_difference:.3g}{others}"


def _compared_steps(outcome: Outcome) -> str:
    trained, alone = len(outcome.trained.losses), len(outcome.one_device.losses) if outcome.one_device else 0
    return f"all {trained} steps" if alone == trained else f"the first {alone} of {trained} steps, for which the time sufficed"


def _peaks(run: Run) -> list[tuple[int, int, int]]:
    """(rank, predicted bytes, measured bytes)."""
    pairs = zip(run.predicted.ranks, run.measured.ranks, strict=True)
    return [(predicted.rank, predicted.peak_bytes or 0, measured.peak_bytes or 0) for predicted, measured in pairs]


def overruns(outcome: Outcome) -> tuple[str, bool]:
    """Returns which passes and steps took too long, and whether speeds and bubbles are those of the schedules.

    A rank may lose the processor between two passes. Then no pass overruns, but the step is longer.
    """
    shares = {run.schedule.name: run.overruns / outcome.passes(run) for run in outcome.runs}
    stretches = {run.schedule.name: run.measured.makespan / max(1, run.predicted.makespan) for run in outcome.runs}
    passes = ", ".join(f"{name} {show_percent(share)}" for name, share in shares.items())
    steps = ", ".join(f"{name} {stretch:.2f}" for name, stretch in stretches.items())
    is_exact = max(shares.values()) <= FEW and max(stretches.values()) <= 1 + CLOSE
    means = "those of the schedules" if is_exact else "those of a busy machine, not of the schedules: repeat the demo on an idle one"
    return f"Speeds and bubbles are {means}. Passes over their nominal time: {passes}. Measured over predicted step: {steps}.", is_exact


def pace_sentences(cores: int, ranks: int, pace: LayerTimes) -> list[str]:
    """Explains pacing, for the terminal and the report."""
    times = ", ".join(f"{kind} {show_ms(time)}" for kind, time in zip("FBW", (pace.forward, pace.backward, pace.weight), strict=True))
    return [
        f"Paced: {ranks} ranks on {cores} cores. Every pass does its real arithmetic, then sleeps to a nominal time: {times} a layer.",
        "Losses are those of real training. As far as passes keep to these nominal times, speeds and bubbles are those of a machine whose "
        "every rank needs them; so are the tokens/s of one device, which runs one pass after the other and trained at full speed here.",
    ]


def write(outcome: Outcome) -> list[tuple[Path, str]]:
    """Writes the report's files. Returns each path with its description."""
    trained, folder = outcome.trained, outcome.task.options.out
    timelines = (trained.predicted, trained.measured)
    title = f"{trained.schedule.name}, {trained.schedule.num_ranks} ranks, {trained.schedule.num_microbatches} microbatches"
    files = {
        "report.html": ("timelines, losses, memory and speed on one page", report_html(_report(outcome))),
        "timeline.svg": ("one step, simulated and measured", timeline_svg(*timelines, title=title, memory=True)),
        "trace.json": ("the same with messages and memory, for ui.perfetto.dev", perfetto_json(*timelines)),
        "metrics.json": ("every figure", json.dumps(_metrics(outcome), indent=2) + "\n"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, content) in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [(folder / name, what) for name, (what, _) in files.items()]


def _report(outcome: Outcome) -> Report:
    trained = outcome.trained
    sentence, is_exact = overruns(outcome) if outcome.pace else ("", True)
    losses = {trained.schedule.name: trained.losses} | ({"one device": outcome.one_device.losses} if outcome.one_device else {})
    return Report(
        title=f"A GPT of {_millions(outcome)} parameters trained through {trained.schedule.name}",
        facts=_facts(outcome),
        timelines=[timeline for _, timeline in outcome.drawn],
        memory=[MemoryRow(*row) for row in _peaks(trained)],
        losses=losses,
        throughput=_throughput(outcome),
        notes=_notes(outcome),
        gaps=[gaps(run.schedule, run.costs, timeline) for run, timeline in outcome.drawn],
        difference=trained.difference,
        layers=[run.layers for run, _ in outcome.drawn],
        held_out=trained.held_out,
        caution="" if is_exact else sentence,
    )


def _throughput(outcome: Outcome) -> list[ThroughputRow]:
    alone = [ThroughputRow("one device", outcome.tokens_per_second(outcome.one_device))] if outcome.one_device else []
    return [*alone, *(_throughput_row(outcome, run) for run in outcome.runs)]


def _throughput_row(outcome: Outcome, run: Run) -> ThroughputRow:
    shares = (run.predicted.bubble_makespan, run.measured.bubble_makespan)
    return ThroughputRow(run.schedule.name, outcome.tokens_per_second(run), *shares, _fullest(run))


def _millions(outcome: Outcome) -> str:
    return f"{outcome.task.model.num_parameters / 1e6:.3g} million"


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    options, schedule = outcome.task.options, outcome.trained.schedule
    return [
        ("schedule", f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks"),
        ("batch", f"{options.microbatches} microbatches of {options.microbatch_size} x {options.context} bytes"),
        ("model", f"{options.layers} layers, width {options.width}, {_millions(outcome)} parameters"),
        ("text", "source of Python's standard library"),
        ("machine", f"{outcome.cores} cores" if outcome.task.device.type == "cpu" else torch.cuda.get_device_name()),
        ("passes", f"slowed to nominal times, as {options.ranks} ranks share {outcome.cores} cores" if outcome.pace else "at full speed"),
        ("whole demo", f"{outcome.seconds:.0f} s"),
    ]


def _notes(outcome: Outcome) -> list[str]:
    notes = [f"Loss: {_loss_sentence(outcome)}."]
    if outcome.pace:
        notes += [*pace_sentences(outcome.cores, outcome.task.options.ranks, outcome.pace), overruns(outcome)[0]]
    basis = "the nominal times" if outcome.pace else "the median pass times of one early step"
    return [
        *notes,
        f"Predicted: the schedule simulated with {basis} and the bytes held in one early step, messages taking no time.",
        f"Measured: the late step of median length out of {len(outcome.trained.timelines)}.",
        "Tokens/s is that of the median step without measurement, optimizer included. Ranks do not wait for each other between steps, "
        "so it can be better than the makespan of one step suggests.",
    ]


def _metrics(outcome: Outcome) -> dict[str, Any]:
    options, trained, pace = outcome.task.options, outcome.trained, outcome.pace
    return {
        "schedule": trained.schedule.name,
        "ranks": trained.schedule.num_ranks,
        "microbatches": trained.schedule.num_microbatches,
        "steps": len(trained.losses),
        "tokens_per_step": options.tokens_per_step,
        "parameters": outcome.task.model.num_parameters,
        "seed": options.seed,
        "device": outcome.task.device.type,
        "cores": outcome.cores,
        "torch": torch.__version__,
        "seconds": outcome.seconds,
        "nominal_layer_ms": {k: getattr(pace, k) / NS_PER_MS for k in ("forward", "backward", "weight")} if pace else None,
        "losses": {"pipeline": trained.losses, "one_device": outcome.one_device.losses if outcome.one_device else None},
        "held_out_losses": trained.held_out,
        "loss_difference": outcome.loss_difference,
        "one_device_tokens_per_second": outcome.tokens_per_second(outcome.one_device) if outcome.one_device else None,
        "same_losses_with_every_schedule": outcome.same_losses,
        "difference": trained.difference.to_dict(),
        "schedules": [_run_metrics(outcome, run) for run in outcome.runs],
        "memory": [
            {"rank": rank, "predicted_bytes": predicted, "measured_bytes": measured} for rank, predicted, measured in _peaks(trained)
        ],
    }


def _run_metrics(outcome: Outcome, run: Run) -> dict[str, Any]:
    return {
        "name": run.schedule.name,
        "tokens_per_second": outcome.tokens_per_second(run),
        "peak_bytes": _fullest(run),
        "bytes_other_than_activations": run.layers,
        "step_ms": 1000 * run.step_seconds,
        "predicted": _timeline_metrics(run.predicted),
        "measured": _timeline_metrics(run.measured),
        "overruns": run.overruns,
        "passes": outcome.passes(run),
    }


def _timeline_metrics(timeline: zb.Timeline) -> dict[str, float]:
    return {
        "makespan_ms": timeline.makespan / NS_PER_MS,
        "span_ms": timeline.span / NS_PER_MS,
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
    }
