"""Write docs/models.md: which language models of Transformers `zb.split` cuts with one device's numbers. It runs each, for half an hour.

.venv/bin/python docs/models.py            (all families; with names of some, their tables are printed and the page stays)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.families import Outcome, families, outcome_of

PAGE = Path(__file__).with_suffix(".md")

INTRODUCTION = """# Which models can be cut

`zb.split(model)` cuts a model that was not written for pipelining; its own code runs on every stage, and nothing of it is rewritten.

    pipe = zb.Pipeline(zb.split(model), "zb-v", num_microbatches=8, loss_fn=loss_fn)
    loss = pipe.step({"input_ids": ids, "attention_mask": mask}, targets)

The tables have families of causal language models that Transformers registers. Each was made tiny from its configuration, with random
weights in float64, and went through three stages, one after the other, beside the uncut model. The columns tell the largest relative
difference of the loss and of any gradient, and how many parameters several stages hold, which are tied by themselves. `docs/models.py`
writes this page; a family that it does not name has not been tried.
"""


def cut_families() -> list[str]:
    """The families in the page's table of those that are cut."""
    if not PAGE.exists():
        return []
    told = PAGE.read_text(encoding="utf-8").partition("## Not cut")[0]
    return re.findall(r"^\| ([\w-]+) \| \d", told, re.MULTILINE)


def page(outcomes: list[Outcome]) -> str:
    """The text of the page."""
    exact = [outcome for outcome in outcomes if outcome.error is None]
    rows = [f"| {one.family} | {one.loss:.0e} | {one.gradients:.0e} | {one.tied} |" for one in exact]
    others = [f"| {one.family} | {one.error} |" for one in outcomes if one.error is not None]
    told = "| family | loss | gradients | tied |\n|---|---|---|---|\n" + "\n".join(rows)
    left = "## Not cut\n\n| family | why |\n|---|---|\n" + "\n".join(others)
    return f"{INTRODUCTION}\n## Cut: {len(exact)} families\n\n{told}\n\n{left}\n"


if __name__ == "__main__":
    found = []
    for family in sys.argv[1:] or families():
        found.append(outcome_of(family))
        sys.stderr.write(f"{found[-1]}\n")
    if sys.argv[1:]:
        sys.stdout.write(page(found))
    else:
        PAGE.write_text(page(found), encoding="utf-8")
