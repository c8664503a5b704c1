"""The picture of docs/vocabulary.md: the schedules and costs of its first program, with the head whole and divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerobubble import Costs, Schedule, make, simulate
from zerobubble.export import timeline_svg
from zerobubble.schedules import with_vocabulary

VOCABULARY = Path(__file__).parents[1] / "vocabulary.svg"
WHOLE = Costs.from_ms([10, 10, 10, 20], [10, 10, 10, 20], [10, 10, 10, 20])
DIVIDED = Costs.uniform(4, times=(10, 10, 10)).with_divided_head((2.5, 2.5, 2.5), held=50_000, collective=0.2)


def schedules() -> tuple[Schedule, Schedule]:
    """1F1B, and with a divided head."""
    plain = make("1f1b", 4, 8)
    return plain, with_vocabulary(plain)


def vocabulary_picture() -> str:
    """The picture."""
    plain, divided = schedules()
    timelines = (
        simulate(replace(plain, name="head on the last stage"), WHOLE),
        simulate(replace(divided, name="head divided over 4 ranks"), DIVIDED),
    )
    return timeline_svg(*timelines, title="A head as heavy as a stage")
