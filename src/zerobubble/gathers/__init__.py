"""Gathers of sharded weights: `residency` plans when each rank gathers and frees them, using `caching`, and simulates the plan."""

from __future__ import annotations

from zerobubble.gathers.residency import Gather, GatherTimes, RankGathers, gathers_of, plan_gathers, play_gathers

__all__ = ["Gather", "GatherTimes", "RankGathers", "gathers_of", "plan_gathers", "play_gathers"]
