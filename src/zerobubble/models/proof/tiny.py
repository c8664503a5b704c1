"""Creates a tiny Transformers model with the same class and parts, so that a proof of its cut also covers the large model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.observation.example import Arguments
from zerobubble.models.proof.short import runs_same_code, shortened
from zerobubble.runtime.values.random_state import forked

MOST_PROVED = 10_000_000
"""Maximum number of parameters of a model that is copied for a proof."""
_DIVISORS = (64, 128, 256, 32, 16, 8, 4, 2)
"""Divisors of widths. Those above 64 serve models with more than about 60 layers; fewer sizes are multiples of them."""
_SMALL = 64
"""Smaller sizes stay unchanged: numbers of heads, layers and experts."""
_KEPT = ("position", "length", "window", "image_size", "patch", "layer", "token", "num_", "chunk", "block", "size_per", "n_ctx", "max_seq")
"""Words in the names of sizes that are not widths."""
_WINDOWS = ("window", "chunk")
"""Words in the names of sizes that a model compares with the length of an example."""
_VOCABULARY = 256


class NoTinyModelError(Exception):
    """Raised if there is no tiny model; the message has the reason."""


def tiny_models(model: nn.Module, arguments: Arguments) -> Iterator[tuple[nn.Module, Arguments]]:
    """Yields models of the class of `model` with smaller widths, each with suitable `arguments`.

    The arguments are short if the model then runs the same code. Windows of attention are shortened as much.
    Raises `NoTinyModelError` if there is none.
    """
    config, make = getattr(model, "config", None), getattr(type(model), "_from_config", None)
    if config is None or make is None or not hasattr(config, "to_dict"):
        raise NoTinyModelError(f"{type(model).__name__} has no configuration of Transformers from which to create a tiny model")
    whole = pytree.tree_map_only(Tensor, _known_token, arguments)
    (short, factor), device, is_possible = shortened(whole), _device_of(arguments), False

    def tiny_of(divisor: int, factor: int) -> nn.Module | None:
        smaller = _shrunk(copy.deepcopy(config), divisor, factor)
        try:
            with forked():
                tiny = make(smaller) if _is_small(partial(make, smaller)) else None
        except Exception:  # noqa: BLE001 - a configuration may constrain its sizes in any way
            return None
        return tiny.to(device) if tiny is not None and _matches(model, tiny) else None

    for divisor in _DIVISORS:
        tiny = tiny_of(divisor, 1)
        if tiny is not None:
            is_possible = True
            small = tiny_of(divisor, factor)
            is_short = small is not None and runs_same_code((small, short), (tiny, whole))
            yield (small, short) if small is not None and is_short else (tiny, whole)
    if not is_possible:
        raise NoTinyModelError(f"no tiny {type(model).__name__} with the same parts can be created from its configuration")


def _is_small(make: Callable[[], nn.Module]) -> bool:
    """Returns whether a model has at most `MOST_PROVED` parameters. Creates it without values, as it may be larger than memory."""
    try:
        with torch.device("meta"):
            model = make()
    except NotImplementedError:  # it reads values
        model = make()
    return sum(parameter.numel() for parameter in model.parameters()) <= MOST_PROVED


def _shrunk(config: Any, divisor: int, factor: int) -> Any:
    """Returns `config`, including nested configurations, with widths divided by `divisor` and windows by `factor`."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrunk(value, divisor, factor)
        elif type(value) is int and (small := _small_value(name, value, divisor, factor)) != value:
            setattr(config, name, small)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # grouped products do not support float64
    return config


def _small_value(name: str, value: int, divisor: int, factor: int) -> int:
    """Returns the value of a tiny configuration's attribute: widths are divided by `divisor`, windows by `factor`."""
    if name == "vocab_size":
        return min(value, _VOCABULARY)
    if name.endswith("_token_id") and value >= _VOCABULARY:
        return _VOCABULARY - 1
    if any(word in name for word in _WINDOWS):
        return max(1, value // factor)
    if value >= _SMALL and value % divisor == 0 and not any(word in name for word in _KEPT):
        return value // divisor
    return max(2, value // divisor) if name == "head_dim" or name.endswith("_head_dim") else value


def _device_of(arguments: Arguments) -> torch.device:
    """Returns the device of the first tensor that is not on the meta device, the CPU if there is none."""
    devices = (leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and not leaf.is_meta)
    return next(devices, torch.device("cpu"))


def _known_token(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor % _VOCABULARY


def _matches(model: nn.Module, tiny: nn.Module) -> bool:
    """Returns whether `tiny` has the parts of `model`; then copies the mode and `requires_grad`."""
    parts, others = ({name: type(part) for name, part in whole.named_modules()} for whole in (model, tiny))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if parts != others or trained.keys() != {name for name, _ in tiny.named_parameters()}:
        return False
    for name, parameter in tiny.named_parameters():
        parameter.requires_grad_(trained[name])
    modes = {name: part.training for name, part in model.named_modules()}
    for name, part in tiny.named_modules():
        part.training = modes[name]
    return True
