"""Converts a configuration of Transformers to a function that creates its model, with random weights.

Before that, it checks that the installed torchvision loads with the installed torch. Transformers imports torchvision if it is installed. A
torchvision from another index than torch's own, such as PyPI's CUDA build next to a CPU build of torch, fails to import, and Transformers
then reports that a model class or a configuration is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError


def is_configuration(value: object) -> bool:
    """Returns whether this is a configuration of Transformers."""
    kind = getattr(sys.modules.get("transformers"), "PretrainedConfig", None)
    return kind is not None and isinstance(value, kind)


def _load_one(value: object) -> str:
    is_name = isinstance(value, str)
    return f"lambda: AutoModelForCausalLM.from_pretrained({value!r}) is a function that loads one" if is_name else ""


CONFIGURATION = Wanted("a configuration of Transformers", is_configuration, _load_one)


def maker_of(config: Any) -> Callable[[], nn.Module]:
    """Returns the function that creates the model of `config`: its `architectures`, by default the causal language model of its family.

    Raises `InputError` if Transformers has neither. This never runs custom code of a configuration.
    """
    check_torchvision()
    transformers: Any = sys.modules["transformers"]
    names = getattr(config, "architectures", None) or []
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if kind is None and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(_no_class(type(config).__name__, names, getattr(config, "auto_map", None)))

    def make() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind._from_config(config)
        return model

    return make


def _no_class(config: str, names: Sequence[str], own_code: object) -> str:
    what = (
        f"is for {', '.join(names)}, which is not in Transformers"
        if names
        else "has no architectures, and its family has no language model"
    )
    trusts = ", trust_remote_code=True) if you trust its custom code" if own_code else ")"
    return (
        f"zb.split cannot create a model from a configuration that {what} ({config}): give it a function that creates the model, such as "
        f"lambda: AutoModelForCausalLM.from_config(config{trusts}"
    )


def check_torchvision() -> None:
    """Raises `InputError` if torchvision is installed and does not load with this torch."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            "torchvision {version} was built for a version of torch other than {torch_version}; neither it nor Transformers "
            "can be imported",
            version=_version(),
            torch_version=torch.__version__,
            remedy="pip uninstall torchvision, or install it from the same index as torch",
        ) from error


def _version() -> str:
    try:
        return metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return "(of unknown version)"
