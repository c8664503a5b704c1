"""A model of Transformers from its configuration, without weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.models.cutting.by_hand import ByHand, spelled_out
from zerobubble.models.making.configuration import maker_of
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.making.torchvision_fits import check_torchvision
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
    """The split of the model that a configuration file, or a folder with a config.json, describes, as `zb.split` does it.

    A microbatch is of `batch` samples, of `sequence` tokens each or, where that is not given, as long as the example that the model brings.
    Raises `InputError` for a configuration that cannot be read. Code that comes with one is not run.
    """
    config = read_config(path)
    try:
        factory = ModelFactory(maker_of(config))
        example = _sized(own_example(factory.model), batch, sequence)
    except InputError:
        raise
    except Exception as error:  # a configuration may hold anything
        raise InputError(f"the model that {path} describes cannot be made: {_first_line(error)}") from error
    return ModelSplit(factory, example, None if cuts is None else spelled_out(cuts), memory, inside_blocks=inside_blocks)


def read_config(path: str) -> Any:
    """The configuration in a file, or in the config.json of a folder; raises `InputError` where it cannot be read."""
    check_torchvision()
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a file that is none can fail anywhere in there
        own = _own_code(transformers, path)
        if own:
            raise InputError(
                f"the configuration in {path} comes with code of its own, {own}, which is not run here: if you trust it, cut the model in "
                "Python, by zb.split(lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=True)).describe(num_stages)"
            ) from error
        raise InputError(f"{path} is no configuration of Transformers that can be read: {_first_line(error)}") from error


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError("a model from its configuration needs transformers: pip install transformers") from error


def _own_code(transformers: Any, path: str) -> str:
    """The configuration's class where its code is in another file; empty where there is none, or nothing that can be read."""
    try:
        settings, _ = transformers.PretrainedConfig.get_config_dict(path)
        return str(settings["auto_map"]["AutoConfig"])
    except Exception:  # noqa: BLE001  # a file may hold anything
        return ""


def _sized(example: Any, batch: int, sequence: int | None) -> Any:
    """The example as a microbatch of this size: its first sample, and of rows of tokens the first token, as often as it takes."""
    if example is None:
        return None
    return {name: _repeated(tensor, batch, sequence) for name, tensor in example.items()}


def _repeated(tensor: Tensor, batch: int, sequence: int | None) -> Tensor:
    one = tensor[:1]
    if sequence is not None and one.dim() == 2 and not one.is_floating_point():
        one = one[:, :1].expand(1, sequence)
    return one.expand(batch, *one.shape[1:]).clone(memory_format=torch.contiguous_format)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
