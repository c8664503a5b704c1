"""Megatron's pipeline layout (`--pipeline-model-parallel-layout`): the contents of each stage, as a string such as `Et*3|(tt|)*29,m|L`.

Stages are in model order, separated by `|`, and placed on the ranks in a loop. In a stage, E is the embedding, t a transformer layer, m a
layer for multi-token prediction, and L the loss. `t*3` repeats a letter, `(...)*3` repeats a group, groups do not nest, and commas have no
meaning.

In Megatron's newer form, the losses (one for each m and that of the model) are divided over several final stages, and each m may be a
stage of its own: `E|(t|)*10m|m|m|LL|LL` (Megatron-LM, pull request 5318).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zerobubble.arguments import WHOLE, each, takes, wrong
from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Placement

_TIMES = r"\*([1-9][0-9]{0,2})"
_ONE = re.compile(rf"([Etm|L])(?:{_TIMES})?")
_ONES = re.compile(rf"(?:{_ONE.pattern})*")
_GROUP = re.compile(rf"\(((?:{_ONE.pattern})+)\){_TIMES}")


@takes(text=str, num_ranks=WHOLE)
def from_megatron_layout(text: str, num_ranks: int) -> tuple[Placement, tuple[str, ...]]:
    """Return the placement on `num_ranks` ranks and the contents of each stage, such as `("Ettt", "tt", ..., "m", "L")`.

    `text` is the layout, as Megatron's `--pipeline-model-parallel-layout` takes it.
    Raises `ParseError` naming the character for text that is not a layout, and `InputError` for stages that do not match the ranks and for
    layouts that Megatron refuses: E must come first, L last, and m after every t. All m must be in one stage of the last round, or in
    several if the losses are divided too.
    """
    if num_ranks < 1:
        raise wrong("num_ranks", num_ranks, "at least 1")
    stages = spelled_stages(text)
    if len(stages) % num_ranks:
        message = "a layout needs equally many stages per rank, but {num_ranks} ranks cannot share {num_stages} stages equally"
        raise InputError(message, num_ranks=num_ranks, num_stages=len(stages))
    _check(stages)
    if "m" in "".join(stages[:-num_ranks]):
        raise InputError(
            "Megatron requires every m in the last {num_ranks} stages, one per rank, got {text!r}", num_ranks=num_ranks, text=text
        )
    rounds = len(stages) // num_ranks
    return Placement.looped(num_ranks, rounds) if rounds > 1 else Placement.linear(num_ranks), stages


def spelled_stages(text: str) -> tuple[str, ...]:
    """Return the contents of each stage of a layout, spelled out; raises `ParseError` for text that is not a layout."""
    return tuple("".join(_spelled(text)).split("|"))


def _spelled(text: str) -> Iterator[str]:
    """Yield the layout without repeats and commas, piece by piece."""
    plain, at = text.replace(",", ""), 0
    while at < len(plain):
        match = _ONE.match(plain, at) or _GROUP.match(plain, at)
        if match is None:
            raise _unreadable(text, plain, at)
        *_, count = match.groups()
        body = match[1] if match.re is _ONE else "".join(item[1] * int(item[2] or 1) for item in _ONE.finditer(match[1]))
        yield body * int(count or 1)
        at = match.end()


def _unreadable(text: str, plain: str, at: int) -> ParseError:
    """Return the error for `plain`, which is `text` without commas, from position `at` on."""
    match = _ONES.match(plain, at + 1) if plain[at] == "(" else None
    stop = match.end() if match else at
    places = [place for place, letter in enumerate(text, 1) if letter != ","]
    where = f"character {places[stop]}, {plain[stop]!r}" if stop < len(plain) else "the end"
    lack = "the brackets are not closed by ')*' and a number" if match else "what is no letter of E, t, m, L, nor | or ("
    return ParseError(
        "layout {text!r}: at {where}: {lack}; repeats are 't*3' and '(tt|)*3', up to 999 times", text=text, where=where, lack=lack
    )


def _check(stages: Sequence[str]) -> None:
    letters = "".join(stages)
    divided_loss = sum("L" in stage for stage in stages) > 1
    rules = {
        "one E, which comes first": letters.count("E") == 1 and letters.startswith("E"),
        "one L, which comes last": divided_loss or (letters.count("L") == 1 and letters.endswith("L")),
        "every L after all other letters": letters.endswith("L") and "L" not in letters.rstrip("L"),
        "one L more than m if several stages have L": not divided_loss or letters.count("L") == letters.count("m") + 1,
        "m after every t": "t" not in letters.partition("m")[2],
        "every m in one stage": divided_loss or sum("m" in stage for stage in stages) < 2,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise InputError("Megatron requires {broken} in a layout, got {stages!r}", broken=broken[0], stages="|".join(stages))


@takes(stages=each(str))
def to_megatron_layout(stages: Sequence[str]) -> str:
    """Return the shortest layout string for `stages`, each given by the letters E, t, m and L (`["Ett", "tL"]`).

    Groups contain whole stages. Raises `InputError` for another letter, and for layouts that Megatron refuses.
    """
    unknown = "".join(stages).strip("EtmL")
    if unknown:
        raise wrong("each letter of a stage", unknown[0], "E, t, m or L")
    _check(stages)
    units = [_runs(stage) for stage in stages]
    return _shortest([f"{unit}|" for unit in units[:-1]] + units[-1:])


@takes(placement=Placement, num_layers=WHOLE)
def balanced_layers(placement: Placement, num_layers: int) -> tuple[str, ...]:
    """Return the contents of each stage of `placement` for `num_layers` transformer layers, divided evenly; spare layers avoid both ends.

    Raises `InputError` for less than 1 layer, and for a placement other than linear or looped, which a layout cannot express.
    """
    stages, ranks = placement.num_stages, placement.num_ranks
    if placement.routes != Placement.looped(ranks, max(1, stages // ranks)).routes:
        remedy = "plan with --placement linear,looped-2 (placements= in Python)"
        raise InputError("Megatron's layout needs a linear or looped placement, got {got}", got=placement.name, remedy=remedy)
    return even_stages(stages, num_layers)


def even_stages(num_stages: int, num_layers: int) -> tuple[str, ...]:
    """Return the contents of `num_stages` stages as `balanced_layers` does, for any placement."""
    if num_layers < 1:
        raise wrong("the number of transformer layers", num_layers, "at least 1")
    per_stage, spare = divmod(num_layers, num_stages)
    first = 1 if spare < num_stages - 1 else 0
    layers = ["t" * (per_stage + (first <= stage < first + spare)) for stage in range(num_stages)]
    layers[0] = f"E{layers[0]}"
    layers[-1] += "L"
    return tuple(layers)


def _runs(stage: str) -> str:
    """Return a stage with three or more equal letters written as a repeat."""
    runs = [match[0] for match in re.finditer(r"(.)\1*", stage)]
    return _joined([run if len(run) < 3 else f"{run[0]}*{len(run)}" for run in runs])


def _joined(parts: Sequence[str]) -> str:
    """Join parts, with a comma where a letter follows a number."""
    text = ""
    for part in parts:
        text += "," * (text[-1:].isdigit() and part[:1].isalpha()) + part
    return text


def _shortest(units: Sequence[str]) -> str:
    """Join units in as few characters as repeats allow, preferring fewer repeats among equals (dynamic programming from the end)."""
    best = [""] * (len(units) + 1)
    for at in reversed(range(len(units))):
        best[at] = min((_joined([text, best[end]]) for text, end in _beginnings(units, at)), key=len)
    return best[0]


def _beginnings(units: Sequence[str], at: int) -> Iterator[tuple[str, int]]:
    """Yield the ways to begin the units from `at` on, each with its end: one unit, or a repeated group."""
    yield units[at], at + 1
    for period in range(1, (len(units) - at) // 2 + 1):
        body, count = units[at : at + period], 1
        while units[at + count * period : at + (count + 1) * period] == body:
            count += 1
            yield f"({''.join(body)})*{count}", at + count * period
