"""The explorer's page: one HTML document with all its scripts and styles, which asks the server that it came from."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from zerobubble.blocks import KNOWN
from zerobubble.cost_model import GPUS, MODELS
from zerobubble.cost_model.setting import GRADIENT_BYTES, RECOMPUTE
from zerobubble.explorer.forms import FORMS
from zerobubble.explorer.question import MOST_TEXT, RANGES, Question
from zerobubble.explorer.workshop import BLOCK_FORMS, BlockQuestion
from zerobubble.schedules import known_schedules
from zerobubble.view.assets import asset, script, shell

PACKAGES = ("zerobubble.explorer", "zerobubble.view")
"""Where the page's modules and styles are."""

PRESETS = (
    ("Zero Bubble, 1.5B", 8, 24, (18.522, 18.086, 9.337), 0.601),
    ("Zero Bubble, 6.2B", 8, 24, (29.718, 29.444, 19.927), 0.527),
    ("Zero Bubble, 14.6B", 16, 48, (11.347, 11.248, 8.132), 0.377),
    ("Zero Bubble, 28.3B", 32, 96, (10.419, 10.207, 7.715), 0.408),
)
"""Ranks, microbatches, times of a rank and of a message in ms, as measured in arXiv 2401.10241, tables 5 and 9."""


@cache
def explorer_html() -> str:
    """The page."""
    body = (
        '<header><h1>Explore pipeline schedules</h1></header>\n<div id="tabs"></div>\n'
        '<div id="explorer"></div>\n<div id="workshop" hidden></div>\n'
    )
    style = asset("page.css") + asset("explore.css", PACKAGES)
    return shell("zerobubble explore", body, style, script("explore.js", PACKAGES), settings=_settings())


def _settings() -> dict[str, Any]:
    """Returns the data from which the page makes its fields."""
    return {
        "defaults": _defaults(Question()),
        "opening": {"versus": "1f1b"},  # the first screen shows what a split backward pass gains
        "ranges": {name: list(range_) for name, range_ in RANGES.items()},
        "schedules": [
            {"name": name, "stages": recipe.stages_per_rank, "anyStages": recipe.any_stages, "options": list(recipe.options)}
            | {"summary": recipe.summary, "goodFor": recipe.good_for, "condition": recipe.condition, "source": recipe.source}
            for name, recipe in known_schedules().items()
        ],
        "presets": [
            {"name": name, "ranks": ranks, "microbatches": microbatches, "times": times, "comm": comm}
            for name, ranks, microbatches, times, comm in PRESETS
        ],
        "choices": {
            "model": list(MODELS),
            "gpu": list(GPUS),
            "recompute": list(RECOMPUTE),
            "gradients": list(GRADIENT_BYTES),
            "precision": sorted({precision for gpu in GPUS.values() for precision, _ in gpu.flops}),
        },
        "blocks": list(KNOWN),
        "blockDefaults": _defaults(BlockQuestion()),
        "blockForms": [{"name": name, "label": form.label} for name, form in BLOCK_FORMS.items()],
        "forms": [{"name": name, "label": form.label} for name, form in FORMS.items()],
        "mostText": MOST_TEXT,
    }


def _defaults(question: Question | BlockQuestion) -> dict[str, str]:
    """The initial texts of the fields; optional fields are empty."""
    values = {field.name: getattr(question, field.name) for field in fields(question)}
    return {name: "" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
