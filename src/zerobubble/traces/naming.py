"""Names for the passes of stages of torch.distributed.pipelining in profiles, for schedules that give them none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.profiler import record_function

from zerobubble.errors import InputError

_PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
"""PyTorch's methods that run a pass of a stage, and its letters for them."""


def name_stage(stage: Any) -> None:
    """Have every pass of `stage` run in a range such as `PP:2F0`; raises `InputError` for other than PyTorch's stages."""
    if not isinstance(getattr(stage, "stage_index", None), int) or not all(hasattr(stage, method) for method in _PASSES):
        raise InputError("name_passes takes a PipelineStage of torch.distributed.pipelining, got {got}", got=type(stage).__name__)
    for method, letter in _PASSES.items():
        setattr(stage, method, _named(getattr(stage, method), stage.stage_index, letter))


def _named(method: Callable[..., Any], stage: int, letter: str) -> Callable[..., Any]:
    """`method` in a range with the name of its pass."""
    signature = inspect.signature(method)

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        microbatch, is_whole = next(iter(bound.arguments.values())), bound.arguments.get("full_backward", True)
        with record_function(f"PP:{stage}{letter if is_whole else 'I'}{microbatch}"):
            return method(*args, **kwargs)

    return called
