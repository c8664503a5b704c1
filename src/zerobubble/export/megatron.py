"""Megatron's pipeline layout (`--pipeline-model-parallel-layout`): what each stage holds, in one string such as `Et*3|(tt|)*29,m|L`.

Stages stand in the order of the model with `|` between them, the first p on the p ranks, then the next p, round and round. In a stage
E is the embedding, t a transformer layer, m a layer that predicts further tokens, L the loss; `t*3` repeats a letter, `(...)*3` what
is in the brackets, which do not nest, and commas say nothing.

Megatron's newer form shares out the losses, one for each m and the model's own, over several stages at the end, and lets each m stand
in a stage of its own: `E|(t|)*10m|m|m|LL|LL` (Megatron-LM, pull request 5318).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zerobubble.arguments import WHOLE, each, takes
from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Placement

_TIMES = r"\*([1-9][0-9]{0,2})"
_ONE = re.compile(rf"([Etm|L])(?:{_TIMES})?")
_ONES = re.compile(rf"(?:{_ONE.pattern})*")
_GROUP = re.compile(rf"\(((?:{_ONE.pattern})+)\){_TIMES}")


@takes(text=str, num_ranks=WHOLE)
def from_megatron_layout(text: str, num_ranks: int) -> tuple[Placement, tuple[str, ...]]:
    """The placement on `num_ranks` ranks and what each stage holds, spelled out: `("Ettt", "tt", ..., "m", "L")`.

    Raises `ParseError` naming the character for text that is no layout; `InputError` for stages that do not fit the ranks, and for
    what Megatron refuses: E must come first, L last, and m after every t, all of them in one stage of the last round, or in several of
    it where the losses are shared out, too.
    """
    if num_ranks < 1:
        raise InputError(f"a pipeline needs at least 1 rank, got {num_ranks}")
    stages = spelled_stages(text)
    if len(stages) % num_ranks:
        raise InputError(f"a layout has as many stages on each rank, and {len(stages)} stages cannot be shared by {num_ranks} ranks")
    _check(stages)
    if "m" in "".join(stages[:-num_ranks]):
        raise InputError(f"Megatron wants m among the last {num_ranks} stages, one for each rank, got {text!r}")
    rounds = len(stages) // num_ranks
    return Placement.looped(num_ranks, rounds) if rounds > 1 else Placement.linear(num_ranks), stages


def spelled_stages(text: str) -> tuple[str, ...]:
    """What each stage of a layout holds, spelled out; raises `ParseError` for text that is no layout."""
    return tuple("".join(_spelled(text)).split("|"))


def _spelled(text: str) -> Iterator[str]:
    """The layout without repeats and commas, piece by piece."""
    plain, at = text.replace(",", ""), 0
    while at < len(plain):
        match = _ONE.match(plain, at) or _GROUP.match(plain, at)
        if match is None:
            raise _unreadable(text, plain, at)
        *_, count = match.groups()
        body = match[1] if match.re is _ONE else "".join(one[1] * int(one[2] or 1) for one in _ONE.finditer(match[1]))
        yield body * int(count or 1)
        at = match.end()


def _unreadable(text: str, plain: str, at: int) -> ParseError:
    """What stands in the way in `plain`, which is `text` without commas, from `at` on."""
    match = _ONES.match(plain, at + 1) if plain[at] == "(" else None
    stop = match.end() if match else at
    places = [place for place, letter in enumerate(text, 1) if letter != ","]
    where = f"character {places[stop]}, {plain[stop]!r}" if stop < len(plain) else "the end"
    lack = "the brackets are not closed by ')*' and a number" if match else "what is no letter of E, t, m, L, nor | or ("
    return ParseError(f"layout {text!r}: at {where}: {lack}; repeats are 't*3' and '(tt|)*3', up to 999 times")


def _check(stages: Sequence[str]) -> None:
    letters = "".join(stages)
    shared_out = sum("L" in stage for stage in stages) > 1
    rules = {
        "one E, which comes first": letters.count("E") == 1 and letters.startswith("E"),
        "one L, which comes last": shared_out or (letters.count("L") == 1 and letters.endswith("L")),
        "every L behind all else": letters.endswith("L") and "L" not in letters.rstrip("L"),
        "as many L in several stages as m, and one more": not shared_out or letters.count("L") == letters.count("m") + 1,
        "m after every t": "t" not in letters.partition("m")[2],
        "every m in one stage": shared_out or sum("m" in stage for stage in stages) < 2,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise InputError(f"Megatron wants {broken[0]} in a layout, got {'|'.join(stages)!r}")


@takes(stages=each(str))
def to_megatron_layout(stages: Sequence[str]) -> str:
    """The layout string of what the `stages` hold, each spelled in the letters E, t, m and L (`["Ett", "tL"]`): the shortest one whose
    brackets hold whole stages.

    Raises `InputError` for another letter, or for what Megatron refuses.
    """
    wrong = "".join(stages).strip("EtmL")
    if wrong:
        raise InputError(f"a layout spells each stage in the letters E, t, m and L, got {wrong[0]!r}")
    _check(stages)
    units = [_runs(stage) for stage in stages]
    return _shortest([f"{unit}|" for unit in units[:-1]] + units[-1:])


@takes(placement=Placement, num_layers=WHOLE)
def balanced_layers(placement: Placement, num_layers: int) -> tuple[str, ...]:
    """What each stage holds of a model with `num_layers` transformer layers, as even as can be; the spare ones avoid both ends.

    Raises `InputError` for a placement other than linear or looped, the only ones a layout can express, or no layer.
    """
    stages, ranks = placement.num_stages, placement.num_ranks
    if placement.routes != Placement.looped(ranks, max(1, stages // ranks)).routes:
        raise InputError(f"Megatron's layout goes round and round the ranks, a {placement.name} placement cannot be written in it")
    return even_stages(stages, num_layers)


def even_stages(num_stages: int, num_layers: int) -> tuple[str, ...]:
    """As `balanced_layers`, for so many stages wherever they lie."""
    if num_layers < 1:
        raise InputError(f"a layout needs at least 1 transformer layer, got {num_layers}")
    each, spare = divmod(num_layers, num_stages)
    first = 1 if spare < num_stages - 1 else 0
    layers = ["t" * (each + (first <= stage < first + spare)) for stage in range(num_stages)]
    layers[0] = f"E{layers[0]}"
    layers[-1] += "L"
    return tuple(layers)


def _runs(stage: str) -> str:
    """A stage with three of a letter or more written as a repeat."""
    runs = [match[0] for match in re.finditer(r"(.)\1*", stage)]
    return _joined([run if len(run) < 3 else f"{run[0]}*{len(run)}" for run in runs])


def _joined(parts: Sequence[str]) -> str:
    """The parts one after the other, with a comma where a letter follows a number."""
    text = ""
    for part in parts:
        text += "," * (text[-1:].isdigit() and part[:1].isalpha()) + part
    return text


def _shortest(units: Sequence[str]) -> str:
    """The units one after the other in as few characters as repeats allow, the plainer of equals."""
    best = [""] * (len(units) + 1)
    for at in reversed(range(len(units))):
        best[at] = min((_joined([text, best[end]]) for text, end in _beginnings(units, at)), key=len)
    return best[0]


def _beginnings(units: Sequence[str], at: int) -> Iterator[tuple[str, int]]:
    """Ways to write the units from `at` on, each with where it ends: one as it is, or several repeated."""
    yield units[at], at + 1
    for period in range(1, (len(units) - at) // 2 + 1):
        body, count = units[at : at + period], 1
        while units[at + count * period : at + (count + 1) * period] == body:
            count += 1
            yield f"({''.join(body)})*{count}", at + count * period
