"""Compares terms that all ranks must share, such as versions, and describes differences in words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from zerobubble.version import __version__

Terms = Mapping[str, str]
"""The compared values by their names. A digest after ` #` distinguishes values with the same text. A `note` is shown but not compared."""
_NOTE = "\n"

RankTerms = tuple[str, Terms]
"""What one rank contributes: its own fault, empty if it has none, and its terms."""


def note(text: str) -> str:
    """Returns what to append to a value so that `text` follows it in messages; nothing for an empty text."""
    return text and f"{_NOTE}{text}"


def without_note(value: str) -> str:
    """Returns the compared part of a value."""
    return value.partition(_NOTE)[0]


def faults_of(ranks: Sequence[RankTerms]) -> str:
    """Returns all faults of any rank and all differences between ranks; empty if there are none."""
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(ranks) if fault]
    return "; ".join(faults + _disagreements([terms for _, terms in ranks]))


def _disagreements(ranks: Sequence[Terms]) -> list[str]:
    """Returns the differences between the ranks' terms. A term that only some ranks have is compared among these."""
    faults = []
    for what in dict.fromkeys(name for terms in ranks for name in terms):
        found = {rank: terms[what] for rank, terms in enumerate(ranks) if what in terms}
        compared = {rank: without_note(value) for rank, value in found.items()}
        if len(set(compared.values())) > 1:
            shown = {rank: value.split(" #")[0] for rank, value in compared.items()}
            if len(set(shown.values())) == 1:
                shown = compared
            notes = {rank: value.partition(_NOTE)[2] for rank, value in found.items()}
            listed = ", ".join(f"rank {rank} has {value}{notes[rank] and f' ({notes[rank]})'}" for rank, value in shown.items())
            faults.append(f"ranks disagree on the {what}: {listed}")
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
