"""The proof that a cut gives what the model gives: both run on an example in float64, and their outputs and gradients are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.example import Arguments

_TOLERANCE = 1e-9
"""How far cut and uncut may be apart, relative to the size of a tensor: in float64 they run the same operations on the same numbers."""


def prove(model: nn.Module, stages_of: Callable[[nn.Module], Sequence[nn.Module]], arguments: Arguments) -> None:
    """Run a copy of `model` and the stages that `stages_of` makes of another; raises `InputError` where they differ.

    A model that draws random numbers, as for dropout, is compared in evaluation mode: stages and a whole model draw others. One that does
    not run in float64, or draws them even so, is not proved.
    """
    args, kwargs = pytree.tree_map_only(Tensor, _in_float64, arguments)
    for evaluate in (False, True):
        whole, parts = (_copy(model, evaluate=evaluate) for _ in range(2))
        with torch.random.fork_rng(), torch.enable_grad():
            before = torch.random.get_rng_state()
            try:
                expected = whole(*args, **kwargs)
            except Exception:  # noqa: BLE001 - not every model runs in float64, and an example need not suit the training mode
                continue
            if torch.equal(before, torch.random.get_rng_state()):
                stages = stages_of(parts)
                _compare(whole, expected, stages, _run(stages, args, kwargs))
                return


def _run(stages: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        given = stage(**given)
    return given


def _compare(whole: nn.Module, expected: Any, stages: Sequence[nn.Module], given: Any) -> None:
    _compare_outputs(type(whole).__name__, given, expected)
    for output in (expected, given):
        trained = [tensor.square().sum() for tensor in _floating(output) if tensor.requires_grad]
        if trained:
            torch.stack(trained).sum().backward()  # type: ignore[no-untyped-call]
    held = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    for name, parameter in whole.named_parameters():
        _compare_gradients(name, parameter.grad, [(stage, own[name].grad) for stage, own in enumerate(held) if name in own])


def _copy(model: nn.Module, *, evaluate: bool) -> nn.Module:
    made = copy.deepcopy(model).double()
    for parameter in made.parameters():
        parameter.grad = None
    return made.eval() if evaluate else made


def _compare_outputs(model: str, ours: Any, expected: Any) -> None:
    if isinstance(expected, Mapping) and isinstance(ours, Mapping) and list(ours) != list(expected):
        raise InputError(f"{model} that was cut returns {list(ours)}, and uncut {list(expected)}: {_REMEDY}")
    pairs = list(zip(_floating(ours), _floating(expected), strict=False))
    if len(_floating(ours)) != len(_floating(expected)) or any(_differ(a, b) for a, b in pairs):
        raise InputError(f"{model} that was cut gives other numbers than uncut, on its example in float64: {_REMEDY}")


def _compare_gradients(name: str, expected: Tensor | None, ours: Sequence[tuple[int, Tensor | None]]) -> None:
    """Stages in this process share a parameter that several hold, so each has the whole gradient. None counts as zeros."""
    for stage, gradient in ours:
        if gradient is None and expected is None:
            continue
        like = expected if expected is not None else gradient
        assert like is not None
        zeros = torch.zeros_like(like)
        if _differ(zeros if gradient is None else gradient, zeros if expected is None else expected):
            raise InputError(f"parameter {name!r} of stage {stage} gets another gradient than in the uncut model, in float64: {_REMEDY}")


_REMEDY = "something in the model passes its parts by; write its stages by hand, as build(stage, num_stages)"


def _differ(ours: Tensor, expected: Tensor) -> bool:
    return ours.shape != expected.shape or not bool(((ours - expected).norm() <= _TOLERANCE * (1e-9 + expected.norm())).item())


def _floating(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
