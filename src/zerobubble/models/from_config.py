"""Splits a Transformers model from its configuration, without weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.installing import install
from zerobubble.models.cutting.by_hand import ByHand, spelled_out
from zerobubble.models.making.configuration import check_torchvision, maker_of
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.model_split import ModelSplit
from zerobubble.models.observation.example import own_example


def split_config(
    path: str,
    cuts: ByHand | None = None,
    memory: int | None = None,
    batch: int = 1,
    sequence: int | None = None,
    inside_blocks: bool = False,
) -> ModelSplit:
    """Splits the model described by a configuration file, or by a folder with a config.json, like `zb.split`.

    A microbatch has `batch` samples of `sequence` tokens, by default as many as in the model's own example. Raises `InputError` for a
    configuration that cannot be read. Custom code of a configuration is not run.
    """
    config = read_config(path)
    try:
        factory = ModelFactory(maker_of(config))
        example = _sized(own_example(factory.model), batch, sequence)
    except InputError:
        raise
    except Exception as error:  # a configuration may contain anything
        raise InputError(
            "the model that {path} describes cannot be created: {reason}", path=str(path), reason=_first_line(error)
        ) from error
    return ModelSplit(factory, example, None if cuts is None else spelled_out(cuts), memory, inside_blocks=inside_blocks)


def read_config(path: str) -> Any:
    """Reads the configuration in a file, or in the config.json of a folder; raises `InputError` if it cannot be read."""
    check_torchvision()
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # an invalid file can fail anywhere in Transformers
        custom = _own_code(transformers, path)
        if custom:
            raise InputError(
                "the configuration in {path} has custom code, {own}, which is not run here: if you trust it, cut the model in "
                "Python, with zb.split(lambda: AutoModelForCausalLM.from_config(config, "
                "trust_remote_code=True)).describe(num_stages)",
                path=str(path),
                own=custom,
            ) from error
        raise InputError(
            "{path} is not a readable configuration of Transformers: {reason}", path=str(path), reason=_first_line(error)
        ) from error


def dtype_of(path: str) -> tuple[str, bool]:
    """Returns the dtype of the model that Transformers makes of a configuration or its text model, and whether the file states it."""
    config = read_config(path)
    stated = config.dtype or config.get_text_config().dtype
    return str(stated or torch.get_default_dtype()).removeprefix("torch."), stated is not None


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError("a model from its configuration needs Transformers", remedy=install("transformers")) from error


def _own_code(transformers: Any, path: str) -> str:
    """Returns the configuration's class if its code is in a custom file, else empty."""
    try:
        settings, _ = transformers.PretrainedConfig.get_config_dict(path)
        return str(settings["auto_map"]["AutoConfig"])
    except Exception:  # noqa: BLE001  # a file may contain anything
        return ""


def _sized(example: Any, batch: int, sequence: int | None) -> Any:
    """Resizes the example to a microbatch: repeats its first sample and, in rows of tokens, the first token."""
    if example is None:
        return None
    return {name: _repeated(tensor, batch, sequence) for name, tensor in example.items()}


def _repeated(tensor: Tensor, batch: int, sequence: int | None) -> Tensor:
    repeated = tensor[:1]
    if sequence is not None and repeated.dim() == 2 and not repeated.is_floating_point():
        repeated = repeated[:, :1].expand(1, sequence)
    return repeated.expand(batch, *repeated.shape[1:]).clone(memory_format=torch.contiguous_format)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
