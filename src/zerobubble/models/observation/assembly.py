"""Copies a model's modules around its units, with a replacement for each unit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import is_
from types import MethodType
from typing import Any

from torch import Tensor, nn

from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.units import Units, join
from zerobubble.runtime.values.released import is_released

UnitMaker = Callable[[str, nn.Module], nn.Module]
"""`(name, unit) -> module`: creates the replacement of a unit."""
ParameterMaker = Callable[[str, nn.Parameter], Tensor]
"""`(name, parameter) -> tensor`: creates the replacement of a parameter of the modules around the units."""


def assemble(model: nn.Module, units: Units, make_unit: UnitMaker, make_parameter: ParameterMaker) -> nn.Module:
    """Returns a copy of `model` with all modules under their names; modules around the units are copied without their parameters.

    All other modules are deep-copied. A module with several names is copied once. Plain attributes of modules around the units that refer
    to modules, such as a list of modules or a bound method, refer to the copies.
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
    """Returns `value` with each module replaced by its copy, or `value` itself if it contains no module."""
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
    """Gives the stand-in of unit `name` the tensors that outside code may use: its direct parameters, as created, and buffers.

    Buffers are aliases, because those of the unit are released when another rank has trained it.
    """
    for own, parameter in unit._parameters.items():
        if parameter is not None:
            place(stand_in, own, make_parameter(join(name, own), parameter))
    for own, buffer in unit._buffers.items():
        place(stand_in, own, buffer if buffer is None or is_released(buffer) else buffer.detach())


def place(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Sets `tensor` on `module` under `name`: a parameter as a parameter, any other value as a plain attribute."""
    if tensor is None or isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module.__dict__[name] = tensor


def shallow(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of a module with its own dicts of submodules, parameters, buffers and hooks."""
    made: nn.Module = object.__new__(type(module))  # not copy.copy, which pickles modules with parametrizations, and they refuse
    made.__dict__.update(module.__dict__)
    # An observed model and a released one have bound versions, which refer to their own modules.
    for name in ("named_parameters", "named_modules", "_apply"):
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
