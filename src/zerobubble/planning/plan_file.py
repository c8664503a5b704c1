"""A plan as a file: its schedule, the problem it answers, its bound and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from zerobubble.arguments import instance, takes
from zerobubble.errors import InputError, ParseError, ZeroBubbleError, parsed_json
from zerobubble.planning.answer import Plan
from zerobubble.whole_files import write_text


@takes(plan=Plan, file=instance(str, Path))
def save_plan(plan: Plan, file: str | Path) -> None:
    """Write `plan`, of several choices the winner, to `file` as JSON.

    The file holds everything the plan was made from: costs, placement, limits, objective, the workload or the cut of the layers, levels of
    recomputation, weights in shards, a head, and what goes to the host and over which link.
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


def plan_text(plan: Plan) -> str:
    """The JSON text of a plan, of several choices the winner's; raises `InputError` when there is no schedule."""
    return json.dumps(plan.to_dict()) + "\n"


@takes(file=instance(str, Path))
def load_plan(file: str | Path) -> Plan:
    """The plan in `file`, its schedule checked and played anew: `Pipeline(..., schedule=load_plan("plan.json"))` trains with it.

    Raises `InputError` naming the file when it cannot be read, is no plan, or holds a schedule that cannot run.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "plan.json"
    >>> zb.io.save_plan(zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0), file)
    >>> zb.io.load_plan(file).problem
    <Problem on vee over 2 ranks: 4 microbatches for the shortest period>
    """
    try:
        return Plan.from_dict(parsed_json(Path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ZeroBubbleError, ValueError) as error:
        raise ParseError(f"cannot read a plan from {file}: {error}") from error
