"""Shows all parameters of a model to its code during a forward, on a stage that holds only some.

Many models read their dtype or device from the first parameter, which may be in another stage. So during a forward, placeholders represent
the parameters of other stages. They have the right shape, dtype and device, and contain NaN, so that no use of their values goes unnoticed.

Code that iterates over all parameters or modules during a forward is refused. Reading only the first parameter is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.observation.gradient_code import line_of_call
from zerobubble.models.observation.placeholders import IN_THE_LOOP, placeholder_of
from zerobubble.models.observation.stand_in import Current, StandIn, not_of_the_model
from zerobubble.models.observation.units import join


def show_all_parameters(copy: nn.Module, model: nn.Module, around: Collection[str], current: Current) -> None:
    """Makes the modules of `copy` named in `around` list all their parameters in `model` while `current` runs a forward."""
    every = list(model.named_parameters(remove_duplicate=False))
    for name in around:
        prefix, first_names = f"{name}." if name else "", dict[int, str]()
        for full, parameter in every:
            if full.startswith(prefix):
                first_names.setdefault(id(parameter), full)
        names = set(first_names.values())
        blanks = _Placeholders(model.get_submodule(name), [full.removeprefix(prefix) for full, _ in every if full in names])
        part = copy.get_submodule(name)
        part.__dict__["named_parameters"] = partial(_named_parameters, part, blanks, current)


class _Placeholders:
    """Lazily created placeholders for missing parameters: most models only read the first one."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model = model
        self._names = names
        self._made: dict[str, tuple[Any, nn.Parameter]] = {}

    def __deepcopy__(self, _: Any) -> _Placeholders:
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> nn.Parameter:
        like = self._model.get_parameter(name)
        form = like.shape, like.dtype, like.device
        if name not in self._made or self._made[name][0] != (*form, like.requires_grad):
            placeholder = nn.Parameter(placeholder_of(*form), requires_grad=like.requires_grad)
            self._made[name] = (*form, like.requires_grad), placeholder
        return self._made[name][1]


def _named_parameters(
    part: nn.Module,
    blanks: _Placeholders,
    current: Current,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    iterate = type(part).named_parameters
    if not hasattr(current, "forward"):
        yield from iterate(part, prefix, recurse, remove_duplicate)
        return
    with not_of_the_model(current):
        held = dict(iterate(part, remove_duplicate=False))
    for name in blanks:
        if recurse or "." not in name:
            yield join(prefix, name), held[name] if name in held else blanks[name]


_ITERATE = ("named_parameters", "named_modules")
"""The methods of `nn.Module` on which all other iterators over parameters and modules are based."""


def refuse_going_through(model: nn.Module, current: Current) -> None:
    """Makes exhaustive iteration over the parameters or modules of `model` raise `InputError` during its forward."""
    for module in model.modules():
        if any(type(part) is StandIn for part in module.modules()):
            for name in _ITERATE:
                module.__dict__[name] = partial(_to_the_end, getattr(module, name), current)


def _to_the_end(iterate: Callable[..., Iterator[Any]], current: Current, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield from iterate(*args, **kwargs)
    if hasattr(current, "forward") and not _is_bookkeeping():
        raise InputError(
            "code of the model between its parts iterates over all parameters or modules in {line}, but a stage has only some",
            line=line_of_call(),
            remedy="for a loss, let each part return its share, call zb.nn.add_loss in the parts, or compute it from the model's output in "
            f"loss_fn; to change parameters, {IN_THE_LOOP}",
        )


def _is_bookkeeping() -> bool:
    """Returns whether Transformers iterates to install its recording hooks, or the runtime to find state, which reads no values."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in (nn.Module.__module__, __name__):
            return bool(module == "transformers.utils.output_capturing" or module.startswith("zerobubble.runtime."))
        frame = frame.f_back  # type: ignore[assignment]
    return False
