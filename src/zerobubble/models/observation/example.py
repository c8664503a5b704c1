"""Example arguments of a model: the default ones for observation, and adjustments that a cut model needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a model."""


def arguments_of(example: Any, model: nn.Module) -> Arguments:
    """Converts `example`, in the form of `Pipeline.step`, to arguments of `model`, on its device."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    moved: Any = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(example) if isinstance(example, Mapping) else example)
    if isinstance(moved, dict):
        return (), without_cache(model, moved)
    return (tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)), without_cache(model, {})


def without_cache(model: nn.Module, kwargs: dict[str, Any], kind: type[nn.Module] | None = None) -> dict[str, Any]:
    """Returns the arguments, with `use_cache=False` for a Transformers model of class `kind` unless given.

    A cache is filled by all layers, which no stage has; training needs none.
    """
    if "use_cache" in kwargs or not (_keeps_cache(getattr(model, "config", None)) or _has_cache_option(kind or type(model))):
        return kwargs
    return {**kwargs, "use_cache": False}


def _has_cache_option(kind: type[nn.Module]) -> bool:
    """Returns whether a Transformers model takes `use_cache`: T5's decoder has a setting of its own."""
    return hasattr(kind, "config_class") and "use_cache" in inspect.signature(kind.forward).parameters


def _keeps_cache(config: Any) -> bool:
    """Returns whether a configuration, or one nested in it, such as a vision model's language model, enables the cache."""
    if getattr(config, "use_cache", False):
        return True
    inner = getattr(type(config), "sub_configs", {})
    return any(_keeps_cache(getattr(config, name, None)) for name in inner)


TAKES_SUMS = "_zb_takes_sums"
"""The attribute of a stage whose caller weights microbatches whose losses are shares of a sum."""


def refuse_sums(stage: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises `InputError` for the argument with which Transformers sums its loss over microbatches: a step averages over them."""
    if kwargs.get("num_items_in_batch") is not None and not getattr(stage, TAKES_SUMS, False):
        raise InputError(
            "{argument} makes the loss of a microbatch its share of a sum, but a step averages over microbatches",
            argument="num_items_in_batch",
            remedy="leave it out, and count labels in Pipeline(loss_weight=...), such as "
            "loss_weight=lambda labels: (labels[:, 1:] != -100).sum()",
        )


def own_example(model: nn.Module) -> Any:
    """Returns the model's own example, if any: Transformers models have `dummy_inputs` or an image size."""
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        return _image(getattr(model, "config", None))
    dummy = getattr(model, "dummy_inputs", None)
    return dict(dummy) if isinstance(dummy, Mapping) else None


def _image(config: Any) -> dict[str, Tensor] | None:
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if size is None:
        return None
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return {"pixel_values": torch.zeros(1, channels, height, width)}
