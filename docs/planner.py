"""Write into docs/planner.md the table of the Zero Bubble paper's models and what one command prints, and into README.md its figures.

What searches found is that of the committed benchmark (`benchmarks/planner`), the rest is the same on every machine.

.venv/bin/python docs/planner.py           takes a minute
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import zerobubble as zb
from zerobubble.units import show_ms

PAGE = Path(__file__).with_suffix(".md")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- plans: docs/planner.py writes what stands here -->", "<!-- end of plans -->"
BENCHMARK = Path(__file__).parents[1] / "benchmarks/planner/results.json"
HELD = 32 / 34
"""What B leaves of what F saved in the benchmark."""

IN_README = "6.2B"
"""The model whose plan README.md shows."""


class Model(NamedTuple):
    """A model of the paper: ranks and microbatches, and the times of F, B, W and a message in ms."""

    name: str
    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    comm: float

    @property
    def command(self) -> str:
        """A command that plans it with the memory of 1F1B, the same everywhere and in seconds."""
        times = ",".join(map(str, self.times))
        return (
            f"zerobubble plan --ranks {self.ranks} --microbatches {self.microbatches} --times {times} --comm {self.comm} "
            f"--held {HELD:.3f} --memory {self.ranks} --placement linear,vee,wave-4 --evaluations 40000"
        )

    def published(self, placement: zb.Placement, baseline: str) -> str:
        """The bubble of a schedule or a planner of the papers."""
        work = zb.Workload.uniform(self.ranks, self.times, self.comm, HELD)
        problem = zb.planning.Problem(placement, self.microbatches, work.costs(placement), work.limits(self.ranks))
        plan = zb.planning.solve(problem, baseline=baseline)
        assert plan.time is not None
        return percent(problem.bubble(plan.time))


MODELS = [
    Model("1.5B", 8, 24, (18.522, 18.086, 9.337), 0.601),
    Model("6.2B", 8, 24, (29.718, 29.444, 19.927), 0.527),
    Model("14.6B", 16, 48, (11.347, 11.248, 8.132), 0.377),
    Model("28.3B", 32, 96, (10.419, 10.207, 7.715), 0.408),
]


def percent(bubble: float) -> str:
    """A share as the tables write it."""
    return f"{100 * bubble:.2f} %"


def one_f_one_b(model: Model) -> zb.Timeline:
    """A step of 1F1B. Its period is its makespan."""
    schedule = zb.make("1f1b", model.ranks, model.microbatches)
    work = zb.Workload.uniform(model.ranks, model.times, model.comm)
    return zb.simulate(schedule, work.costs(schedule.placement))


HEADER = "| model | ranks, microbatches | 1F1B | ZB-1p | ZB-V | our plan | its placement | its bound |\n|---|---|---|---|---|---|---|---|"
WORDS = """Bubbles are shares of the period, the time per step if no global operation separates two steps. ZB-1p and ZB-V are the papers'
planners (`--baseline zb-heuristic`, `--baseline zb-v-greedy`), and the bounds prove that both are optimal there. The plans are
those of `benchmarks/planner`, with 10 s of processor time each. The result of `--budget` depends on the speed of the machine;
`--evaluations` gives the same result everywhere:"""


def row(model: Model) -> str:
    """A row of the table, with what the committed benchmark found."""
    found = json.loads(BENCHMARK.read_text(encoding="utf-8"))["profiles"][model.name]
    zb_1p = model.published(zb.Placement.linear(model.ranks), "zb-heuristic")
    zb_v = model.published(zb.Placement.vee(model.ranks), "zb-v-greedy")
    bubble = percent(one_f_one_b(model).bubble_span)
    return f"| {model.name} | {model.ranks}, {model.microbatches} | {bubble} | {zb_1p} | {zb_v} | {cells(found)} |"


def cells(found: dict[str, Any]) -> str:
    """What a search of the benchmark found: bubble, placement and bound."""
    return f"**{percent(found['bubble'])}** | {found['placement']} | {percent(found['bound_bubble'])}"


def printed(model: Model) -> str:
    """The model's command, and what it prints."""
    command = [sys.executable, "-m", "zerobubble", *shlex.split(model.command)[1:]]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"```console\n$ {model.command}\n{shown}```"


def summary(page: str) -> str:
    """Returns the figures of README.md: the period and its bound in the first line that the command on `page` prints, and that of 1F1B."""
    model = next(model for model in MODELS if model.name == IN_README)
    found = re.search(rf"{re.escape(model.command)}\n.*\n\S+ +([\d,.]+ ms) +[\d.]+ % +([\d.]+) %", page)
    assert found is not None
    period, bound = found.groups()
    other = one_f_one_b(model).makespan
    shorter = 100 * (1 - float(period.removesuffix(" ms").replace(",", "")) / (other / 1e6))
    least = round(1e6 * model.microbatches * sum(model.times) / (1 - float(bound) / 100))
    return (
        f"Simulated with the times of the Zero Bubble paper's {IN_README} model on {model.ranks} ranks, "
        f"a plan has a period (time per step) of {period}, {shorter:.1f} % less\n"
        f"than 1F1B ({show_ms(other)}) with the same peak memory. "
        f"No schedule with its placement has a period below {show_ms(least)}."
    )


def main() -> None:
    """Write the pages."""
    rows, shown = [row(model) for model in MODELS], next(model for model in MODELS if model.name == IN_README)
    before, after = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = "\n\n".join(["\n".join([HEADER, *rows]), WORDS, printed(shown)])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after.split(END)[1]}", encoding="utf-8")
    page, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    figures = re.compile(r"Simulated with the times of.*?has a period below [\d,]+ ms\.", re.DOTALL)
    README.write_text(figures.sub(summary(page), readme), encoding="utf-8")


if __name__ == "__main__":
    main()
