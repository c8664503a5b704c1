"""The process that searches for the explorer: it reads one question from stdin and writes its progress to stdout, as lines of JSON.

`stop` on stdin ends the search with the best so far. The end of stdin, which is that of the server, ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, NamedTuple

from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ZeroBubbleError
from zerobubble.explorer.answer import answer
from zerobubble.explorer.question import FieldError, Question, faults_to_list
from zerobubble.export.document import dumps
from zerobubble.export.front import points_with_schedules
from zerobubble.ir import Placement
from zerobubble.planning import Plan, Status, Workload, plan
from zerobubble.planning.attempt import PlanProgress
from zerobubble.planning.pareto import Front, pareto
from zerobubble.units import ms
from zerobubble.view.front_page import OpenedPlans, front_data

MOST_PASSES = 300_000
"""Maximum passes of all plans that the page gets together. Beyond it, the page gets only the best plan, or the best of each limit."""
STOPPED_EARLY = "stopped before a schedule was found"


def main() -> None:
    """Answer the question on the first line of stdin."""
    question = json.loads(sys.stdin.readline())
    try:
        threading.Thread(target=_obey, daemon=True).start()  # here, as a stop may have come already
        news = _front(question) if question["limits"] else _plan(question)
    except ZeroBubbleError as error:
        faults = {"faults": faults_to_list([error])} if isinstance(error, FieldError) else {}
        news = {"event": "refused", "error": str(error)} | faults
    except KeyboardInterrupt:
        news = {"event": "refused", "error": STOPPED_EARLY}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a stop that comes now would cut the answer short
    _say(**news)


def _obey() -> None:
    """Interrupt the search when stdin says so, and end with stdin."""
    while line := sys.stdin.readline():
        if line.strip() == "stop":
            os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def _say(**news: Any) -> None:
    sys.stdout.write(json.dumps(news, separators=(",", ":")) + "\n")
    sys.stdout.flush()


class _Asked(NamedTuple):
    """The problem to plan: the work of ranks on any placement, or the costs of stages on their placement."""

    work: Workload | Costs
    num_microbatches: int
    memory: float | Limits | None
    placement: Placement | None


def _asked(question: dict[str, Any]) -> _Asked:
    if question["stages_of"] is not None:
        return _of_stages(Question(**question["stages_of"]))
    forward, backward, weight = ([time] * question["ranks"] for time in question["times"])
    work = Workload.from_ms(forward, backward, weight, question["comm"], question["held"])
    return _Asked(work, question["microbatches"], question["memory"], None)


def _of_stages(question: Question) -> _Asked:
    """The stages of a model or a file, as divided on the page, with the memory that the model leaves for activations."""
    played = answer(question)
    placement = played.schedule.placement
    limits = Limits(played.limits) if played.limits else None
    if played.estimate is not None and question.memory is None:
        limits = played.estimate.limits(placement)
    return _Asked(played.costs, played.schedule.num_microbatches, limits, placement)


def _arguments(question: dict[str, Any]) -> dict[str, Any]:
    return {key: question[key] for key in ("objective", "seconds", "evaluations")} | {"progress": _progress}


def _progress(news: PlanProgress) -> None:
    _say(event="progress", placement=news.placement, bubble=news.bubble, gap=news.gap, how=news.how)


def _plan(question: dict[str, Any]) -> dict[str, Any]:
    work, num_microbatches, memory, placement = _asked(question)
    best = plan(work, num_microbatches, memory, placements=placement, **_arguments(question))
    if best.order is None and question["memory"] is not None:
        raise FieldError("memory", f"no schedule fits: {best.reason}", "raise the limit, or leave it empty for none")
    if best.order is None:
        raise InputError("no schedule fits: {reason}", reason=best.reason)
    searched = any(choice.searched for choice in best.choices) or best.status is Status.OPTIMAL
    return {"event": "found", "interrupted": best.interrupted, "searched": searched, "rows": _rows(best)}


def _front(question: dict[str, Any]) -> dict[str, Any]:
    """The front as the chart reads it, with the plans that its points open."""
    work, num_microbatches, _, placement = _asked(question)
    total = len(set(question["limits"]))

    def show(front: Front) -> None:
        if len(front.points) < total and any(point.plan.order for point in front.points):
            _say(event="points", done=len(front.points), total=total, **_drawn(front))

    front = pareto(work, num_microbatches, question["limits"], placements=placement, on_point=show, **_arguments(question))
    return {"event": "found", "interrupted": front.interrupted, **_drawn(front)}


def _drawn(front: Front) -> dict[str, Any]:
    points = points_with_schedules(front)
    kept = OpenedPlans(points, dumps, MOST_PASSES)
    placements = sorted({choice.name for point in front.points for choice in point.plan.choices})
    data = {"front": front_data(points, kept), "plans": kept.values, "placements": placements}
    return data | {"nothingFits": len(front.points) - len(points)}


def _rows(best: Plan) -> list[dict[str, Any]]:
    """A row for each placement, the winner first. The other rows also have their plans, if all are not too large together.

    Raises `InputError` if no plan was found.
    """
    passes = sum(sum(map(len, choice.plan.timeline.rows)) for choice in best.choices if choice.plan.timeline is not None)
    plans = [best, *(choice.plan for choice in best.choices[1:])]
    return [
        {"placement": choice.name, "bubble": choice.plan.bubble, "bound": choice.plan.least_bubble}
        | {"time": None if choice.plan.time is None else ms(choice.plan.time)}
        | {"peak": choice.plan.peak_microbatches, "how": choice.plan.how, "note": choice.note}
        | {"plan": dumps(candidate) if candidate is best or (candidate.order is not None and passes <= MOST_PASSES) else None}
        for choice, candidate in zip(best.choices, plans, strict=True)
    ]


if __name__ == "__main__":
    main()
