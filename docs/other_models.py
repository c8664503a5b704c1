"""Write docs/other_models.md: models other than causal language models that `zb.split` splits with one device's numbers.

.venv/bin/python docs/other_models.py            tests the models that the page lacks, and writes the page after each
.venv/bin/python docs/other_models.py t5 swin    tests these and updates their rows
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

INTRODUCTION = """# Other supported models

`zb.split(model, example=...)` splits any model whose parts are in lists or are separate modules. Every stage runs the model's own code.

    model = torchvision.models.resnet50()
    pipe = zb.Pipeline(zb.split(model, example=images[:2]), "1f1b", num_microbatches=8, loss_fn=nn.functional.cross_entropy)
    loss = pipe.step(images, labels)

- **Encoder-decoder models.** The encoder's output crosses every boundary up to the last block that uses it. T5's position bias,
  which its first block computes for all blocks, crosses them in the same way, and its gradient returns.
- **Frozen encoders** (`requires_grad_(False)`). A stage that contains nothing else only runs forwards: it computes and sends no gradients.
  `zb.split(model).layers()` has 0 for B and W below the first trainable part.
- **Images and text.** All arguments are split into microbatches along their first dimension, or the one that `batch_dims`
  [names](batches.md#arguments-without-a-batch), such as 1 for the position ids of Qwen's models. If image patches are rows (`pixel_values`
  of Qwen's models), give `step` a list of the microbatches.
- **Dropout, stochastic depth and router noise** are random. Parts draw from the stream of their stage, and code around the parts uses a
  seed that all stages share. So a step has the numbers of one device with a different seed.
- **Batch statistics** (`BatchNorm`) are those of each microbatch. Running statistics are those of one device that takes the same
  microbatches in sequence.

## How the models are tested

Each model is tiny, with random weights in float64. Its three stages run in sequence and are compared with the unsplit model. The columns:

- **loss**, **gradients**: the relative difference of a loss over all outputs, and the largest relative difference of any gradient.
- **tied**: parameters that several stages hold. They are tied automatically.

The long tests train one in four of the models for two steps in a pipeline of two ranks, with 1F1B or ZB-V. `ZEROBUBBLE_EXHAUSTIVE=1` trains
all. Models that are not listed have not been tested. `docs/other_models.py` writes this page.
"""


def key(group: str, name: str) -> str:
    """The key of a model. It includes the group, because several libraries have a resnet18."""
    return f"{group}: {name}"


def outcomes_in_page() -> dict[str, Outcome]:
    """Reads the outcomes from the page."""
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
    """Group and name of each model that the page lists as supported."""
    found = outcomes_in_page()
    names = [(group, name) for group, models in FAMILIES.items() for name in models]
    return [(group, name) for group, name in names if key(group, name) in found and found[key(group, name)].error is None]


def page(outcomes: dict[str, Outcome]) -> str:
    """The text of the page."""
    text = INTRODUCTION
    for group, models in FAMILIES.items():
        tested = [outcomes[key(group, name)] for name in models if key(group, name) in outcomes]
        rows = [f"| {one.family} | {one.loss:.0e} | {one.gradients:.0e} | {one.tied} |" for one in tested if one.error is None]
        others = [f"| {one.family} | {one.error} |" for one in tested if one.error is not None]
        text += f"\n## {group}\n\n| model | loss | gradients | tied |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        if others:
            text += "\nNot supported:\n\n| model | why |\n|---|---|\n" + "\n".join(others) + "\n"
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
