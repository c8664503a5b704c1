"""docs/step-time.md prints what it shows, and its three step times are ordered as it says."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

from tests.nearest import ROOT

PAGE = (ROOT / "docs/step-time.md").read_text(encoding="utf-8")


def test_the_program_prints_what_is_shown() -> None:
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert printed.getvalue() == shown
    rows = [[float(number) for number in re.findall(r"([\d.]+) ms", row)] for row in shown.splitlines()]
    assert len(rows) == 4
    assert all(period <= span <= makespan for makespan, span, period in rows)
    assert re.findall(r"take (\d+) and (\d+) ms", PAGE) == [tuple(f"{row[0]:g}" for row in rows[2:])]
    assert {f"{row[2]:g}" for row in rows[2:]} == set(re.findall(r"A rank has (\d+) ms of work", PAGE))
