"""Offloading of saved activations to host memory: `offloads` has the values, `copies` simulates them, `choice` plans them."""

from __future__ import annotations

from zerobubble.listing import listing
from zerobubble.offload.choice import plan_offloads
from zerobubble.offload.copies import fit_link, play_offloads
from zerobubble.offload.offloads import HostLink, Offload, RankOffloads, offload_faults, require_offloads

__all__ = [
    "HostLink",
    "Offload",
    "RankOffloads",
    "fit_link",
    "offload_faults",
    "plan_offloads",
    "play_offloads",
    "require_offloads",
]

__dir__ = listing(__all__)
