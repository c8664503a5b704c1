"""Checks that the installed torchvision loads with the installed torch, as Transformers requires.

Transformers imports torchvision if it is installed. A torchvision from another index than torch's own, such as PyPI's CUDA build next to
a CPU build of torch, fails to import, and Transformers then reports that a model class or a configuration is missing.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec

import torch

from zerobubble.errors import InputError


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
