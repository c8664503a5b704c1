"""Distinguishes user code from libraries, and finds the names that code uses."""

from __future__ import annotations

import sys
from argparse import Namespace
from dis import get_instructions
from functools import cache
from itertools import chain
from types import CodeType, SimpleNamespace

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "zerobubble", "tqdm"}
"""Packages whose code and objects are assumed constant. The thread of tqdm updates progress bars at any time, which no forward reads."""
_OF_MODELS = {"huggingface_hub", "peft", "safetensors", "timm", "torchmetrics", "torchvision", "transformers"}
_OF_TRAINING = {"accelerate", "lightning", "lightning_fabric", "lightning_utilities", "matplotlib", "mlflow", "pytorch_lightning", "wandb"}
_OF_DATA = {"PIL", "albumentations", "datasets", "fsspec", "pandas", "pyarrow", "scipy", "sklearn", "tokenizers", "torchaudio"}
_OF_CONSTANT_CODE = _LIBRARIES | _OF_MODELS | _OF_TRAINING | _OF_DATA
"""Packages whose code is assumed constant. Their objects may change, such as a configuration."""
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}
NAMESPACES = (SimpleNamespace, Namespace)
"""Classes of libraries whose objects only keep the attributes of user code."""


def is_of_library(name: str | None) -> bool:
    """Returns whether a Python module belongs to a package with objects that are assumed constant."""
    return (name or "builtins").partition(".")[0] in _LIBRARIES


def is_constant_code(name: str | None) -> bool:
    """Returns whether a Python module belongs to a package whose classes, functions and global variables are assumed constant."""
    return (name or "builtins").partition(".")[0] in _OF_CONSTANT_CODE


def names_in(code: CodeType) -> list[str]:
    """Returns the names of globals and attributes that code and its inner functions use."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return list(dict.fromkeys([*code.co_names, *chain.from_iterable(map(names_in, inner))]))


@cache
def globals_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of globals that code and its inner functions use, without names of attributes, which may be other globals."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    names = [instruction.argval for instruction in get_instructions(code) if instruction.opname in _GLOBAL]
    return tuple(dict.fromkeys([*names, *chain.from_iterable(map(globals_in, inner))]))
