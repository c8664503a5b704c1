"""Libraries of models for tests. Those of images lie next to the environment, as requirements-images.txt says why."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

IMAGE_MODELS = Path(sys.prefix) / "image-models"


def library(name: str) -> Any:
    """The module of this name, such as "transformers", which asks no network for anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _add_image_models()
    return import_module(name)


@cache
def _add_image_models() -> torch.library.Library | None:
    """Put torchvision and timm on the path, with declarations of the operators that torchvision's compiled part would register.

    PyPI's torchvision is compiled for PyPI's torch, with CUDA. With a torch for CPUs its compiled part does not load, and importing
    torchvision fails unless these operators exist. No model here runs them. Some models of Transformers need timm, too.
    """
    if find_spec("torchvision") is None:
        sys.path.append(str(IMAGE_MODELS))
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
        return None
    except OSError:
        missing = torch.library.Library("torchvision", "DEF")
        for operation in ("nms", "qnms"):
            missing.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return missing
