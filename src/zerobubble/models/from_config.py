"""A model of Transformers from its configuration, without weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.by_hand import ByHand
from zerobubble.models.model_split import ModelSplit, split


def split_config(path: str, cuts: ByHand | None = None) -> ModelSplit:
    """The split of the model that a config.json, or the folder with it, describes; raises `InputError` for one that cannot be read.

    Code that comes with a configuration is not run.
    """
    transformers: Any = import_module("transformers")
    folder = Path(path)
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder.parent if folder.is_file() else folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no configuration of Transformers that can be read: {error}") from error
    names = getattr(config, "architectures", None) or []
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)

    def make() -> nn.Module:
        model: nn.Module = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
        return model

    return split(make, cuts=cuts)
