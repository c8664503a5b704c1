"""Which options of a pipeline exclude each other: one table of pairs, each with the reason and what helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from zerobubble.planning.problem.axes import NOT_RUN
from zerobubble.runtime.hooks.auto import Auto
from zerobubble.runtime.options import ALIKE, PipelineOptions, moves_to_host
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.transport.mesh import Layout

_PLAN_BEFORE = "plan before with zb.plan and the costs of profile, and give the plan"

USED: Mapping[str, Callable[[PipelineOptions, Layout], bool]] = {
    "survive": lambda options, _: options.survive,
    "hooks": lambda options, _: bool(options.hooks),
    "'auto'": lambda options, _: options.schedule == "auto" or isinstance(options.schedule, Auto),
    "order_by": lambda options, _: options.order_by is not None,
    "offload": lambda options, _: moves_to_host(options),
    "a DividedHead": lambda options, _: isinstance(options.loss_fn, DividedHead),
    "cuda_graphs": lambda options, _: options.cuda_graphs,
    "stages divided over ranks": lambda options, _: bool(_dividing(options)),
    "stages that talk to those of other pipelines": lambda _, layout: bool(layout.lockstep),
}
"""Options that others exclude, by the names that messages give them: whether a pipeline is asked for one."""

EXCLUDED: Mapping[tuple[str, str], str] = {
    ("survive", "hooks"): "a hook is part of the pipeline that ends with a rank",
    ("survive", "'auto'"): "its planner is part of the pipeline that ends with a rank: plan before",
    ("survive", "order_by"): "the remaining ranks divide the microbatches by their places",
    ("survive", "offload"): "what goes to the host fits one order of passes, and the remaining ranks play another",
    ("survive", "a DividedHead"): "no other rank holds the part of the head of a lost rank",
    ("survive", "stages divided over ranks"): "no other rank holds the part of a stage of a lost rank",
    ("'auto'", "order_by"): f"it plans for microbatches that are alike: {_PLAN_BEFORE}",
    ("'auto'", "offload"): "it changes the order of passes, which offload is for: plan before with zb.plan(host=...), and give the plan",
    ("'auto'", "a DividedHead"): f"it plans for a head in the last stage: {_PLAN_BEFORE}",
    (
        "'auto'",
        "stages that talk to those of other pipelines",
    ): f"it plans each pipeline by itself, and all of these must run the same passes: {_PLAN_BEFORE}",
    ("order_by", "a DividedHead"): "orders are made for passes of stages alone",
    ("offload", "a DividedHead"): NOT_RUN["head", "host"],
    ("offload", "cuda_graphs"): "passes that are replayed as CUDA graphs save in memory that stays theirs",
    ("a DividedHead", "cuda_graphs"): "its collectives have not been tested in CUDA graphs",
    ("a DividedHead", "stages divided over ranks"): NOT_RUN["sharded", "head"],
}
"""Each pair that a pipeline refuses, and why. Pairs of values that only a run reveals are in docs/combinations.md as well."""


def excluded_options(options: PipelineOptions, layout: Layout) -> str:
    """All pairs of `options` that exclude each other, in one sentence; empty where there are none."""
    asked = [name for name, is_used in USED.items() if is_used(options, layout)]
    pairs = [pair for pair in combinations(asked, 2) if pair in EXCLUDED]
    if not pairs:
        return ""
    dims = ", ".join(map(repr, _dividing(options)))
    said = [f"{one} excludes {other}{f' (along {dims})' if 'stages' in other else ''}: {EXCLUDED[one, other]}" for one, other in pairs]
    return f"{'; '.join(said)}. Leave out one of {'the two' if len(pairs) == 1 else 'each two'}"


def _dividing(options: PipelineOptions) -> list[str]:
    """The dimensions of the mesh along which ranks hold other parts of the same stages, or other experts."""
    names = () if options.mesh is None else options.mesh.mesh_dim_names or ()
    return [name for name in names if name not in {"pp", *ALIKE}]
