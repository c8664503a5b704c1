"""The problems of the planner's benchmark: the profiles of the paper with the results of the authors' schedulers, and synthetic ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import zerobubble as zb
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Objective


@dataclass(frozen=True)
class Reference:
    """One line of `reference.json`: a problem, and the shortest span (ms) of the authors' schedulers at that memory."""

    groups: str
    schedulers: str
    rows: int
    model: str
    ranks: int
    microbatches: int
    placement: str
    forward_ms: float
    backward_ms: float
    weight_ms: float
    comm_ms: float
    held: float
    limit: float
    span_ms: float
    cpu_s: float | None

    @property
    def key(self) -> str:
        times = f"{self.forward_ms:g},{self.backward_ms:g},{self.weight_ms:g},{self.comm_ms:g}"
        return f"{self.model} p={self.ranks} m={self.microbatches} {self.placement} {self.limit:g} held={self.held:g} {times}"

    @property
    def work(self) -> zb.Workload:
        return zb.Workload.uniform(self.ranks, (self.forward_ms, self.backward_ms, self.weight_ms), self.comm_ms, self.held)

    @property
    def problem(self) -> zb.planning.Problem:
        """Printed limits have four decimals, so half a digit is added."""
        return problem(self.work, self.placement, self.microbatches, self.limit + 0.00005)


def references(group: str = "") -> list[Reference]:
    """The lines of `reference.json`, of one group of the authors' experiments if given."""
    data = json.loads(Path(__file__).with_name("reference.json").read_text())
    return [reference for reference in (Reference(*row) for row in data["rows"]) if group in reference.groups.split() or not group]


def problem(work: zb.Workload, placement: str, microbatches: int, limit: float) -> zb.planning.Problem:
    """The work on a family of placements, the memory in microbatches of a whole rank."""
    where = family(placement, work.num_ranks)
    return zb.planning.Problem(where, microbatches, work.costs(where), work.limits(limit))


FLASH = 32 / 34
"""What B leaves of what F saved where attention keeps no scores."""

TIMES = {
    "1.5B": (18.522, 18.086, 9.337, 0.601),
    "6.2B": (29.802, 29.428, 19.530, 0.577),
    "14.6B": (11.347, 11.248, 8.132, 0.377),
}
"""F, B, W and a message in ms, from the paper's profiles (m = 24, 32, 48)."""

PROFILES = {
    "1.5B": (8, 24, (18.522, 18.086, 9.337, 0.601)),
    "6.2B": (8, 24, (29.718, 29.444, 19.927, 0.527)),
    "14.6B": (16, 48, (11.347, 11.248, 8.132, 0.377)),
    "28.3B": (32, 96, (10.419, 10.207, 7.715, 0.408)),
}
"""Ranks, microbatches and the same times of the paper's first experiment with each model."""


def paper(model: str, ranks: int, placement: str, microbatches: int, share: float) -> zb.planning.Problem:
    """A model of the paper over any number of ranks with room for `share` of 1F1B's memory."""
    *times, comm = TIMES[model]
    return problem(zb.Workload.uniform(ranks, tuple(times), comm, FLASH), placement, microbatches, share * ranks)


def headed(placement: str, head: float, first: float) -> zb.planning.Problem:
    """6.2B on 8 ranks with 1p of memory, the last stage heavier and the first lighter by shares of a rank's work."""
    even = paper("6.2B", 8, placement, 32, 1)
    costs, stages = even.costs, even.costs.num_stages
    per_rank = stages // 8
    factors = [1 - first * per_rank, *[1.0] * (stages - 2), 1 + head * per_rank]
    columns = {
        name: tuple(round(time * factor) for time, factor in zip(getattr(costs, name), factors, strict=True))
        for name in ("forward", "backward", "weight")
    }
    return replace(even, costs=replace(costs, **columns))


def random_problem(seed: int, max_ranks: int = 8, max_microbatches: int = 16) -> zb.planning.Problem:
    """Any placement, unequal stages and limits, some of them too small for one microbatch."""
    dice = Random(seed)
    ranks = dice.randint(1, max_ranks)
    where = family(dice.choice(["linear", "vee", "looped-2", "looped-3", "wave-3"] if ranks > 1 else ["linear", "vee"]), ranks)
    stages = where.num_stages
    forward, backward, weight = ([dice.randint(1, 40) for _ in range(stages)] for _ in range(3))
    after_f = [dice.randint(1, 20) for _ in range(stages)]
    after_b = [dice.randint(0, held) for held in after_f]
    costs = zb.Costs(*map(tuple, (forward, backward, weight, [dice.randint(0, 4) for _ in range(stages - 1)], after_f, after_b)))
    whole = [sum(after_f[stage] for _, stage in where.stages(rank)) for rank in range(ranks)]
    limits = zb.Limits(tuple(max(1, round(held * dice.uniform(0.95, 2 * ranks))) for held in whole))
    objective = dice.choice(list(Objective))
    return zb.planning.Problem(where, dice.randint(1, max_microbatches), costs, limits, objective)
