"""A training report as one HTML page that opens offline: no request leaves it, no framework, no build step.

Text and tables are written here; `report_timeline.js` and `report_losses.js` draw what one wants to zoom into or point at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import cycle, repeat
from math import isfinite
from typing import Any

from zerobubble.arguments import takes
from zerobubble.explain import PARTS, Account, Gap, WaitsFor
from zerobubble.export.lanes import lanes
from zerobubble.export.palette import WAIT_COLOURS, ink, num_shades, shade, stage_order
from zerobubble.export.report import REFERENCE, MemoryRow, Report, ThroughputRow
from zerobubble.export.svg import caption
from zerobubble.kinds import KINDS, Kind, traits_of
from zerobubble.timeline import Timeline
from zerobubble.units import ms, show_bytes, show_percent

WAITS = {
    WaitsFor.PASS: "waiting for a pass of another rank",
    WaitsFor.MESSAGE: "waiting for a message",
    WaitsFor.HOST: "waiting for the host",
}
"""What idle time is spent waiting for, in words."""
SCRIPTS = ("report_timeline.js", "report_losses.js", "report.js")


@takes(report=Report)
def report_html(report: Report) -> str:
    """The page of `report`. Numbers in it are those of the report; every text is escaped."""
    return "".join(_page(report))


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _page(report: Report) -> Iterator[str]:
    title = escape(report.title)
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
    yield '<link rel="icon" href="data:,">\n'
    yield f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n<main>\n<header><h1>{title}</h1>\n{_facts(report)}</header>\n"
    for section in (_headline, _timelines, _difference, _losses, _throughput, _memory, _notes):
        yield section(report)
    yield f'</main>\n<script type="application/json" id="data">{_data(report)}</script>\n'
    yield "".join(f"<script>\n{_asset(name)}</script>\n" for name in SCRIPTS)
    yield "</body>\n</html>\n"


def _facts(report: Report) -> str:
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in report.facts)
    return f'<dl class="facts">{items}</dl>\n' if items else ""


def _section(name: str, title: str, body: str, lead: str = "") -> str:
    """A section with its heading; empty when it has no body."""
    intro = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{intro}\n{body}</section>\n' if body else ""


def _headline(report: Report) -> str:
    cards = "".join(_cards(report))
    return f'<section class="cards" aria-label="Headline figures">{cards}</section>\n' if cards else ""


def _card(label: str, value: str, detail: str) -> str:
    return f'<div class="card"><div class="label">{label}</div><div class="value">{value}</div><div class="detail">{detail}</div></div>'


def _cards(report: Report) -> Iterator[str]:
    if report.losses:
        name, losses = next(iter(report.losses.items()))
        arrow = '<span class="arrow">→</span>'
        yield _card("Loss, first to last step", f"{losses[0]:.3f}{arrow}{losses[-1]:.3f}", f"{escape(name)}, {len(losses)} steps")
    difference = report.loss_difference()
    if difference is not None:
        _, other, largest, step = difference
        detail = "the same loss in every step, bit for bit" if largest == 0 else f"largest difference of a loss, at step {step + 1}"
        yield _card(f"Against {escape(other)}", "identical" if largest == 0 else f"{largest:.2g}", detail)
    yield from _bubble_card(report)
    gain = report.speed_up()
    if gain is not None:
        yield _card("Speed", f"{gain[1]:.2f}×", f"{escape(gain[0])} against {REFERENCE}, tokens per second")


def _bubble_card(report: Report) -> Iterator[str]:
    measured, predicted = report.measured, report.predicted
    if measured is not None:
        detail = f"predicted {show_percent(predicted.bubble_makespan)}" if predicted else "share of rank time that is idle"
        yield _card("Bubble, measured", show_percent(measured.bubble_makespan), detail)
    elif predicted is not None:
        yield _card("Bubble, predicted", show_percent(predicted.bubble_makespan), "share of rank time that is idle")


def _timelines(report: Report) -> str:
    if not report.timelines:
        return ""
    captions = "".join(f"<li><b>{escape(t.name)}</b> {escape(t.source)} <span>{escape(caption(t))}</span></li>" for t in report.timelines)
    label = escape("Timelines: " + "; ".join(f"{t.name}, {t.source}, {caption(t)}" for t in report.timelines))
    body = (
        f'<div class="bar">{_legend(report)}<div class="buttons"><button type="button" id="zoom-in" aria-label="zoom in">+</button>'
        '<button type="button" id="zoom-out" aria-label="zoom out">−</button>'
        '<button type="button" id="zoom-all">all</button></div></div>'
        f'<div class="stage"><canvas id="timeline" tabindex="0" role="img" aria-label="{label}" aria-describedby="keys"></canvas>'
        '<div id="tip" role="status" hidden></div></div>'
        f'<ul class="captions">{captions}</ul>'
        '<p class="hint" id="keys">Wheel to zoom, drag to move, double click for all. '
        "Keys: arrows go from pass to pass, + and − zoom, 0 shows all.</p>"
    )
    return _section("timelines", "Timeline", body)


def _difference(report: Report) -> str:
    if report.difference is None:
        return ""
    whole, *ranks = map(escape, report.difference.sentences())
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in ("rank", *PARTS, "run ms"))
    rows = "".join(_account_row(account) for account in report.difference.accounts)
    table = f'<div class="scroll"><table class="speeds accounts"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    items = "".join(f"<li>{line}</li>" for line in ranks)
    return _section("difference", "Run against plan", f'{table}<ul class="told">{items}</ul>', whole)


def _account_row(account: Account) -> str:
    cells = "".join(f"<td>{ms(time):,.2f}</td>" for time in (*account.parts(), account.total))
    return f'<tr><th scope="row">{account.rank}</th>{cells}</tr>'


def _kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    present = {span.op.kind for timeline in timelines for _, span in timeline.spans()}
    return [kind for kind in KINDS if kind in present]


def _legend(report: Report) -> str:
    shades = num_shades(*report.timelines)
    items = []
    for kind in _kinds(report.timelines):
        swatches = "".join(f'<i style="background:{shade(kind, place, shades)}"></i>' for place in range(shades))
        items.append(f"<li>{swatches}<b>{kind}</b> {traits_of(kind).phrase}</li>")
    items.append('<li><i class="idle"></i>idle</li>')
    if report.gaps:
        items += [f'<li><i style="background:{WAIT_COLOURS[waiting]}"></i>{text}</li>' for waiting, text in WAITS.items()]
    note = "<li>lighter: the rank's later stages</li>" if shades > 1 else ""
    return f'<ul class="legend">{"".join(items)}{note}</ul>'


def _losses(report: Report) -> str:
    if not report.losses:
        return ""
    label = escape("Loss per step of " + ", ".join(report.losses))
    runs = "".join(f'<li><i class="line" style="background:{colour}"></i>{escape(name)}</li>' for name, colour in _run_colours(report))
    body = f'<ul class="legend">{runs}</ul><div class="stage"><div id="losses" tabindex="0" role="img" aria-label="{label}"></div></div>'
    return _section("loss", "Loss", body, _loss_sentence(report))


def _run_colours(report: Report) -> Iterator[tuple[str, str]]:
    return zip(report.losses, cycle(traits_of(kind).colour for kind in (Kind.F, Kind.W, Kind.BW, Kind.B)), strict=False)


def _loss_sentence(report: Report) -> str:
    difference = report.loss_difference()
    if difference is None:
        return ""
    name, other, largest, step = difference
    pair = f"<b>{escape(name)}</b> and <b>{escape(other)}</b>"
    steps = min(len(losses) for losses in list(report.losses.values())[:2])
    if largest == 0:
        return f"{pair} are identical in all {steps} steps: the largest difference is exactly 0."
    return f"{pair} differ by at most {largest:.3g}, at step {step + 1} of {steps}."


def _throughput(report: Report) -> str:
    if not report.throughput:
        return ""
    speeds = {row.schedule: row.tokens_per_second for row in report.throughput}
    top, base = max(speeds.values()) or 1.0, speeds.get(REFERENCE, 0.0)
    titles = ("schedule", "tokens/s", "", f"against {REFERENCE}", "makespan bubble predicted", "measured")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    own = {timeline.name for timeline in report.timelines}
    rows = "".join(_throughput_row(row, top, base, row.schedule in own) for row in report.throughput)
    body = f'<div class="scroll"><table class="speeds"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return _section("throughput", "Throughput", body)


def _throughput_row(row: ThroughputRow, top: float, base: float, own: bool) -> str:
    gain = f"{row.tokens_per_second / base:.2f}×" if base > 0 else "–"
    bar = f'<div class="meter"><i style="width:{100 * row.tokens_per_second / top:.2f}%"></i></div>'
    shares = "".join(f"<td>{'–' if share is None else show_percent(share)}</td>" for share in (row.predicted_bubble, row.measured_bubble))
    name = f'<th scope="row">{escape(row.schedule)}</th>'
    speed = f'<td>{row.tokens_per_second:,.0f}</td><td class="wide">{bar}</td><td>{gain}</td>'
    return f"<tr{' class=own' if own else ''}>{name}{speed}{shares}</tr>"


def _memory(report: Report) -> str:
    known = [n for row in report.memory for n in (row.predicted, row.measured, row.limit) if n is not None]
    if not known:
        return ""
    rows = "".join(_memory_row(row, max(known) or 1) for row in report.memory)
    limits = {row.limit for row in report.memory if row.limit is not None}
    text = f"limit {show_bytes(max(limits))}" if len(limits) == 1 else "limit"
    limit = f'<li><i class="limit"></i>{text}</li>' if limits else ""
    legend = f'<ul class="legend"><li><i class="predicted"></i>predicted</li><li><i class="measured"></i>measured</li>{limit}</ul>'
    return _section("memory", "Peak activation memory", f'{legend}<div class="memory">{rows}</div>')


def _memory_row(row: MemoryRow, top: int) -> str:
    bars = "".join(_memory_bar(name, size, top) for name, size in (("predicted", row.predicted), ("measured", row.measured)))
    mark = ""
    if row.limit is not None:
        text = f"limit {show_bytes(row.limit)}"
        mark = f'<i class="limit" style="left:{100 * row.limit / top:.2f}%" title="{text}"></i>'
    return f'<div class="rank">rank {row.rank}</div><div class="bars">{bars}{mark}</div>{_memory_text(row)}'


def _memory_bar(name: str, size: int | None, top: int) -> str:
    return "" if size is None else f'<div class="{name}" style="width:{100 * size / top:.2f}%"></div>'


def _memory_text(row: MemoryRow) -> str:
    sizes = "".join(f"<div>{'–' if size is None else show_bytes(size)}</div>" for size in (row.predicted, row.measured))
    return f'<div class="sizes">{sizes}</div>'


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return _section("notes", "Notes", f"<ul>{items}</ul>" if items else "")


def _data(report: Report) -> str:
    shades = num_shades(*report.timelines)
    colours = {kind: [shade(kind, place, shades) for place in range(shades)] for kind in KINDS}
    data = {
        "phrases": {kind: traits_of(kind).phrase for kind in KINDS},
        "colours": colours,
        "inks": {kind: [ink(colour) for colour in row] for kind, row in colours.items()},
        "timelines": [_timeline_data(timeline, idle) for timeline, idle in zip(report.timelines, report.gaps or repeat(()), strict=False)],
        "waiting": WAIT_COLOURS,
        "losses": [_run_data(name, report.losses[name], colour) for name, colour in _run_colours(report)],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run_data(name: str, losses: Sequence[float], colour: str) -> dict[str, Any]:
    """A run for the chart; a loss that is not finite is null, which leaves a gap in the line."""
    return {"name": name, "values": [loss if isfinite(loss) else None for loss in losses], "colour": colour}


def _timeline_data(timeline: Timeline, gaps: Sequence[Sequence[Gap]]) -> dict[str, Any]:
    """Rows of [kind, stage, microbatch, start, end, shade, why, the pass waited for, lane, lanes], times in ns from the first start.

    Rows of idle time as [start, end, what the rank waits for].
    """
    rows = []
    for row, places in zip(timeline.rows, stage_order(timeline), strict=True):
        cells = []
        for (op, start, end, why), lane in zip(row, lanes(row), strict=True):
            reason, cause = (str(why), str(why.op) if why.op else None) if why else (None, None)
            times = (start - timeline.start, end - timeline.start)
            cells.append([op.kind, op.stage, op.microbatch, *times, places[op.stage], reason, cause, *lane])
        rows.append(cells)
    idle = [[[gap.start - timeline.start, gap.end - timeline.start, gap.waits_for] for gap in row] for row in gaps]
    head = {"name": timeline.name, "source": timeline.source, "caption": caption(timeline), "makespan": timeline.makespan}
    return {**head, "rows": rows, "gaps": idle}
