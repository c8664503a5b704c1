"""Lets torchvision, which Transformers imports where it is installed, be imported beside a torch that its wheel was not built for."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch


def declare_if_missing() -> None:
    """Before torchvision is imported: declare the operators that it describes to torch, where its own library cannot be loaded."""
    found = find_spec("torchvision")
    if found is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for library in Path(found.submodule_search_locations[0]).glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
