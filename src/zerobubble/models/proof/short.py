"""Shortens the example of a tiny model, if the model runs the same code on the short one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.units import find_units

_TOKENS, _SAMPLES = 64, 2
"""Size of a short example. Attention takes memory and time by the square of the tokens."""
_LIBRARIES = (torch.__path__[0], str(Path(__file__).parents[2]), "<")
_Place = tuple[CodeType, int]
"""A code object, and the offset of an instruction in it."""


def shortened(arguments: Arguments) -> tuple[Arguments, int]:
    """Returns the arguments with at most 2 samples and about 64 tokens, and the factor by which their lengths were divided.

    The first and last tokens stay, and with them padding at either end. Rows of integers, such as `input_ids`, give the length; without
    rows of integers, the arguments stay whole.
    """
    rows = [leaf.shape for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim() == 2 and _is_whole(leaf)]
    factor = max([1, *(length // _TOKENS for _, length in rows)])
    lengths, samples = {length for _, length in rows}, {count for count, _ in rows}

    def short(tensor: Tensor) -> Tensor:
        for axis, size in enumerate(tensor.shape):
            if size in lengths and (axis > 0 or tensor.dim() == 1):
                tensor = _ends(tensor, axis, max(1, size // factor))
            elif axis == 0 and samples == {size}:
                tensor = tensor[:_SAMPLES]
        return tensor.contiguous()

    return pytree.tree_map_only(Tensor, short, arguments), factor


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _ends(tensor: Tensor, axis: int, count: int) -> Tensor:
    """Returns the first and last `count` entries along `axis`, half of them each."""
    last = count // 2
    return torch.cat([tensor.narrow(axis, 0, count - last), tensor.narrow(axis, tensor.shape[axis] - last, last)], axis)


def runs_same_code(short: tuple[nn.Module, Arguments], whole: tuple[nn.Module, Arguments]) -> bool:
    """Returns whether the first model runs every instruction of Python, outside of torch, that the second one runs.

    The models are observed, which runs the code around their parts, and parts on shapes only. So this is cheap for long examples.
    """
    try:
        run = _instructions_of(*short)  # first, as it alone runs code that only a first call runs
        return _instructions_of(*whole) <= run
    except Exception:  # noqa: BLE001 - a model need not run on a short example
        return False


def _instructions_of(model: nn.Module, arguments: Arguments) -> set[_Place]:
    observed, (args, kwargs) = ObservedModel(model, find_units(model)), arguments
    with _noting_instructions() as run:
        observed.flow(args, kwargs, training=model.training)
    return run


@contextmanager
def _noting_instructions() -> Iterator[set[_Place]]:
    """Notes the instructions that this thread runs outside of torch and this package."""
    run: set[_Place] = set()

    def note(frame: FrameType, _: str, __: Any) -> Callable[..., Any]:
        run.add((frame.f_code, frame.f_lasti))
        return note

    def enter(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename.startswith(_LIBRARIES):
            return None
        frame.f_trace_opcodes = True  # lines alone are the same for both sides of `a if long else b`
        return note

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield run
    finally:
        sys.settrace(before)
