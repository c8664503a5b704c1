"""Estimates the costs of a transformer's stages from FLOPs, bytes and data sheets, without a cluster to measure on."""

from __future__ import annotations

from zerobubble.cost_model.divide import Division, Divisions, divide
from zerobubble.cost_model.estimate import Estimate, transformer
from zerobubble.cost_model.gpus import GPU, GPUS
from zerobubble.cost_model.kernels import Efficiency
from zerobubble.cost_model.models import MODELS, Experts, Latent, Model
from zerobubble.cost_model.step import StepEstimate
from zerobubble.listing import listing

__all__ = [
    "GPU",
    "GPUS",
    "MODELS",
    "Division",
    "Divisions",
    "Efficiency",
    "Estimate",
    "Experts",
    "Latent",
    "Model",
    "StepEstimate",
    "divide",
    "transformer",
]

__dir__ = listing(__all__)
