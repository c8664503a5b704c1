"""Write docs/other_models.md: which models beside causal language models `zb.split` cuts with one device's numbers.

.venv/bin/python docs/other_models.py            tries the models that the page does not name, and writes the page after each
.venv/bin/python docs/other_models.py t5 swin    tries these anew, and changes their rows
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.families import Outcome
from tests.other_families import FAMILIES, outcome_of

PAGE = Path(__file__).with_suffix(".md")

INTRODUCTION = """# Which models beside language models can be cut

`zb.split(model, example=...)` cuts any model that has its parts in lists or as modules of its own; its own code runs on every stage.

    model = torchvision.models.resnet50()
    pipe = zb.Pipeline(zb.split(model, example=images[:2]), "1f1b", num_microbatches=8, loss_fn=nn.functional.cross_entropy)
    loss = pipe.step(images, labels)

Each model of the tables was made tiny, with random weights in float64, and went through three stages, one after the other, beside the uncut
model. The columns tell the largest relative difference of a loss in which every number of the output counts, that of any gradient, and
how many parameters several stages hold, which are tied by themselves. The long tests train one
in four of them in a pipeline of two ranks for two steps, on 1F1B or ZB-V, and with `ZEROBUBBLE_EXHAUSTIVE=1` all. `docs/other_models.py`
writes this page; a model that it does not name has not been tried.

- **Encoders beside decoders.** What an encoder gives crosses every boundary up to the last block that uses it. T5's position bias, which
  its first block makes for all, does so, too, and its gradient comes back.
- **Frozen encoders** (`requires_grad_(False)`) have forwards alone where their stages have no more than them: no gradient is computed or
  sent there, and `zb.split(model).layers()` has 0 for B and W below the first part that trains.
- **Images in front of text.** The samples of all arguments are cut into microbatches along their first dimension. Where patches of images
  lie in rows (`pixel_values` of Qwen's models), give `step` a list of the microbatches instead.
- **Dropout, stochastic depth and the noise of routers** are random. Parts draw from the stream of their stage, and code around the
  parts from a seed that all stages share, so a step is like one on one device with another seed.
- **Statistics of the batch** (`BatchNorm`) are those of each microbatch, and running statistics those of one device that takes the same
  microbatches one after the other.
"""


def key(group: str, name: str) -> str:
    """A model's name in the page; several libraries have a resnet18."""
    return f"{group}: {name}"


def outcomes_in_page() -> dict[str, Outcome]:
    """What the page says."""
    found: dict[str, Outcome] = {}
    group = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []:
        title, row = re.fullmatch(r"## (.*)", line), re.fullmatch(r"\| ([\w-]+) \| ([-+\de.]+) \| ([-+\de.]+) \| (\d+) \|", line)
        refused = re.fullmatch(r"\| ([\w-]+) \| ([a-z].*: .*) \|", line)
        if title:
            group = title[1]
        elif row:
            found[key(group, row[1])] = Outcome(row[1], float(row[2]), float(row[3]), int(row[4]))
        elif refused:
            found[key(group, refused[1])] = Outcome(refused[1], error=refused[2])
    return found


def cut_models() -> list[tuple[str, str]]:
    """Group and name of each model in the page that is cut."""
    told = outcomes_in_page()
    names = [(group, name) for group, models in FAMILIES.items() for name in models]
    return [(group, name) for group, name in names if key(group, name) in told and told[key(group, name)].error is None]


def page(outcomes: dict[str, Outcome]) -> str:
    """The text of the page."""
    text = INTRODUCTION
    for group, models in FAMILIES.items():
        told = [outcomes[key(group, name)] for name in models if key(group, name) in outcomes]
        rows = [f"| {one.family} | {one.loss:.0e} | {one.gradients:.0e} | {one.tied} |" for one in told if one.error is None]
        others = [f"| {one.family} | {one.error} |" for one in told if one.error is not None]
        text += f"\n## {group}\n\n| model | loss | gradients | tied |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        if others:
            text += "\nNot cut:\n\n| model | why |\n|---|---|\n" + "\n".join(others) + "\n"
    return text


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = outcomes_in_page()
    for group, models in FAMILIES.items():
        for name in models:
            if name in sys.argv[1:] or (len(sys.argv) == 1 and key(group, name) not in found):
                found[key(group, name)] = outcome_of(group, name)
                sys.stderr.write(f"{group}: {found[key(group, name)]}\n")
                PAGE.write_text(page(found), encoding="utf-8")
