"""The page of `zerobubble watch`: its shell, and its parts as HTML and as data of the viewer and the charts, remade for each state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from typing import Any

from zerobubble.errors import ZeroBubbleError
from zerobubble.explain import Gap, gaps
from zerobubble.kinds import Kind, traits_of
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_percent
from zerobubble.view import MemoryRow, Viewed
from zerobubble.view.assets import asset, script, shell
from zerobubble.view.page import section, table, viewer_data
from zerobubble.view.report_page import card, memory_section
from zerobubble.watch.run import RunState, WatchedRun
from zerobubble.watch.series import Series, mean_of

PACKAGES = ("zerobubble.watch", "zerobubble.view")
"""Where the page's modules and styles are."""
MOST_ROWS = 16
"""The most rows of a table: stages that drift most, pairs of ranks that wait longest."""
MOST_LINES = 8
"""The most lines in a chart of stages."""
COLORS = (*(traits_of(kind).color for kind in (Kind.F, Kind.W, Kind.B)), "#8e6bbf", "#b5475f", "#7d6a4f", "#3d8fa8", "#5f7d3a")
ENDED = (RunState.FAILED, RunState.GONE, RunState.SILENT)
"""States of a run that needs its reader."""


@cache
def watch_html() -> str:
    """The shell of the page, which asks the server for its parts."""
    body = (
        '<header><h1>Watch training runs</h1></header>\n<p id="notice" class="notice" role="status"></p>\n<div id="status"></div>\n'
        '<div id="cards"></div>\n<div id="why"></div>\n<section aria-labelledby="timeline"><h2 id="timeline">Last recorded step</h2>'
        '<p class="lead" id="timeline-lead"></p><div id="viewer"></div></section>\n'
        '<div id="charts"></div>\n<div id="tables"></div>\n'
    )
    return shell("zerobubble watch", body, asset("page.css") + asset("watch.css", PACKAGES), script("watch.js", PACKAGES))


def page_parts(runs: Sequence[WatchedRun], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the parts of the page for `json`. `states` are the figures of the runs."""
    return {
        "title": " and ".join(f"{state['title']}: {state['status']['state']}" for state in states),
        "status": "".join(map(_status, states)),
        "cards": _cards(states[0]) if len(states) == 1 else _comparison(states),
        "why": "".join(map(_why, states)),
        "lead": escape(_lead(runs)),
        "charts": list(_charts(runs)),
        "tables": "".join(part for place in range(len(runs)) for part in _tables(runs, states, place)),
    }


def timeline_parts(runs: Sequence[WatchedRun]) -> dict[str, Any] | None:
    """Returns the data of the viewer: the last step that all ranks recorded, of each run, below its plan; None before the first."""
    viewed = [replace(view, timeline=_named(view.timeline, run, runs)) for run in runs for view in _viewed(run)]
    return viewer_data(viewed) if viewed else None


def _named(timeline: Timeline, run: WatchedRun, runs: Sequence[WatchedRun]) -> Timeline:
    """Returns a timeline with the name of its run, if there are several."""
    return replace(timeline, name=run.title) if len(runs) > 1 else timeline


def _viewed(run: WatchedRun) -> Iterator[Viewed]:
    if run.details is None:
        return
    if run.header.plan is not None:
        yield Viewed(run.header.plan, costs=run.header.costs)
    yield Viewed(run.details, gaps=_gaps(run))


def _gaps(run: WatchedRun) -> Sequence[Sequence[Gap]]:
    """Returns what ranks waited for; empty without costs, and for a step of another schedule than the last one."""
    if run.details is None or run.header.schedule is None or run.header.costs is None:
        return ()
    try:
        return gaps(run.header.schedule, run.header.costs, run.details)
    except ZeroBubbleError:
        return ()


def _lead(runs: Sequence[WatchedRun]) -> str:
    steps = [f"step {run.details_step} of {run.title}" for run in runs if run.details is not None]
    if not steps:
        return "No step has been recorded in detail yet."
    planned = any(run.details is not None and run.header.plan is not None for run in runs)
    return f"S{' and '.join(steps)[1:]}, {'below its plan, ' if planned else ''}on one time axis."


def _status(state: dict[str, Any]) -> str:
    status, name = state["status"], escape(state["title"])
    step = "" if state["step"] is None else f", step {state['step']:,}"
    when = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status['at']))} ({_ago(state['now'] - status['at'])})" if status["at"] else ""
    )
    why = f": {escape(status['why'])}" if status["why"] else ""
    urgent = " caution" if status["state"] in ENDED else ""
    word = f'<b class="state {status["state"]}">{escape(status["state"])}</b>'
    lost = f" {state['left_out']} steps were left out of its record." if state["left_out"] else ""
    lost += "".join(
        f" {counted(lines, 'line')} of {name} cannot be read, and are left out." for name, lines in state["unreadable_lines"].items()
    )
    return f'<p class="run{urgent}">{word} <b title="{escape(state["run"])}">{name}</b>{step}, {escape(when)}{why}.{lost}</p>\n'


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, round(seconds))} s ago"


def _figures(state: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the main figures of a run, each with a detail, by their labels."""
    plan, seconds, loss, bubble = state["planned"], state["step_seconds"], state["loss"], state["bubble"]
    planned = plan and f"planned makespan {_ms(plan['step_seconds'])}"
    idle = f"planned {show_percent(plan['bubble'])}" if plan else "idle share of the ranks"
    drifting = [row for row in state["passes"] if row["drift"] is not None]
    slowest = ("–", "no reference yet")
    if drifting:
        worst = max(drifting, key=lambda row: row["drift"])
        than = "planned" if plan else "in the first steps"
        where = f"{worst['passes']} on rank {worst['rank']}, than {than}: median of the last {counted(worst['steps'], 'step')}"
        slowest = (f"{show_percent(worst['drift'])} slower", where) if worst["drift"] > 0 else ("none", f"slower than {than}")
    return {
        "Step": (
            "–" if seconds is None else _ms(seconds),
            planned or "median of the last steps",
        ),
        "Bubble": ("–" if bubble is None else show_percent(bubble), idle),
        "Loss": ("–" if loss is None else f"{loss:.4g}", "of the last step"),
        "Slowest passes": slowest,
    }


def _cards(state: dict[str, Any]) -> str:
    cards = "".join(card(escape(label), escape(value), escape(detail)) for label, (value, detail) in _figures(state).items())
    return f'<section class="cards" aria-label="Current figures">{cards}</section>\n'


def _why(state: dict[str, Any]) -> str:
    """Returns why the run is slower than its plan, or what a comparison with a plan needs."""
    if state["outcome"]:
        return f'<p class="why"><b>{escape(state["title"])}</b> {escape(state["outcome"])}</p>\n'
    if state["planned"] is None:
        return f'<p class="why"><b>{escape(state["title"])}</b> has no plan to compare with: {_GIVE_COSTS}</p>\n'
    return ""


_GIVE_COSTS = "give the costs of <code>pipe.profile(x, y)</code>, or of a plan, to <code>zb.hooks.Telemetry(costs=...)</code>."


def _comparison(states: Sequence[dict[str, Any]]) -> str:
    titles = ("run", "schedule", "ranks", "step", *(label.lower() for label in _figures(states[0])))
    rows = []
    for state in states:
        figures = [value for value, _ in _figures(state).values()]
        rows.append(
            (
                state["title"],
                str(state["schedule"]),
                str(state["ranks"]),
                str(state["step"] if state["step"] is not None else "–"),
                *figures,
            )
        )
    return section("runs", "Runs", table(("run", "schedule", "ranks", "last step", *titles[4:]), rows))


def _charts(runs: Sequence[WatchedRun]) -> Iterator[dict[str, Any]]:
    all_series = [run.series for run in runs]
    names = [run.title for run in runs]
    for name, title, factor in (("loss", "Loss", 1.0), ("step_seconds", "Step, ms", 1e3), ("bubble", "Bubble, %", 100.0)):
        yield _chart(title, {run: series[name] for run, series in zip(names, all_series, strict=True) if name in series}, factor)
    for run, series in zip(names, all_series, strict=True):
        stages = {name: values for name, values in series.items() if name.startswith("stage ")}
        most = dict(sorted(stages.items(), key=lambda item: -_change(item[1]))[:MOST_LINES])
        title = f"Time of a stage, ms{f', of {run}' if len(runs) > 1 else ''}"
        yield _chart(title, {name: stages[name] for name in stages if name in most}, 1e3, plain=True)


def _change(series: Series) -> float:
    values = [mean for mean in series.means() if mean is not None]
    return max(values) / min(values) if values and min(values) > 0 else 0.0


def _chart(title: str, lines: dict[str, Series], factor: float, plain: bool = False) -> dict[str, Any]:
    """Returns the data of a chart: each line in bins of the same width, from the first that any line has."""
    width = max((series.width for series in lines.values()), default=1)
    means = {name: mean_of([series], width).means() for name, series in lines.items()}
    places = [place for values in means.values() for place, value in enumerate(values) if value is not None]
    first, last = min(places, default=0), max(places, default=-1)
    drawn = [
        {
            "name": name,
            "color": COLORS[at % len(COLORS)],
            "values": [_rounded(values[place] if place < len(values) else None, factor) for place in range(first, last + 1)],
        }
        for at, (name, values) in enumerate(means.items())
    ]
    return {"title": title, "first": first * width, "width": width, "plain": plain, "runs": drawn}


def _rounded(value: float | None, factor: float) -> float | None:
    return None if value is None else float(f"{value * factor:.5g}")


def _tables(runs: Sequence[WatchedRun], states: Sequence[dict[str, Any]], place: int) -> Iterator[str]:
    run, state = runs[place], states[place]
    name = f" of {escape(run.title)}" if len(runs) > 1 else ""
    yield section(f"stages-{place}", f"Stage times{name}", *_stages(run, state))
    yield section(f"waits-{place}", f"Waits between ranks{name}", *_waits(state))
    rows = [MemoryRow(row["rank"], row["forecast"], row["measured"]) for row in state["memory"]]
    yield memory_section(rows, f"Memory held for backward{name}", f"memory-{place}")


def _stages(run: WatchedRun, state: dict[str, Any]) -> tuple[str, str]:
    rows = sorted(state["passes"], key=lambda row: -abs(row["drift"] or 0.0))
    against = "the plan" if run.header.costs is not None else "the first steps of the run"
    lead = f"Median times of passes in the last steps, against {against}."
    if len(rows) > MOST_ROWS:
        lead += f" These are the {MOST_ROWS} of {len(rows)} that drift most."
    cells = [(row["passes"], str(row["rank"]), _ms(row["seconds"]), _signed(row["drift"])) for row in rows[:MOST_ROWS]]
    return (table(("passes", "rank", "time", "drift"), cells) if cells else ""), escape(lead)


def _waits(state: dict[str, Any]) -> tuple[str, str]:
    pairs = [(wait["seconds"], wait["rank"], wait["waits_for"]) for wait in state["waits"]]
    if not pairs or not state["step_seconds"]:
        return "", ""
    pairs.sort(reverse=True)
    step = state["step_seconds"]
    longest, rank, other = pairs[0]
    lead = f"Rank {rank} waits longest: {_ms(longest)} of a step for rank {other}. Means of the last steps; part of each wait is planned."
    rows = [
        f'<tr><th scope="row">rank {rank} waits for rank {other}</th><td>{_ms(seconds)}</td><td>{show_percent(seconds / step)}</td>'
        f'<td class="wide"><div class="meter"><i style="width:{100 * seconds / longest:.1f}%"></i></div></td></tr>'
        for seconds, rank, other in pairs[:MOST_ROWS]
    ]
    head = '<tr><th scope="col">ranks</th><th scope="col">time</th><th scope="col">share of the step</th><th scope="col"></th></tr>'
    table = f'<div class="scroll" tabindex="0"><table class="figures"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>\n'
    return table, escape(lead)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"


def _signed(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"
