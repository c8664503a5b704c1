"""What the page offers to change for a model on GPUs, with the step before and after.

Offers take longer than a picture, so the page asks for them once it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from zerobubble.cost_model.setting import RECOMPUTE
from zerobubble.explorer.answer import Answer, answer
from zerobubble.explorer.question import FieldError
from zerobubble.partition.balancing import quick_cuts
from zerobubble.units import show_ms, show_percent

MOST_STAGES = 64
"""Stages up to which other cuts are tried, which takes about a second."""
LEAST_GAIN = 0.005
"""The share of the step that a cut must save."""


def offers(played: Answer) -> Iterator[dict[str, Any]]:
    """Yields a sentence and fields for each change that helps: recomputation if the model does not fit, or else cuts of its layers."""
    if played.estimate is not None:
        yield from _cuts(played) if _fits_gpu(played) else _recomputation(played)


def _recomputation(played: Answer) -> Iterator[dict[str, Any]]:
    """Yields the least recomputation with which the model fits."""
    more = RECOMPUTE[RECOMPUTE.index(played.question.recompute) + 1 :]
    for way in more:
        try:
            other = answer(replace(played.question, recompute=way))
        except FieldError:
            continue  # the model has nothing of the kind
        if _fits_gpu(other):
            before, after = played.period, other.period
            text = f"It fits if B recomputes ({way}). The step then takes {show_ms(after)} instead of {show_ms(before)}."
            yield {"text": text, "fields": {"recompute": way}}
            return


def _cuts(played: Answer) -> Iterator[dict[str, Any]]:
    """Yields other numbers of whole layers for the stages, and cuts inside layers, where they shorten the step."""
    placement = played.schedule.placement
    if len(placement.routes) > 1 or placement.num_stages > MOST_STAGES:
        return
    before = best = played.period
    bubble = show_percent(played.timeline.bubble_at(before))
    for inside, what in (
        (False, "Other numbers of layers per stage reduce"),
        (True, "Cuts inside layers, between attention and MLP or experts, reduce"),
    ):
        layers = _balanced_layers(played, inside)
        other = answer(replace(played.question, layers=layers))
        after = other.period
        if after > (1 - LEAST_GAIN) * best or not _fits_gpu(other):
            continue
        best, smaller = after, show_percent(other.timeline.bubble_at(after))
        text = f"{what} the step from {show_ms(before)} to {show_ms(after)}, and the bubble from {bubble} to {smaller}."
        yield {"text": text, "fields": {"layers": layers}}


def _balanced_layers(played: Answer, inside: bool) -> str:
    """Returns the layers of each stage that balance the ranks, in steps of a half if cuts may be `inside` layers."""
    assert played.estimate is not None
    parts = played.estimate.parts(inside)
    sizes = [0.0, *[0.5 if inside else 1.0] * (len(parts) - 2), 0.0]  # embedding and head are no layers
    edges = (0, *quick_cuts(parts, played.schedule.placement), len(parts))
    return ", ".join(f"{sum(sizes[first:end]):g}" for first, end in pairwise(edges))


def _fits_gpu(played: Answer) -> bool:
    assert played.estimate is not None
    return max(played.estimate.step(played.schedule).rank_bytes) <= played.estimate.setting.gpu.memory_bytes
