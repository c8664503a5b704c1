"""A tiny model of the same class as one of Transformers, with the same parts: what is proved for its cut is proved for the large one's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.observation.example import Arguments
from zerobubble.runtime.values.random_state import forked

MOST_PROVED = 10_000_000
"""A model of more parameters is not copied for a proof."""
_DIVISORS = (64, 32, 16, 8, 4, 2)
_SMALL = 64
"""Sizes below this stay: numbers of heads, of layers and of experts."""
_KEPT = ("position", "length", "window", "image_size", "patch", "layer", "token", "num_", "chunk", "block", "size_per", "n_ctx", "max_seq")
"""Words in the names of numbers that are no widths."""
_VOCABULARY = 256


class NoTinyModelError(Exception):
    """Why there is no tiny model."""


def tiny_models(model: nn.Module, arguments: Arguments) -> Iterator[tuple[nn.Module, Arguments]]:
    """Models of the class of `model` with smaller widths, the smallest first, each with `arguments` that fit it.

    Raises `NoTinyModelError` where there is none.
    """
    config, make = getattr(model, "config", None), getattr(type(model), "_from_config", None)
    if config is None or make is None or not hasattr(config, "to_dict"):
        raise NoTinyModelError(f"{type(model).__name__} has no configuration of Transformers, of which a tiny model could be made")
    found = False
    for divisor in _DIVISORS:
        try:
            with forked():
                tiny = make(_shrunk(copy.deepcopy(config), divisor))
        except Exception:  # noqa: BLE001 - a configuration may ask anything of its sizes
            continue
        if sum(parameter.numel() for parameter in tiny.parameters()) <= MOST_PROVED and _as_in(model, tiny):
            found = True
            yield tiny.to(_device_of(arguments)), pytree.tree_map_only(Tensor, _known_token, arguments)
    if not found:
        raise NoTinyModelError(f"no tiny {type(model).__name__} with the same parts can be made of its configuration")


def _shrunk(config: Any, divisor: int) -> Any:
    """`config` with widths divided, and those of the configurations in it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrunk(value, divisor)
        elif type(value) is not int:
            continue
        elif name == "vocab_size":
            setattr(config, name, min(value, _VOCABULARY))
        elif name.endswith("_token_id") and value >= _VOCABULARY:
            setattr(config, name, _VOCABULARY - 1)
        elif value >= _SMALL and value % divisor == 0 and not any(word in name for word in _KEPT):
            setattr(config, name, value // divisor)
        elif name == "head_dim" or name.endswith("_head_dim"):
            setattr(config, name, max(2, value // divisor))
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the grouped product has no float64
    return config


def _device_of(arguments: Arguments) -> torch.device:
    """The device of the first tensor that has numbers, the CPU if none has."""
    devices = (leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and not leaf.is_meta)
    return next(devices, torch.device("cpu"))


def _known_token(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor % _VOCABULARY


def _as_in(model: nn.Module, tiny: nn.Module) -> bool:
    """Whether `tiny` has the parts of `model`; then it has its mode, and trains what it trains."""
    parts, others = ({name: type(part) for name, part in each.named_modules()} for each in (model, tiny))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if parts != others or trained.keys() != {name for name, _ in tiny.named_parameters()}:
        return False
    for name, parameter in tiny.named_parameters():
        parameter.requires_grad_(trained[name])
    modes = {name: part.training for name, part in model.named_modules()}
    for name, part in tiny.named_modules():
        part.training = modes[name]
    return True
