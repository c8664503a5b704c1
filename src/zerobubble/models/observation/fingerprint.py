"""A few digits for each parameter of a model, by which ranks find out whether they have the same, without reading it all."""

from __future__ import annotations

import hashlib
from weakref import WeakSet

import torch
from torch import Tensor, nn

_SAMPLED = 64
"""So many numbers of each parameter are read, at even distances, its first and last among them."""
_TRAINED_IN_PARTS: WeakSet[nn.Module] = WeakSet()
"""The models that were cut in this process: since then each rank may have trained its own stages of them."""


def kinds(model: nn.Module) -> dict[str, str]:
    """Of each parameter its shape, type, and whether it trains."""
    return {name: f"{list(p.shape)} of {p.dtype}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, str] | None:
    """Of each parameter digits that differ where its numbers do; None for a model that was trained in parts.

    Those that lie in shards, or in a layout or type of which torch takes no single numbers, have none.
    """
    return None if model in _TRAINED_IN_PARTS else {name: _digits(parameter) for name, parameter in model.named_parameters()}


def trains_in_parts(model: nn.Module) -> None:
    """From here on ranks may have other values of parameters of `model`."""
    _TRAINED_IN_PARTS.add(model)


def _digits(parameter: Tensor) -> str:
    is_plain = type(parameter) in (Tensor, nn.Parameter) and parameter.layout is torch.strided and not parameter.is_quantized
    if not is_plain or parameter.is_meta or not parameter.numel():
        return ""
    places = torch.linspace(0, parameter.numel() - 1, _SAMPLED, dtype=torch.float64).long().to(parameter.device)
    try:
        sampled = parameter.detach().take(places)
    except (NotImplementedError, RuntimeError):  # types of 8 bits, of which torch takes no numbers
        return ""
    wide = torch.complex128 if sampled.is_complex() else torch.float64
    return hashlib.sha256(sampled.to("cpu", wide).numpy().tobytes()).hexdigest()[:8]
