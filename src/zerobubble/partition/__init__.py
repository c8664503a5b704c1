"""From layers to stages: contiguous slices of the model, balanced by measured time, within memory.

cuts = balance_placement(layers, Placement.vee(8))
costs = stage_costs(layers, cuts)
"""

from __future__ import annotations

from zerobubble.partition.balancing import balance, balance_placement
from zerobubble.partition.layers import (
    Cuts,
    Layer,
    activation_limits,
    layers_from_dict,
    layers_to_dict,
    parameter_bytes,
    slices,
    stage_costs,
)

__all__ = [
    "Cuts",
    "Layer",
    "activation_limits",
    "balance",
    "balance_placement",
    "layers_from_dict",
    "layers_to_dict",
    "parameter_bytes",
    "slices",
    "stage_costs",
]
