"""Converts a configuration of Transformers to a function that creates its model, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError
from zerobubble.models.making.torchvision_fits import check_torchvision


def is_configuration(given: object) -> bool:
    """Returns whether this is a configuration of Transformers."""
    kind = getattr(sys.modules.get("transformers"), "PretrainedConfig", None)
    return kind is not None and isinstance(given, kind)


CONFIGURATION = Wanted("a configuration of Transformers", is_configuration)


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
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind._from_config(config)
        return made

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
