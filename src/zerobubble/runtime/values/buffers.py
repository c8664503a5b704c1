"""Reads and restores the buffers and modes of modules, makes tensors that last, and clears torch's caches of weights after writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Buffers = dict[str, Tensor | None]


def buffers_of(part: nn.Module) -> Buffers:
    """Returns the buffers of `part` itself, by name."""
    return {name: part._buffers[name] for name in part._buffers.keys()}  # noqa: SIM118 - TorchScript's have no iterator


def put_buffers(part: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    """Sets these buffers of `part` under their names."""
    for name, buffer in buffers.items():
        part._buffers[name] = buffer


@contextmanager
def in_mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Puts each of `modules` into evaluation mode, or with `training` leaves its mode as it is; restores the modes afterwards."""
    modes = [(module, module.training) for module in modules]
    try:
        for module, mode in modes:
            module.training = training and mode
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def making_tensors() -> Iterator[None]:
    """A context for tensors that outlive it: leaves the user's `torch.inference_mode` and anomaly mode, and keeps the grad mode.

    Anomaly mode would print a traceback for each probing backward pass that is given up, as for an error of the model.
    """
    has_grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad), torch.autograd.set_detect_anomaly(False):
        yield


def renew_inference_buffers(model: nn.Module) -> None:
    """Replaces buffers that a forward in `torch.inference_mode` has made, which no backward pass can save, by normal copies."""
    copies: dict[int, Tensor] = {}
    for part in model.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.is_inference():
                with making_tensors():
                    part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


@contextmanager
def changing_weights() -> Iterator[None]:
    """Wraps whatever writes into parameters or buffers, so that torch computes with the new numbers afterwards.

    `torch.autocast` caches its casts of parameters, and `parametrize.cached` the weights it computes, until the context ends: both by the
    object, so a write goes unnoticed. Users may have such a context open around any call of this library.
    """
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        parametrize._cache.clear()


def changing_parameters(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of the modules `parts` that another forward may change.

    These are all parameters with a version, except in embeddings with `max_norm`, which write the same values however often they run.
    """
    bounded = {part.weight for part in parts if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None}
    held = dict.fromkeys(parameter for part in parts for parameter in part._parameters.values() if parameter is not None)
    return [parameter for parameter in held if parameter not in bounded and not parameter.is_inference()]
