"""The README's picture: one training step whose passes move from where 1F1B has them to where ZB-V has them, as an animated SVG.

A stage of 1F1B is two of ZB-V's, one after the other, so each of its passes is drawn as halves, and BW as the B and the W in it. Under
1F1B only the first part of a pass has its number. Where nothing is animated, such as in print, the picture shows ZB-V next to the line at
which 1F1B ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble import Kind, Op, Timeline, make, simulate
from zerobubble.cli.inputs.schedule_and_costs import equal_costs
from zerobubble.export.palette import ink, shade
from zerobubble.export.svg import HATCH, STYLE
from zerobubble.kinds import traits_of
from zerobubble.units import NS_PER_MS, show_ms, show_percent

RANKS, MICROBATCHES = 4, 8
TIMES, COMM = (10, 10, 8), 0.2
LEFT, TOP, ROW, PITCH, PIXELS_PER_MS = 58, 46, 30, 38, 2.55
WIDTH, HEIGHT = 900, TOP + RANKS * PITCH + 34

MOVES = """
.p,.l,.p rect{animation:9s ease-in-out infinite}.p{animation-name:go}.l{animation-name:on}
.b{animation-name:b!important}.w{animation-name:w!important}.b2{animation-name:b2!important}.w2{animation-name:w2!important}
.l.one{animation-name:off;visibility:hidden}.p text{font-size:9px;text-anchor:middle}
.b+text,.w+text{animation:t 9s ease-in-out infinite}
.p text.n{animation:t 9s ease-in-out infinite,n 9s ease-in-out infinite}
@keyframes go{0%,28%,100%{translate:var(--d)}42%,88%{translate:0 0}}
@keyframes b{0%,28%,100%{fill:BW}42%,88%{fill:B_}}
@keyframes w{0%,28%,100%{fill:BW}42%,88%{fill:W_}}
@keyframes b2{0%,28%,100%{fill:BX}42%,88%{fill:B2}}
@keyframes w2{0%,28%,100%{fill:BX}42%,88%{fill:W2}}
@keyframes on{0%,28%,100%{visibility:hidden}42%,88%{visibility:visible}}
@keyframes off{0%,28%,100%{visibility:visible}42%,88%{visibility:hidden}}
@keyframes t{0%,28%,100%{fill:#fff}42%,88%{fill:#1b1f24}}
@keyframes n{0%,28%,100%{opacity:0}42%,88%{opacity:1}}
@media (prefers-reduced-motion:reduce){.p,.l,.p rect,.p text,.p text.n{animation:none!important}}
"""


class Place(NamedTuple):
    """Where a pass is drawn: its rank, and its start and end in ns."""

    rank: int
    start: int
    end: int


def front() -> str:
    """The picture."""
    schedules = [make(name, RANKS, MICROBATCHES) for name in ("1f1b", "zb-v")]
    before, after = (simulate(schedule, equal_costs(schedule, TIMES, COMM)) for schedule in schedules)
    return "\n".join(_document(before, after)) + "\n"


def _document(before: Timeline, after: Timeline) -> Iterator[str]:
    titles = [
        f"{name}: {show_ms(one.makespan)}, {show_percent(one.bubble_makespan)} idle" for name, one in (("1F1B", before), ("ZB-V", after))
    ]
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    yield f"<title>One training step on {RANKS} ranks, which hold as much memory under both. {'; '.join(titles)}</title>"
    yield f"<style>{STYLE}{_moves()}</style><defs>{HATCH}</defs>"
    yield f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
    for name, text in zip(("one", "two"), titles, strict=True):
        yield f'<text class="ink title l {name}" x="{LEFT}" y="26">{text}</text>'
    yield from _legend()
    for rank in range(RANKS):
        yield f'<text class="soft end" x="{LEFT - 8}" y="{_y(rank) + ROW / 2 + 4:g}">rank {rank}</text>'
        yield f'<rect x="{LEFT}" y="{_y(rank)}" width="{_x(before.makespan) - LEFT:.1f}" height="{ROW}" fill="url(#idle)"/>'
    origins = dict(_halves(before))
    for rank, span in after.spans():
        yield _moving(span.op, Place(rank, span.start, span.end), origins[span.op])
    foot = TOP + RANKS * PITCH
    yield f'<text class="soft small" x="{LEFT}" y="{foot + 14}">numbers: microbatches; lighter: the second half of the model</text>'
    for name, timeline in (("1F1B", before), ("ZB-V", after)):
        x = _x(timeline.makespan)
        yield f'<path class="grid" style="stroke-opacity:.7" d="M{x:.1f} {TOP - 6}V{foot}"/>'
        yield f'<text class="soft small middle" x="{x:.1f}" y="{foot + 14}">{name} ends</text>'
    yield "</svg>"


def _moves() -> str:
    """The style of what moves, with the colors of BW, and of the B and the W that it becomes."""
    moves = MOVES
    for words, kind in ((("BW", "BX"), Kind.BW), (("B_", "B2"), Kind.B), (("W_", "W2"), Kind.W)):
        for half, word in enumerate(words):
            moves = moves.replace(f"fill:{word}", f"fill:{shade(kind, half, 2)}")
    return moves


def _legend() -> Iterator[str]:
    x = WIDTH - 440
    for kind, phrase in ((Kind.F, "F"), (Kind.BW, "BW, backward in one"), (Kind.B, "B, for inputs"), (Kind.W, "W, for weights")):
        yield f'<rect x="{x}" y="17" width="10" height="10" rx="2" fill="{traits_of(kind).color}"/>'
        yield f'<text class="soft small" x="{x + 15}" y="26">{phrase}</text>'
        x += 40 + 6 * len(phrase)


def _halves(timeline: Timeline) -> Iterator[tuple[Op, Place]]:
    """Where 1F1B runs what ZB-V's passes are: a stage is two of theirs, and its BW goes through the later one first, B before W."""
    for rank, span in timeline.spans():
        stage, microbatch = span.op.stage, span.op.microbatch
        parts = [(Kind.F, half, 1.0) for half in (0, 1)]
        if span.op.kind is not Kind.F:
            _, backward, weight = TIMES
            parts = [(kind, half, time) for half in (1, 0) for kind, time in ((Kind.B, backward), (Kind.W, weight))]
        whole, start = sum(time for _, _, time in parts), float(span.start)
        for kind, half, time in parts:
            end = start + span.duration * time / whole
            yield Op(kind, 2 * stage + half, microbatch), Place(rank, round(start), round(end))
            start = end


def _moving(op: Op, place: Place, origin: Place) -> str:
    """The box of a pass at its `place`, which comes from `origin`."""
    x, y = _x(place.start), _y(place.rank)
    width = _x(place.end) - x - 0.7
    way = f"{_x(origin.start) - x:.1f}px {_y(origin.rank) - y:g}px"
    half = int(op.stage >= RANKS)
    color = shade(op.kind, half, 2)
    changing = "" if op.kind is Kind.F else f' class="{op.kind.lower()}{"2" if half else ""}"'
    box = f'<rect{changing} x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{color}"/>'
    leads = op.kind is not Kind.W and op.stage % 2 == (op.kind is not Kind.F)
    number = "" if leads else ' class="n"'
    label = f'<text{number} x="{x + width / 2:.1f}" y="{y + ROW / 2 + 3.3:g}" fill="{ink(color)}">{op.microbatch}</text>'
    return f'<g class="p" style="--d:{way}">{box}{label}</g>'


def _x(time: int) -> float:
    return LEFT + PIXELS_PER_MS * time / NS_PER_MS


def _y(rank: int) -> int:
    return TOP + rank * PITCH
