"""The playground: schedules of many shapes, answered beforehand as the explorer would, in one page that needs no server.

`python -m zerobubble.explorer.playground FILE` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobubble.explorer.answer import answer, answer_to_dict
from zerobubble.explorer.page import PACKAGES
from zerobubble.explorer.question import FieldError, Question
from zerobubble.schedules import known_schedules
from zerobubble.view.assets import asset, script, shell

SHAPES = tuple((ranks, times * ranks) for ranks in (2, 4, 8) for times in (1, 2, 4))
"""The ranks and microbatches that the page has."""


def playground_html(schedules: Sequence[str] = (), shapes: Sequence[tuple[int, int]] = SHAPES) -> str:
    """The page with each of the `schedules`, all published ones if none are named, in each shape, ranks and microbatches."""
    names = list(schedules) or list(known_schedules())
    data = {
        "schedules": [{"name": name, "summary": known_schedules()[name].summary} for name in names],
        "shapes": [list(shape) for shape in shapes],
        "times": list(Question().times),
        "comm": Question().comm,
        "answers": {f"{name} {ranks} {count}": _answer(name, ranks, count) for name in names for ranks, count in shapes},
    }
    body = '<header><h1>Pipeline schedules to play with</h1></header>\n<div id="playground"></div>\n'
    style = asset("page.css") + asset("explore.css", PACKAGES)
    return shell("zerobubble playground", body, style, script("playground.js", PACKAGES), settings=data)


def _answer(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """The explorer's answer, or a sentence that says why there is no such schedule."""
    try:
        answered = answer_to_dict(answer(Question(schedule=name, ranks=ranks, microbatches=microbatches)))
    except FieldError as error:
        return {"error": str(error)}
    return {key: answered[key] for key in ("data", "figures", "notes")}


def main() -> None:
    """Write the page to the file that is named."""
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(playground_html(), encoding="utf-8")


if __name__ == "__main__":
    main()
