"""Compares terms that all ranks must share, such as versions, and describes differences."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from zerobubble.version import __version__

Terms = Mapping[str, str]
"""The compared values by their names. A digest after ` #` distinguishes values with the same text. A `note` is shown but not compared."""
_NOTE = "\n"

RankTerms = tuple[str, Terms]
"""The contribution of one rank: its own fault (empty if none) and its terms."""


def note(text: str) -> str:
    """Returns what to append to a value so that `text` follows it in messages; nothing for an empty text."""
    return text and f"{_NOTE}{text}"


def without_note(value: str) -> str:
    """Returns the compared part of a value."""
    return value.partition(_NOTE)[0]


def faults_of(ranks: Mapping[int, RankTerms]) -> str:
    """Returns all faults of any rank and all differences between ranks; empty if there are none."""
    faults = by_rank(ranks, [fault for fault, _ in ranks.values()])
    return "; ".join(faults + _disagreements({rank: terms for rank, (_, terms) in ranks.items()}))


def by_rank(ranks: Collection[int], faults: Iterable[str]) -> list[str]:
    """Returns the faults of `ranks`, which are all, each once with the ranks that have it. The text of a rank without a fault is empty.

    >>> by_rank(range(2), ["no loss", "no loss"]), by_rank(range(5), ["no loss", "", "no loss", "no loss", "late"])
    (['all ranks: no loss'], ['ranks 0, 2-3: no loss', 'rank 4: late'])
    """
    grouped = _ranks_by_value(ranks, faults)
    return [f"{'all ranks' if 1 < len(ranks) == len(some) else named(some)}: {fault}" for fault, some in grouped.items() if fault]


def each_has(ranks: Iterable[int], values: Iterable[str], singular: str = "has", plural: str = "have") -> str:
    """Returns which of these ranks have which value, with the verb in `singular` or `plural`.

    >>> each_has(range(3), ["0.1", "0.1", "0.2"])
    'ranks 0-1 have 0.1, rank 2 has 0.2'
    """
    grouped = _ranks_by_value(ranks, values)
    return ", ".join(f"{named(some)} {singular if len(some) == 1 else plural} {value}" for value, some in grouped.items())


def _ranks_by_value(ranks: Iterable[int], values: Iterable[str]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        grouped.setdefault(value, []).append(rank)
    return grouped


def named(ranks: Sequence[int]) -> str:
    """Returns `rank 3` or `ranks 0-2, 5`, for ascending ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, span)) for span in spans)}"


def _disagreements(ranks: Mapping[int, Terms]) -> list[str]:
    """Returns the differences between the ranks' terms. A term that only some ranks have is compared among these."""
    faults = []
    for what in dict.fromkeys(name for terms in ranks.values() for name in terms):
        present = {rank: terms[what] for rank, terms in ranks.items() if what in terms}
        compared = {rank: without_note(value) for rank, value in present.items()}
        if len(set(compared.values())) > 1:
            shown = {rank: value.split(" #")[0] for rank, value in compared.items()}
            if len(set(shown.values())) == 1:
                shown = compared
            notes = {rank: value.partition(_NOTE)[2] for rank, value in present.items()}
            noted = [f"{value}{notes[rank] and f' ({notes[rank]})'}" for rank, value in shown.items()]
            faults.append(f"ranks disagree on the {what}: {each_has(present, noted)}")
    return faults


@cache
def versions() -> Terms:
    """Returns the versions of zerobubble and torch: different versions may use different messages."""
    return {"version of zerobubble": f"{__version__} #{_digest_of_sources()}", "version of torch": torch.__version__.split("+")[0]}


def _digest_of_sources() -> str:
    """Returns digits that differ between revisions of one version."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]
