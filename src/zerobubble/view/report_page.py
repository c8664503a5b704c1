"""A training report as one HTML page that opens offline: the viewer and the figures of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle, repeat
from math import isfinite

from zerobubble.arguments import takes
from zerobubble.explain import PARTS
from zerobubble.kinds import Kind, traits_of
from zerobubble.units import ms, show_bytes, show_ms, show_percent
from zerobubble.view.columns import Viewed
from zerobubble.view.page import header, page, section, table, viewer
from zerobubble.view.report import REFERENCE, MemoryRow, Report, ThroughputRow


@takes(report=Report)
def report_html(report: Report) -> str:
    """Returns the HTML page of `report`, with every text escaped."""
    sections = (_headline, _timelines, _difference, _losses, _throughput, _memory, _notes)
    # A loss that is not finite becomes null, which leaves a gap in the line of the chart.
    values = {name: [loss if isfinite(loss) else None for loss in losses] for name, losses in report.losses.items()}
    losses = [{"name": name, "values": values[name], "color": color} for name, color in _run_colors(report)]
    body = (header(report.title, report.facts), *(part(report) for part in sections))
    return page(escape(report.title), body, list(_viewed(report)), losses)


def _viewed(report: Report) -> Iterator[Viewed]:
    limits = [row.limit or 0 for row in sorted(report.memory, key=lambda row: row.rank) if row.limit is not None]
    for timeline, gaps, layers in zip(report.timelines, report.gaps or repeat(()), report.layers or repeat({}), strict=False):
        fits = timeline.memory and len(limits) == timeline.num_ranks
        yield Viewed(timeline, gaps=gaps, limits=limits if fits else (), constant_bytes=layers)


def _headline(report: Report) -> str:
    caution = f'<p class="caution">{escape(report.caution)}</p>\n' if report.caution else ""
    cards = "".join(_cards(report))
    return caution + (f'<section class="cards" aria-label="Headline figures">{cards}</section>\n' if cards else "")


def card(label: str, value: str, detail: str) -> str:
    """Returns a figure with its label and a detail, all HTML."""
    return f'<div class="card"><div class="label">{label}</div><div class="value">{value}</div><div class="detail">{detail}</div></div>'


def _cards(report: Report) -> Iterator[str]:
    if not report.caution:
        yield from _speed_card(report)
    if report.losses:
        name, losses = next(iter(report.losses.items()))
        which = "first to last step" if report.held_out is None else "held-out data, before and after"
        first, last = report.held_out or (losses[0], losses[-1])
        yield card(f"Loss, {which}", f'{first:.3f}<span class="arrow">→</span>{last:.3f}', f"{escape(name)}, {len(losses)} steps")
    difference = report.loss_difference()
    if difference is not None:
        _, other, largest, step = difference
        detail = "the same loss in every step, bit for bit" if largest == 0 else f"largest difference of a loss, at step {step + 1}"
        yield card(f"Against {escape(other)}", "identical" if largest == 0 else f"{largest:.2g}", detail)
    yield from _bubble_card(report)


def _speed_card(report: Report) -> Iterator[str]:
    """The conclusion of the report. It has the times of the steps that the page draws, so the two cannot disagree."""
    drawn, gain = report.drawn_steps(), report.speed_up()
    if drawn is not None:
        base, run = drawn
        times, name = base.makespan / run.makespan, escape(run.name)
        how = "planned makespan" if run.source == "simulated" else "makespan"
        detail = f"a {how} of {show_ms(run.makespan)} instead of {show_ms(base.makespan)}, as drawn below"
    elif gain is not None:
        name, times, detail = escape(gain[0]), gain[1], "tokens per second"
    else:
        yield from _step_card(report)
        return
    yield card(f"{name} is {_faster(times)} {REFERENCE}", f"{times:.2f}×", detail)


def _step_card(report: Report) -> Iterator[str]:
    """The measured step and the planned one, of a report without a reference."""
    if report.measured is not None and report.predicted is not None:
        yield card("Makespan, measured", show_ms(report.measured.makespan), f"planned {show_ms(report.predicted.makespan)}")


def _faster(times: float) -> str:
    shown = round(times, 2)
    return "as fast as" if shown == 1 else "faster than" if shown > 1 else "slower than"


def _bubble_card(report: Report) -> Iterator[str]:
    measured, predicted = report.measured, report.predicted
    if measured is not None:
        detail = f"planned {show_percent(predicted.bubble_makespan)}" if predicted else "share of rank time that is idle"
        yield card("Bubble, measured", show_percent(measured.bubble_makespan), detail)
    elif predicted is not None:
        yield card("Bubble, planned", show_percent(predicted.bubble_makespan), "share of rank time that is idle")


def _timelines(report: Report) -> str:
    return section("timelines", "Timeline", viewer() if report.timelines else "", escape(_outcome(report)))


def _outcome(report: Report) -> str:
    """Returns how the run differs from its plan, and why, which a page states before it draws the two."""
    return "" if report.difference is None else report.difference.outcome


def _difference(report: Report) -> str:
    if report.difference is None:
        return ""
    titles = ("times in ms", *PARTS, "run")
    rows = (
        [f"rank {account.rank}", *(f"{ms(time):,.2f}" for time in (*account.parts(), account.total))]
        for account in report.difference.accounts
    )
    figures = table(titles, rows, "accounts")
    items = "".join(map(_causes, *zip(*report.difference.by_rank(), strict=True)))
    body = f'{figures}<ul class="accounts-list">{items}</ul>'
    return section("difference", "Run against plan", body, "" if report.timelines else escape(_outcome(report)))


def _causes(idle: str, causes: Sequence[tuple[str, str]]) -> str:
    listed = "".join(f"<tr><td>{escape(time)}</td><td>{escape(cause)}</td></tr>" for time, cause in causes)
    return f"<li>{escape(idle)}<table>{listed}</table></li>"


def _losses(report: Report) -> str:
    if not report.losses:
        return ""
    label = escape("Loss per step of " + ", ".join(report.losses))
    runs = "".join(f'<li><i class="line" style="background:{color}"></i>{escape(name)}</li>' for name, color in _run_colors(report))
    chart = f'<div id="losses" class="chart" tabindex="0" role="img" aria-label="{label}"></div>'
    body = f'<ul class="legend">{runs}</ul><div class="stage">{chart}</div>'
    return section("loss", "Loss", body, _loss_sentence(report))


def _run_colors(report: Report) -> Iterator[tuple[str, str]]:
    return zip(report.losses, cycle(traits_of(kind).color for kind in (Kind.F, Kind.W, Kind.BW, Kind.B)), strict=False)


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
    titles = (
        "schedule",
        "tokens/s",
        "",
        f"tokens/s against {REFERENCE}",
        "memory of the fullest rank",
        "planned bubble",
        "measured bubble",
    )
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    own_names = {timeline.name for timeline in report.own_timelines}
    rows = "".join(_throughput_row(row, titles[1:], top, base, row.schedule in own_names) for row in report.throughput)
    body = f'<div class="scroll" tabindex="0"><table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return section("throughput", "Throughput", body)


def _throughput_row(row: ThroughputRow, titles: Sequence[str], top: float, base: float, is_own: bool) -> str:
    shares = ("–" if share is None else show_percent(share) for share in (row.predicted_bubble, row.measured_bubble))
    bar = f'<div class="meter"><i style="width:{100 * row.tokens_per_second / top:.2f}%"></i></div>'
    gain = f"{row.tokens_per_second / base:.2f}×" if base > 0 else "–"
    peak = "–" if row.peak_bytes is None else show_bytes(row.peak_bytes)
    figures = zip(titles, (f"{row.tokens_per_second:,.0f}", bar, gain, peak, *shares), strict=True)
    cells = "".join(f'<td data-title="{title}">{cell}</td>' if title else f'<td class="wide">{cell}</td>' for title, cell in figures)
    return f'<tr{" class=own" if is_own else ""}><th scope="row">{escape(row.schedule)}</th>{cells}</tr>'


def _memory(report: Report) -> str:
    return memory_section(report.memory)


def memory_section(memory: Sequence[MemoryRow], title: str = "Peak activation memory", name: str = "memory") -> str:
    """Returns a section, with the id `name`, of the memory of each rank; an empty string if no figure is known."""
    sizes = [n for row in memory for n in (row.predicted, row.measured, row.limit) if n is not None]
    if not sizes:
        return ""
    rows = "".join(_memory_row(row, max(sizes) or 1) for row in memory)
    limits = {row.limit for row in memory if row.limit is not None}
    text = f"limit {show_bytes(max(limits))}" if len(limits) == 1 else "limit"
    limit = f'<li><i class="limit"></i>{text}</li>' if limits else ""
    legend = f'<ul class="legend"><li><i class="predicted"></i>planned</li><li><i class="measured"></i>measured</li>{limit}</ul>'
    return section(name, title, f'{legend}<div class="memory">{rows}</div>')


def _memory_row(row: MemoryRow, top: int) -> str:
    sizes = {name: size for name, size in (("predicted", row.predicted), ("measured", row.measured)) if size is not None}
    bars = "".join(f'<div class="{name}" style="width:{100 * size / top:.2f}%"></div>' for name, size in sizes.items())
    mark = ""
    if row.limit is not None:
        text = f"limit {show_bytes(row.limit)}"
        mark = f'<i class="limit" style="left:{100 * row.limit / top:.2f}%" title="{text}"></i>'
    texts = "".join(f"<div>{'–' if size is None else show_bytes(size)}</div>" for size in (row.predicted, row.measured))
    return f'<div class="rank">rank {row.rank}</div><div class="bars">{bars}{mark}</div><div class="sizes">{texts}</div>'


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return section("notes", "Notes", f"<ul>{items}</ul>" if items else "")
