"""A copy of a model's own code around its units, in which something else stands for each unit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import is_
from types import MethodType
from typing import Any

from torch import Tensor, nn

from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.units import Units, join

UnitMaker = Callable[[str, nn.Module], nn.Module]
"""`(name, unit) -> module` that is in the place of a unit."""
ParameterMaker = Callable[[str, nn.Parameter], Tensor]
"""`(name, parameter) -> tensor` that is in the place of a parameter of the modules around the units."""


def assemble(model: nn.Module, units: Units, make_unit: UnitMaker, make_parameter: ParameterMaker) -> nn.Module:
    """`model` anew, with all modules under their names: those around the units are copied, without copying parameters.

    Modules that are neither units nor around them are copied with all that is in them. A module with several names is made once, and what
    modules around the units have as plain attributes, such as a list of modules or a method of theirs, leads to the modules made here.
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
                made[given] = copy_of(given)
        return made[given]

    def around(name: str, given: nn.Module) -> nn.Module:
        copied = shallow(given)
        copied._modules = {child: None if part is None else make(join(name, child), part) for child, part in given._modules.items()}
        copied._buffers = {own: None if buffer is None else buffer.clone() for own, buffer in given._buffers.items()}
        copied._parameters = {}
        for own, parameter in given._parameters.items():
            place(copied, own, parameter if parameter is None else make_parameter(join(name, own), parameter))
        return copied

    whole = make("", model)
    for given, copied in made.items():
        if given not in unit_names:
            _lead_to(made, copied)
    return whole


def _lead_to(made: Mapping[nn.Module, nn.Module], module: nn.Module) -> None:
    for name, value in module.__dict__.items():
        if name not in ("_modules", "_parameters", "_buffers"):
            module.__dict__[name] = _with_made(made, value)


def _with_made(made: Mapping[nn.Module, nn.Module], value: Any, depth: int = 3) -> Any:
    """`value` with what was made in the place of each module, and the same value where there is none in it."""
    if isinstance(value, nn.Module):
        return made.get(value, value)
    if isinstance(value, MethodType):
        owner = _with_made(made, value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if depth and type(value) in (dict, OrderedDict):
        items = {key: _with_made(made, item, depth - 1) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else type(value)(items)
    if depth and type(value) in (list, tuple):
        found = [_with_made(made, item, depth - 1) for item in value]
        return value if all(map(is_, found, value)) else type(value)(found)
    return value


def give_tensors(stand_in: nn.Module, name: str, unit: nn.Module, make_parameter: ParameterMaker) -> None:
    """Let what stands for unit `name` have what code outside of the unit may use: its own parameters, as they are made, and buffers."""
    for own, parameter in unit._parameters.items():
        if parameter is not None:
            place(stand_in, own, make_parameter(join(name, own), parameter))
    for own, buffer in unit._buffers.items():
        place(stand_in, own, buffer)


def place(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Let `module` have `tensor` under `name`: a parameter as a parameter, anything else as a plain attribute."""
    if tensor is None or isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module.__dict__[name] = tensor


def shallow(module: nn.Module) -> nn.Module:
    """Another module with the same parts, parameters, buffers and hooks, to which more can be added."""
    made: nn.Module = object.__new__(type(module))  # copy.copy asks modules with parametrizations to be pickled, which they refuse
    made.__dict__.update(module.__dict__)
    for name in ("named_parameters", "named_modules"):  # a model that is observed has its own, which lead to its own modules
        made.__dict__.pop(name, None)
    for name in (
        "_modules",
        "_parameters",
        "_buffers",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    ):
        made.__dict__[name] = module.__dict__[name].copy()
    return made
