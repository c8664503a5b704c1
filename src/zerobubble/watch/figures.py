"""The figures of a run, as plain values: its status, current figures, stages compared with the plan, waits, memory, and series of steps."""

from __future__ import annotations

import time
from math import isfinite
from statistics import mean
from typing import Any

from zerobubble.run_folder import drifts
from zerobubble.units import NS_PER_S, show_ms
from zerobubble.watch.rank_log import medians, stage_of
from zerobubble.watch.run import WatchedRun


def figures(run: WatchedRun) -> dict[str, Any]:
    """Return the state of a run for `json`. Times are in seconds, `at` and `now` in unix time; unknown figures are None."""
    status, logs = run.status(), list(run.logs.values())
    return {
        "run": run.name,
        "title": run.title,
        "schedule": None if run.header.schedule is None else run.header.schedule.name,
        "ranks": run.num_ranks,
        "microbatches": None if run.header.schedule is None else run.header.schedule.num_microbatches,
        "status": {**status._asdict(), "state": status.state.value},
        "now": time.time(),
        **_step(run),
        "outcome": outcome(run),
        "passes": passes(run),
        "waits": waits(run),
        "memory": memory(run),
        "details_step": run.details_step if run.details is not None else None,
        "left_out": sum(log.left_out for log in logs),
        "unreadable_lines": {log.path.name: log.unreadable for log in logs if log.unreadable},
        "series": {name: list(map(list, series.points().items())) for name, series in run.series.items()},
    }


def _step(run: WatchedRun) -> dict[str, Any]:
    """Return the number and figures of the latest step, and its plan."""
    plan, recent = run.header.plan, [log for log in run.logs.values() if log.recent]
    latest = next((log.last for log in recent if log.last is not None and log.last.step == run.step), None)
    return {
        "step": None if run.step < 0 else run.step,
        "loss": latest.loss if latest and latest.loss is not None and isfinite(latest.loss) else None,
        "step_seconds": run.step_seconds or None,
        "bubble": mean(mean(report.bubble for report in log.recent) for log in recent) if recent else None,
        "planned": None if plan is None else {"step_seconds": plan.makespan / 1e9, "bubble": plan.bubble_makespan},
    }


def outcome(run: WatchedRun) -> str:
    """Return in sentences how the last recorded step differs from its plan, and why; empty without a plan."""
    if run.difference is None:
        return ""
    text, step = f"Step {run.details_step}, the last in the timeline: {run.difference.outcome}", round(run.details_seconds * NS_PER_S)
    outside = step - run.difference.measured
    if outside <= 0 or 2 * outside < step - run.difference.planned:
        return text
    rest = f"{show_ms(outside)} are before its first or after its last pass, such as waiting for a rank that begins the step late"
    return f"{text} Of a whole step of {show_ms(step)}, {rest}."


def passes(run: WatchedRun) -> list[dict[str, Any]]:
    """Return the times of passes by kind and stage in the last `steps`, with their drift from the plan, or from the first steps."""
    rows = []
    for rank, log in run.logs.items():
        now = medians(list(log.recent))
        reference = log.reference
        by_plan = drifts(now, run.header.costs)
        by_first = {name: seconds / reference[name] - 1 for name, seconds in now.items() if reference.get(name)}
        for name, seconds in now.items():
            drift = by_plan.get(name, by_first.get(name))
            of = {"rank": rank, "stage": stage_of(name), "passes": name, "steps": len(log.recent)}
            rows.append({**of, "seconds": seconds, "drift": drift})
    return sorted(rows, key=lambda row: (row["stage"], row["rank"]))


def waits(run: WatchedRun) -> list[dict[str, Any]]:
    """Return the mean seconds of a step in which each rank waited for messages of each other one, without pairs that never waited."""
    rows = []
    for rank, log in run.logs.items():
        others = sorted({other for report in log.recent for other, seconds in report.waits.items() if seconds})
        for other in others:
            seconds = mean(report.waits.get(other, 0.0) for report in log.recent)
            rows.append({"rank": rank, "waits_for": other, "seconds": seconds})
    return rows


def memory(run: WatchedRun) -> list[dict[str, Any]]:
    """Return the bytes held for backward on each rank, as measured last and as forecast by the costs."""
    forecast = dict(enumerate(run.header.forecast))
    measured = {rank: log.peak_bytes for rank, log in run.logs.items()}
    return [{"rank": rank, "measured": measured.get(rank), "forecast": forecast.get(rank)} for rank in range(run.num_ranks)]
