"""Cutting layers into stages: contiguous slices of a model, balanced by time, within memory.

found = cut_layers(layers, Placement.vee(8), Limits((40 * 10**9,) * 8), held=schedule)
costs = stage_costs(layers, found.cuts)
"""

from __future__ import annotations

from zerobubble.listing import listing
from zerobubble.partition.balancing import LayerCut, balance, balance_placement, cut_layers
from zerobubble.partition.layers import (
    Layer,
    activation_limits,
    join_blocks,
    layers_from_dict,
    layers_to_dict,
    parameter_bytes,
    slices,
    stage_costs,
)

__all__ = [
    "Layer",
    "LayerCut",
    "activation_limits",
    "balance",
    "balance_placement",
    "cut_layers",
    "join_blocks",
    "layers_from_dict",
    "layers_to_dict",
    "parameter_bytes",
    "slices",
    "stage_costs",
]

__dir__ = listing(__all__)
