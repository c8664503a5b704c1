"""A copy of a model's own code around its units, in which something else stands for each unit."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from zerobubble.models.units import Units, join

UnitMaker = Callable[[str, nn.Module], nn.Module]
"""`(name, unit) -> module` that is in the place of a unit."""
ParameterMaker = Callable[[str, nn.Parameter], Tensor]
"""`(name, parameter) -> tensor` that is in the place of a parameter of the modules around the units."""


def assemble(model: nn.Module, units: Units, make_unit: UnitMaker, make_parameter: ParameterMaker) -> nn.Module:
    """`model` anew, with all modules under their names: those around the units are copied, without copying parameters.

    Modules that are neither units nor around them are copied with all that is in them. A module with several names is made once.
    """
    made: dict[nn.Module, nn.Module] = {}
    unit_names = {unit: name for name, unit in units.units.items()}

    def make(name: str, given: nn.Module) -> nn.Module:
        if given not in made:
            if given in unit_names:
                made[given] = make_unit(unit_names[given], given)
            elif name in units.around:
                made[given] = around(name, given)
            else:
                made[given] = copy.deepcopy(given)
        return made[given]

    def around(name: str, given: nn.Module) -> nn.Module:
        copied = shallow(given)
        copied._modules = {child: None if part is None else make(join(name, child), part) for child, part in given._modules.items()}
        copied._buffers = {own: None if buffer is None else buffer.clone() for own, buffer in given._buffers.items()}
        copied._parameters = {}
        for own, parameter in given._parameters.items():
            place(copied, own, parameter if parameter is None else make_parameter(join(name, own), parameter))
        return copied

    return make("", model)


def place(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Let `module` have `tensor` under `name`: a parameter as a parameter, anything else as a plain attribute."""
    if tensor is None or isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module.__dict__[name] = tensor


def shallow(module: nn.Module) -> nn.Module:
    """Another module with the same parts, parameters, buffers and hooks, to which more can be added."""
    made = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        made.__dict__[name] = module.__dict__[name].copy()
    return made
