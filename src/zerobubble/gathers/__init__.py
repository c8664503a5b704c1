"""Weights that lie in shards: `residency` says when each rank gathers those of a stage and lets them go, by `caching`; `lane` plays it."""

from __future__ import annotations

from zerobubble.gathers.lane import GatherTimes, play_gathers
from zerobubble.gathers.residency import Gather, RankGathers, gathers_of, plan_gathers

__all__ = ["Gather", "GatherTimes", "RankGathers", "gathers_of", "plan_gathers", "play_gathers"]
