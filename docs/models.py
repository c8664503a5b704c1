"""Write docs/models.md: which language models of Transformers `zb.split` cuts with one device's numbers.

.venv/bin/python docs/models.py            tries the families that the page lacks, and writes the page after each
.venv/bin/python docs/models.py gpt2 t5    tries these anew, and changes their rows
.venv/bin/python docs/models.py --all      tries all anew, for a quarter of an hour
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
"""The most that a family may take."""

INTRODUCTION = """# Which models can be cut

`zb.split(model)` cuts a model that was not written for pipelining; its own code runs on every stage, and nothing of it is rewritten.

    pipe = zb.Pipeline(zb.split(model), "zb-v", num_microbatches=8, loss_fn=loss_fn)
    loss = pipe.step({"input_ids": ids, "attention_mask": mask}, targets)

## Models that do not fit in memory

Give `zb.split` the function that makes the model instead of the model. It runs on every rank, and the parameters of other ranks' stages
are neither drawn nor read: the peak of memory is that of the rank's own. Set the same seed on all ranks for the numbers of one device.

    zb.split(lambda: AutoModelForCausalLM.from_config(config))           # random weights; zb.split(config) is the same
    zb.split(lambda: AutoModelForCausalLM.from_pretrained("llama-3-8b"))  # of its files, a rank reads the weights of its stages

A function may also read its own files, with `load_file` of safetensors or `torch.load(path, mmap=True)`. It runs more than once, and does
the same each time.

## Families of Transformers

The tables have all families of causal language models that Transformers registers. Each was made tiny from its configuration, with random
weights in float64, and went through three stages, one after the other, beside the uncut model. The columns tell the largest relative
difference of the loss and of any gradient, how many parameters several stages hold, which are tied by themselves, and what the family
needed that a chain of layers does not: parts whose output goes further than to the next stage, parameters that code between the parts uses,
parts that are called several times or go by several names, and what its configuration needed to be small. The long tests train one
in four families of the first table in a pipeline of two ranks, with a schedule of two stages or one of two with four, of which one is
planned, and compare loss and gradients; with `ZEROBUBBLE_EXHAUSTIVE=1` they train every family with all three. Only hrm_text, whose layers
run in a loop and so are one part, has two stages each time. `docs/models.py` writes this page.
"""
CUT, NOT_CUT = "| family | loss | gradients | tied | what it needed |\n|---|---|---|---|---|\n", "| family | why |\n|---|---|\n"


def outcomes_in_page() -> dict[str, Outcome]:
    """What the page says, by family."""
    if not PAGE.exists():
        return {}
    cut, _, others = PAGE.read_text(encoding="utf-8").partition("## Not cut")
    rows = re.findall(r"^\| ([\w-]+) \| ([-+\de.]+) \| ([-+\de.]+) \| (\d+) \| (.*?) ?\|$", cut, re.MULTILINE)
    found = {name: Outcome(name, float(loss), float(worst), int(tied), needed) for name, loss, worst, tied, needed in rows}
    return found | {
        name: Outcome(name, error=why) for name, why in re.findall(r"^\| ([\w-]+) \| (.+) \|$", others, re.MULTILINE) if name != "family"
    }


def cut_families() -> list[str]:
    """The families in the page's table of those that are cut."""
    return [outcome.family for outcome in outcomes_in_page().values() if outcome.error is None]


def page(outcomes: list[Outcome]) -> str:
    """The text of the page."""
    exact = [outcome for outcome in outcomes if outcome.error is None]
    rows = [f"| {one.family} | {one.loss:.0e} | {one.gradients:.0e} | {one.tied} | {one.needed} |" for one in exact]
    others = [f"| {one.family} | {one.error} |" for one in outcomes if one.error is not None]
    left = "## Not cut\n\n" + NOT_CUT + "\n".join(others)
    return f"{INTRODUCTION}\n## Cut: {len(exact)} of {len(outcomes)} families\n\n{CUT}" + "\n".join(rows) + f"\n\n{left}\n"


def tried(family: str) -> Outcome:
    """How the family fares, in a process of its own, so that neither its memory nor its crash stays."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(family, theirs))
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


def _tell(family: str, pipe: Connection) -> None:
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
