"""What a stage says about its split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitReport:
    """How a stage's backward pass is split: `way` is deferred, graph, compiled or whole; `share` is the part of the weight-gradient FLOPs that W does; `at_once` says for each parameter computed in B why."""  # noqa: E501

    stage: int
    way: str
    share: float | None
    at_once: tuple[str, ...]
