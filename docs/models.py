"""Write docs/models.md: the language models of Transformers that `zb.split` splits with one device's numbers.

.venv/bin/python docs/models.py            tests the families that the page lacks, and writes the page after each
.venv/bin/python docs/models.py gpt2 t5    tests these and updates their rows
.venv/bin/python docs/models.py --all      tests all families, for a quarter of an hour
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.families import Outcome, families, outcome_of

PAGE = Path(__file__).with_suffix(".md")
SECONDS = 300
"""Time limit of a family."""

INTRODUCTION = """# Supported language models

The language models that [`zb.split`](any-model.md) splits, with the differences from one device.

## How the models are tested

The tables list all families of causal language models that Transformers registers. Each model is tiny, with random weights in float64. Its
three stages run in sequence and are compared with the unsplit model. The columns:

- **loss**, **gradients**: the relative difference of the loss, and the largest relative difference of any gradient.
- **tied**: parameters that several stages hold. They are tied automatically.
- **needs**: what a plain chain of layers does not need. "also passed on" names outputs that stages beyond the next one use. "parameters
  outside the parts" are used by code between the parts. "made with" has settings of the tiny model. Parts may also return several tensors,
  be called several times, have several names, or change a tensor in place afterwards.

The long tests train one in four supported families in a pipeline of two ranks, and compare loss and gradients with one device. The schedule
is 1F1B with two stages, or ZB-V or a planned one with four. `ZEROBUBBLE_EXHAUSTIVE=1` trains every family with all three. hrm_text always
has two stages, because its layers run in a loop and so are one part. `docs/models.py` writes this page.
"""
CUT, NOT_CUT = "| family | loss | gradients | tied | needs |\n|---|---|---|---|---|\n", "| family | why |\n|---|---|\n"


def outcomes_in_page() -> dict[str, Outcome]:
    """Reads the outcomes from the page, by family."""
    if not PAGE.exists():
        return {}
    cut, _, others = PAGE.read_text(encoding="utf-8").partition("## Not supported")
    rows = re.findall(r"^\| ([\w-]+) \| ([-+\de.]+) \| ([-+\de.]+) \| (\d+) \| (.*?) ?\|$", cut, re.MULTILINE)
    found = {name: Outcome(name, float(loss), float(worst), int(tied), needed) for name, loss, worst, tied, needed in rows}
    return found | {
        name: Outcome(name, error=why) for name, why in re.findall(r"^\| ([\w-]+) \| (.+) \|$", others, re.MULTILINE) if name != "family"
    }


def cut_families() -> list[str]:
    """The families that the page lists as supported."""
    return [outcome.family for outcome in outcomes_in_page().values() if outcome.error is None]


def page(outcomes: list[Outcome]) -> str:
    """The text of the page."""
    exact = [outcome for outcome in outcomes if outcome.error is None]
    rows = [f"| {one.family} | {one.loss:.0e} | {one.gradients:.0e} | {one.tied} | {one.needed} |" for one in exact]
    others = [f"| {one.family} | {one.error} |" for one in outcomes if one.error is not None]
    left = "## Not supported\n\n" + NOT_CUT + "\n".join(others)
    return f"{INTRODUCTION}\n## Supported: {len(exact)} of {len(outcomes)} families\n\n{CUT}" + "\n".join(rows) + f"\n\n{left}\n"


def tried(family: str) -> Outcome:
    """Tests a family in a separate process, so that its memory is freed and a crash does not end this one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(family, theirs))
    process.start()
    theirs.close()
    try:
        return Outcome(*ours.recv()) if ours.poll(SECONDS) else Outcome(family, error=f"not tried: it took more than {SECONDS} s")
    except EOFError:
        process.join()
        return Outcome(family, error=f"fails: its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(family: str, pipe: Connection) -> None:
    pipe.send(tuple(outcome_of(family)))


if __name__ == "__main__":
    found = outcomes_in_page()
    names = families()
    left = [name for name in names if "--all" in sys.argv or name not in found]
    wanted = [name for name in sys.argv[1:] if name != "--all"] or left
    torch.set_num_threads(1)  # threads do not live in forked processes
    outcome_of("llama")  # loads what all of them need, once
    for family in wanted:
        found[family] = tried(family)
        sys.stderr.write(f"{found[family]}\n")
        PAGE.write_text(page([found[name] for name in names if name in found]), encoding="utf-8")
