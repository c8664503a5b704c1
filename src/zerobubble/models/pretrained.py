"""Exports the weights of a checkpoint to a folder for `from_pretrained` of Transformers, written by Transformers itself."""

from __future__ import annotations

import os
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, raise_faults
from zerobubble.models.from_config import read_config
from zerobubble.models.making.configuration import is_configuration, maker_of
from zerobubble.runtime.checkpoint.contents import model_faults
from zerobubble.runtime.checkpoint.folder import resolve_path
from zerobubble.runtime.checkpoint.read import Saved, open_checkpoint


def write_pretrained(
    checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], config: Any, shard_bytes: int, adapter: Any = None
) -> None:
    """See `zb.io.export_weights`."""
    saved = open_checkpoint(checkpoint)
    if not saved.rest["is_whole_model"]:
        raise InputError(
            "the checkpoint {folder} has the parameter names of {num_stages} stages, not those of one model",
            folder=str(saved.folder),
            num_stages=saved.rest["num_stages"],
            remedy="train stages of zb.split, which keep the model's names",
        )
    target = resolve_path(folder, "folder")
    if target.is_file():
        raise InputError("{folder} is a file, and weights are written into a folder", folder=str(folder))
    model = _model_with(saved, config if is_configuration(config) else read_config(str(config)), adapter)
    try:
        if adapter is None:
            model.save_pretrained(target, max_shard_size=shard_bytes)
        else:
            model.save_pretrained(target)  # the adapter alone, in one file
    except (OSError, SafetensorError) as error:  # a full disk raises either
        raise InputError("weights cannot be written to {folder}: {reason}", folder=str(folder), reason=str(error)) from error


def _model_with(saved: Saved, config: Any, adapter: Any) -> Any:
    """Returns the model of `config`, adapted by peft if there is an `adapter`, with the checkpoint's weights in their dtypes.

    Raises `InputError` if they do not match.
    """
    with torch.device("meta"):
        model: Any = maker_of(config)()
        if adapter is not None:
            model = _adapted(model, adapter)
    types = {key: tensor.properties.dtype for key, tensor in saved.tensors.items() if key.startswith("model.")}
    wanted = {f"model.{name}": tensor.to(types.get(f"model.{name}")) for name, tensor in model.state_dict().items()}
    raise_faults(model_faults(wanted, wanted.keys(), saved.tensors))
    buffers = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for key, tensor in wanted.items()}
    saved.read(buffers)
    read = {key.removeprefix("model."): tensor for key, tensor in buffers.items()}
    model.load_state_dict(read, assign=True)
    model.tie_weights()
    _refuse_other_ties(read, model.state_dict())
    return model


def _adapted(model: Any, adapter: Any) -> Any:
    """Returns the model with adapters of peft, by their configuration or a folder that holds it."""
    peft: Any = import_module("peft")
    if isinstance(adapter, (str, os.PathLike)):
        try:
            adapter = peft.PeftConfig.from_pretrained(os.fspath(adapter))
        except (OSError, ValueError) as error:
            raise wrong("adapter", str(adapter), "a folder with an adapter_config.json of peft", str(error)) from error
    if not isinstance(adapter, peft.PeftConfig):
        raise wrong("adapter", adapter, "a configuration of peft, such as a LoraConfig, or a folder that holds one")
    return peft.get_peft_model(model, deepcopy(adapter))


def _refuse_other_ties(read: dict[str, Tensor], tied: dict[str, Tensor]) -> None:
    """Raises `InputError` if tying has replaced a parameter's trained values."""
    for name, tensor in tied.items():
        if not torch.equal(tensor, read[name]):
            raise InputError(
                "the configuration ties {name} to another parameter, but their values in the checkpoint differ",
                name=name,
                remedy="give the configuration that the model was trained with, such as with tie_word_embeddings=False",
            )
