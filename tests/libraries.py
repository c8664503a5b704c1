"""Libraries of models for tests, loaded where torchvision was compiled for another build of torch, too."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def library(name: str) -> Any:
    """The module of this name, such as "transformers", which asks no network for anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _make_up_for_torchvision()
    return import_module(name)


@cache
def _make_up_for_torchvision() -> torch.library.Library | None:
    """Declare what torchvision asks for when it is imported and its compiled part has.

    PyPI's torchvision is compiled for PyPI's torch, with CUDA; beside a torch for CPUs its compiled part does not load, and the import of
    torchvision fails, and with it that of whatever uses it where it is installed. No model here runs these operations.
    """
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
