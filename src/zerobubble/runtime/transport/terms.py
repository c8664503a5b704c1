"""What all ranks must have alike, in words, and how a difference is told; first of all the versions of what they run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Terms = Mapping[str, str]
"""What is compared, by what it is called. Behind ` #` stand digits that tell apart what reads the same."""

Told = tuple[str, Terms]
"""What one rank tells the others: its own fault, empty where it has none, and its terms."""


def faults_of(told: Sequence[Told]) -> str:
    """All that is wrong on any rank or differs between them; empty where nothing is."""
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(told) if fault]
    return "; ".join(faults + _disagreements([terms for _, terms in told]))


def _disagreements(told: Sequence[Terms]) -> list[str]:
    """Where the terms that the ranks have told differ; what is told by some ranks only is compared among these."""
    faults = []
    for what in dict.fromkeys(name for terms in told for name in terms):
        found = {rank: terms[what] for rank, terms in enumerate(told) if what in terms}
        if len(set(found.values())) > 1:
            shown = {rank: value.split(" #")[0] for rank, value in found.items()}
            if len(set(shown.values())) > 1:
                found = shown
            listed = ", ".join(f"rank {rank} has {value}" for rank, value in found.items())
            faults.append(f"ranks disagree on the {what}: {listed}")
    return faults


@cache
def versions() -> Terms:
    """The versions of zerobubble and torch: other versions may say other things to each other, in other words."""
    return {"version of zerobubble": f"{_version()} #{_digest_of_sources()}", "version of torch": torch.__version__.split("+")[0]}


def _version() -> str:
    try:
        return version("zerobubble")
    except PackageNotFoundError:  # run from its sources
        return "in development"


def _digest_of_sources() -> str:
    """Digits that differ between revisions of one version."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]
