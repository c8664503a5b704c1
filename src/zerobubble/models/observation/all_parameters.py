"""The parameters of a whole model, as its code sees them while a forward runs, on a stage that has some of them.

A model's code asks for the type or device of what it holds by its first parameter, and the stage may have none of that part. So while a
forward runs all are there, and those of other stages are blank: they tell what they are, and using them cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from torch import nn

from zerobubble.models.observation.stand_in import Current, blank_of, not_of_the_model
from zerobubble.models.observation.units import join


def show_all_parameters(made: nn.Module, model: nn.Module, around: Collection[str], current: Current) -> None:
    """Let the modules of `made` with names in `around` show all parameters that they have in `model` while `current` has a forward."""
    every = list(model.named_parameters(remove_duplicate=False))
    for name in around:
        prefix, first_names = f"{name}." if name else "", dict[int, str]()
        for full, parameter in every:
            if full.startswith(prefix):
                first_names.setdefault(id(parameter), full)
        names = set(first_names.values())
        blanks = _Blanks({full.removeprefix(prefix): parameter for full, parameter in every if full in names})
        part = made.get_submodule(name)
        part.__dict__["named_parameters"] = partial(_named_parameters, part, blanks, current)


class _Blanks:
    """What is shown in the place of parameters that are not there, made when it is asked for: most models ask for the first alone."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._forms = {name: (like.shape, like.dtype, like.device, like.requires_grad) for name, like in parameters.items()}
        self._made: dict[str, nn.Parameter] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __getitem__(self, name: str) -> nn.Parameter:
        if name not in self._made:
            shape, dtype, device, trains = self._forms[name]
            self._made[name] = nn.Parameter(blank_of(shape, dtype, device), requires_grad=trains)
        return self._made[name]


def _named_parameters(
    part: nn.Module,
    blanks: _Blanks,
    current: Current,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    own = type(part).named_parameters
    if not hasattr(current, "forward"):
        yield from own(part, prefix, recurse, remove_duplicate)
        return
    with not_of_the_model(current):
        held = dict(own(part, remove_duplicate=False))
    for name in blanks:
        if recurse or "." not in name:
            yield join(prefix, name), held[name] if name in held else blanks[name]
