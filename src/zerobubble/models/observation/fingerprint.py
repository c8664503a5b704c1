"""Short digests of a model's parameters, with which ranks check for equal models without reading all values."""

from __future__ import annotations

import hashlib
from weakref import WeakSet

import torch
from torch import Tensor, nn

_SAMPLED = 64
"""Number of elements read per parameter, evenly spaced, including the first and the last."""
_TRAINED_IN_PARTS: WeakSet[nn.Module] = WeakSet()
"""The models that were cut in this process, of which each rank may have trained its own stages since."""


def kinds(model: nn.Module) -> dict[str, str]:
    """Returns the shape, dtype and `requires_grad` of each parameter."""
    return {name: f"{list(p.shape)} of {p.dtype}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, str] | None:
    """Returns a digest of the values of each parameter; None for a model that was trained in parts.

    Sharded parameters, and layouts and dtypes without element access, have an empty digest.
    """
    return None if model in _TRAINED_IN_PARTS else {name: _digits(parameter) for name, parameter in model.named_parameters()}


def trains_in_parts(model: nn.Module) -> None:
    """Records that from here on, ranks may have different values for parameters of `model`."""
    _TRAINED_IN_PARTS.add(model)


def _digits(parameter: Tensor) -> str:
    is_plain = type(parameter) in (Tensor, nn.Parameter) and parameter.layout is torch.strided and not parameter.is_quantized
    if not is_plain or parameter.is_meta or not parameter.numel():
        return ""
    places = torch.linspace(0, parameter.numel() - 1, _SAMPLED, dtype=torch.float64).long().to(parameter.device)
    try:
        sampled = parameter.detach().take(places)
    except (NotImplementedError, RuntimeError):  # 8-bit dtypes, without element access
        return ""
    wide = torch.complex128 if sampled.is_complex() else torch.float64
    return hashlib.sha256(sampled.to("cpu", wide).numpy().tobytes()).hexdigest()[:8]
