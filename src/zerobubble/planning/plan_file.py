"""Plan files: a schedule with the problem it answers, its bound and its figures, as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from zerobubble.arguments import instance, takes
from zerobubble.errors import ParseError, ZeroBubbleError, parsed_json
from zerobubble.planning.answer import Plan
from zerobubble.whole_files import require_suffix, unusable, write_text


@takes(plan=Plan, file=instance(str, Path))
def save_plan(plan: Plan, file: str | Path) -> None:
    """Writes `plan` to `file` as JSON; of several choices, the winner.

    The file holds everything the plan was made from: costs, placement, limits, objective, the workload or the cut of the layers, recompute
    levels, sharded weights, a head, offloads and their link. Raises `InputError` if there is no schedule or the file cannot be written; the
    file is then unchanged.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> found = zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "plan.json"
    ...     zb.io.save_plan(found, file)
    ...     zb.io.load_plan(file).schedule == found.schedule
    True
    """
    require_suffix(file, ".json")
    write_text(file, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The JSON text of a plan; raises `InputError` if there is no schedule."""
    return json.dumps(plan.to_dict()) + "\n"


@takes(file=instance(str, Path))
def load_plan(file: str | Path) -> Plan:
    """Reads the plan in `file` and verifies its schedule; `Pipeline(..., schedule=load_plan("plan.json"))` trains with it.

    Raises `InputError` with the name of the file if it cannot be read, is no plan, or holds a schedule that cannot run.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "plan.json"
    ...     zb.io.save_plan(zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0), file)
    ...     zb.io.load_plan(file).problem
    <Problem on vee over 2 ranks: 4 microbatches for the shortest period>
    """
    try:
        return Plan.from_dict(parsed_json(Path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise unusable("read", file, error) from error
    except (ZeroBubbleError, ValueError) as error:
        raise ParseError("cannot read a plan from {file}: {reason}", file=str(file), reason=str(error)) from error
