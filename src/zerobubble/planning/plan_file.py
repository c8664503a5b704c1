"""A plan as a file: its schedule, the problem it answers, its bound and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from zerobubble.arguments import instance, takes
from zerobubble.errors import InputError, ParseError, ZeroBubbleError, parsed_json
from zerobubble.planning.competition import Plan
from zerobubble.planning.head.plan import HeadPlan
from zerobubble.planning.layer_plan import LayersPlan
from zerobubble.planning.offload_plan import OffloadedPlan
from zerobubble.planning.problem.problem import Solved
from zerobubble.whole_files import write_text

AnyPlan = Solved | Plan | LayersPlan | HeadPlan | OffloadedPlan
"""What a plan file can be written from."""


@takes(plan=instance(Solved, Plan, LayersPlan, HeadPlan, OffloadedPlan), file=instance(str, Path))
def save_plan(plan: AnyPlan, file: str | Path) -> None:
    """Write `plan`, of several placements or places of a head the winner, to `file` as JSON.

    The file holds everything the plan was made from: costs, placement, limits, objective, and the workload or the layers of each stage,
    and a head, or what goes to the host and over which link.
    Raises `InputError` when there is no schedule or the file cannot be written, which is then as it was.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "plan.json"
    >>> found = zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0)
    >>> zb.io.save_plan(found, file)
    >>> zb.io.load_plan(file).schedule == found.schedule
    True
    """
    write_text(file, plan_text(plan))


def plan_text(plan: AnyPlan) -> str:
    """The JSON text of a plan, of several the winner's; raises `InputError` when there is no schedule."""
    return json.dumps(_winner(plan).to_dict()) + "\n"


def _winner(plan: AnyPlan) -> Solved:
    if isinstance(plan, HeadPlan):
        return plan.best.solved
    if isinstance(plan, OffloadedPlan):
        return plan.solved
    if isinstance(plan, LayersPlan):
        plan = plan.plan
    return plan.best if isinstance(plan, Plan) else plan


@takes(file=instance(str, Path))
def load_plan(file: str | Path) -> Solved:
    """The plan in `file`, its schedule checked and played anew: `Pipeline(..., schedule=load_plan("plan.json"))` trains with it.

    Raises `InputError` naming the file when it cannot be read, is no plan, or holds a schedule that cannot run.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "plan.json"
    >>> zb.io.save_plan(zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0), file)
    >>> zb.io.load_plan(file).problem
    <Problem on vee over 2 ranks: 4 microbatches for the shortest span>
    """
    try:
        return Solved.from_dict(parsed_json(Path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ZeroBubbleError, ValueError) as error:
        raise ParseError(f"cannot read a plan from {file}: {error}") from error
