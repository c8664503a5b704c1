"""Write docs/combinations.md: which options of a pipeline work together, and which are refused.

`AXES` are the options and `EXCLUDED` the pairs that a pipeline refuses. Every other pair occurs in at least one of the runs that
`covering_rows` gives; tests/procs/test_combinations.py trains each of them and compares its numbers with one device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import NamedTuple

from zerobubble.planned_run import NOT_RUN
from zerobubble.planning.problem.axes import AXES as AXES_OF_PLANS
from zerobubble.planning.problem.axes import NOT_TOGETHER

PAGE = Path(__file__).with_suffix(".md")

AXES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v"),
    "split": ("deferred", "graph", "whole"),
    "precision": ("float64", "bf16 autocast", "GradScaler"),
    "optimizer step": ("plain", "clip_grad_norm_", "PostValidation"),
    "recompute": ("none", "full", "selective"),
    "offload": ("none", "all"),
    "order_by": ("none", "tokens", "planned ahead"),
    "slices": ("1", "2"),
    "head": ("whole", "divided"),
    "mesh": ("pp", "dp", "dp_shard", "tp", "ep"),
    "frozen": ("none", "some"),
    "added losses": ("none", "some"),
    "tied": ("none", "embedding and head"),
    "scale": ("loss", "gradients"),
    "main_grad": ("none", "float64"),
    "checkpoint": ("none", "resumed"),
    "survive": ("no", "yes"),
}
"""The options of a run with the values that are tried; the first value leaves the option out."""


class Excluded(NamedTuple):
    """Two values that do not go together, and why."""

    one: tuple[str, str]
    other: tuple[str, str]
    reason: str


def _excluded(axis: str, value: str, others: Mapping[str, tuple[str, ...]], reason: str) -> Iterator[Excluded]:
    for other, values in others.items():
        for each in values:
            yield Excluded((axis, value), (other, each), reason)


EXCLUDED: tuple[Excluded, ...] = (
    *_excluded("survive", "yes", {"mesh": ("pp", "dp_shard", "tp", "ep")}, "only replicas along dp hold the stages of a lost rank"),
    *_excluded("survive", "yes", {"order_by": ("tokens", "planned ahead")}, "the remaining ranks divide the microbatches by their places"),
    *_excluded("survive", "yes", {"offload": ("all",)}, "offloads belong to one order of passes, and the remaining ranks play another"),
    *_excluded("survive", "yes", {"head": ("divided",)}, "no other rank holds the part of the head of a lost rank"),
    *_excluded("survive", "yes", {"optimizer step": ("PostValidation",)}, "a hook belongs to the pipeline that ends with a lost rank"),
    *_excluded("head", "divided", {"schedule": ("dualpipe-v",)}, "its passes would break up overlapped steps"),
    *_excluded("head", "divided", {"order_by": ("tokens", "planned ahead")}, "orders are made for passes of stages alone"),
    *_excluded("head", "divided", {"offload": ("all",)}, NOT_RUN["head", "host"]),
    *_excluded("head", "divided", {"mesh": ("dp_shard", "tp", "ep")}, NOT_RUN["sharded", "head"]),
    *_excluded("head", "divided", {"tied": ("embedding and head",)}, "no rank holds the whole weight of the head"),
    *_excluded("recompute", "full", {"split": ("graph",)}, "a traced forward runs once"),
    *_excluded("recompute", "selective", {"split": ("graph",)}, "a traced forward runs once"),
    *_excluded("tied", "embedding and head", {"mesh": ("dp_shard",)}, "a rank holds only a shard of each parameter"),
    *_excluded("split", "graph", {"mesh": ("dp_shard", "tp", "ep")}, "a traced graph has plain tensors and no hooks"),
    *_excluded("schedule", "dualpipe-v", {"order_by": ("tokens", "planned ahead")}, "microbatches are ordered for passes one at a time"),
    *_excluded("slices", "2", {"schedule": ("zb-v", "dualpipe-v")}, "they have no order over slices of a sequence"),
    *_excluded("slices", "2", {"split": ("graph",)}, "a traced graph has no keys of earlier slices"),
    *_excluded("slices", "2", {"order_by": ("tokens", "planned ahead")}, "slices of a microbatch stay together"),
    *_excluded("slices", "2", {"survive": ("yes",)}, "the remaining ranks play schedules without slices"),
    *_excluded("head", "divided", {"added losses": ("some",)}, "its last stage gives one tensor"),
    *_excluded("main_grad", "float64", {"optimizer step": ("PostValidation",)}, "the optimizer reads .grad, which stays None"),
)

REFUSED_WITH: Mapping[tuple[str, str], list[tuple[str, str]]] = {
    (axis, value): [other if one == (axis, value) else one for one, other, _ in EXCLUDED if (axis, value) in (one, other)]
    for axis, values in AXES.items()
    for value in values
}
"""The values that each value excludes."""


def allows(row: Mapping[str, str]) -> bool:
    """Whether no two values of a row, which may lack axes, exclude each other."""
    return not any(row.get(one[0]) == one[1] and row.get(other[0]) == other[1] for one, other, _ in EXCLUDED)


def pairs() -> Iterator[frozenset[tuple[str, str]]]:
    """Every pair of values of two axes that do not exclude each other."""
    for (one, values), (other, others) in combinations(AXES.items(), 2):
        for value, another in product(values, others):
            if allows({one: value, other: another}):
                yield frozenset({(one, value), (other, another)})


@cache
def covering_rows(seed: int = 0, tries: int = 60) -> list[dict[str, str]]:
    """Rows of one value for each axis that together have every pair which is allowed."""
    draw, missing, rows = Random(seed), set(pairs()), []
    while missing:
        ordered = sorted(missing, key=sorted)
        made = [_row(draw, draw.choice(ordered), missing) for _ in range(tries)]
        best = max((row for row in made if row is not None), key=lambda row: len(missing & pairs_in(row)))
        assert missing & pairs_in(best), f"no row has {sorted(map(sorted, missing))[0]}: list what excludes it"
        rows.append(best)
        missing -= pairs_in(best)
    return rows


def pairs_in(row: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that a row has."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def _row(draw: Random, first: frozenset[tuple[str, str]], missing: set[frozenset[tuple[str, str]]]) -> dict[str, str] | None:
    """A row that begins with a pair and takes on each further axis the value that adds most; None if it finds no allowed value."""
    row = dict(first)
    rest = [axis for axis in AXES if axis not in row]
    for axis in draw.sample(rest, len(rest)):
        able = [value for value in AXES[axis] if not any(row.get(other) == each for other, each in REFUSED_WITH[axis, value])]
        if not able:
            return None
        gains = [sum(frozenset({(axis, value), item}) in missing for item in row.items()) for value in able]
        row[axis] = able[draw.choice([place for place, gain in enumerate(gains) if gain == max(gains)])]
    return {axis: row[axis] for axis in AXES}


INTRODUCTION = """# Which options go together

Every option of a pipeline works with every other, except for the pairs listed below. These are refused with an `InputError` or, if only
running reveals them, with a `PipelineError` on every rank.

The long tests train {rows} small models on 2 ranks or, with replicas or divided stages, on 4. Each of the remaining pairs of these values
occurs in at least one model. Losses and parameters after four steps are those of plain PyTorch on one device: to 1e-9 in float64, and to
rounding under bf16 autocast. `docs/combinations.py` writes this page.

## What was combined

| option | values |
|---|---|
"""
REFUSED = """
The first value of each row is the default. The model is a small language model; with `mesh` "ep" it has a mixture of experts. "planned
ahead" is `order_by="tokens"` with `order_ahead` before every step. With offloads this plans the order alone. What holds for `split="graph"`
holds for `"compiled"` as well, which compiles the parts of the same graph.

## What is refused

| option | with | because |
|---|---|---|
"""

PLANNED = """
## What is planned together

`zb.plan` and `zerobubble plan` have the options {axes}. {together} of the {pairs} pairs of these are planned together, with a proven
bound: `tests/pure/test_axes_together.py` compares the figures of each with a second simulator."""
REFUSED_PLANS = """ For the others, `zb.plan`
raises one `InputError` with all refused pairs:

| option | with | because |
|---|---|---|
"""

PLANS_NOT_RUN = """
Two pairs can be planned, but pipelines refuse them. If the schedule of a plan has one of them, the plan says so, in `plan.not_run` and
below its table, and `zb.Pipeline` raises an `InputError` for the plan, with any mesh and loss:

| option | with | because |
|---|---|---|
"""


def page() -> str:
    """The text of docs/combinations.md."""
    options = [f"| {axis} | {', '.join(values)} |\n" for axis, values in AXES.items()]
    reasons: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for (axis, value), (other, another), reason in EXCLUDED:
        found = reasons.setdefault((axis, other, reason), {})
        found.setdefault(value, []).append(another)
    refused = []
    for (axis, other, reason), found in reasons.items():
        values, others = list(found), next(iter(found.values()))
        assert all(each == others for each in found.values())
        refused.append(f"| {axis}: {', '.join(values)} | {other}: {', '.join(others)} | {reason} |\n")
    return "".join([INTRODUCTION.format(rows=len(covering_rows())), *options, REFUSED, *refused, *_planned()])


def _planned() -> Iterator[str]:
    """What the page says of plans."""
    pairs = len(AXES_OF_PLANS) * (len(AXES_OF_PLANS) - 1) // 2
    axes = ", ".join(f"`{axis}`" for axis in AXES_OF_PLANS)
    yield PLANNED.format(axes=axes, pairs=pairs, together=pairs - len(NOT_TOGETHER))
    yield REFUSED_PLANS if NOT_TOGETHER else "\n"
    for (one, other), reason in NOT_TOGETHER.items():
        yield f"| {one} | {other} | {reason} |\n"
    yield PLANS_NOT_RUN
    for (one, other), reason in NOT_RUN.items():
        yield f"| {one} | {other} | {reason} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
