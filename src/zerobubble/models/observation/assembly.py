"""Copies a model's modules around its units, with a replacement for each unit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import is_
from types import MethodType
from typing import Any

from torch import Tensor, nn

from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.following import BACKWARD_HOOKS, FORWARD_HOOKS, Changes, Follower, put_entries
from zerobubble.models.observation.units import Units, belongs_somewhere, join
from zerobubble.runtime.values.python_places import generator_place
from zerobubble.runtime.values.released import is_released, values_of

UnitMaker = Callable[[str, nn.Module], nn.Module]
"""`(name, unit) -> module`: creates the replacement of a unit."""
ParameterMaker = Callable[[str, nn.Parameter], Tensor]
"""`(name, parameter) -> tensor`: creates the replacement of a parameter of the modules around the units."""


def assemble(
    model: nn.Module, units: Units, make_unit: UnitMaker, make_parameter: ParameterMaker, follower: Follower | None = None
) -> nn.Module:
    """Returns a copy of `model` with all modules under their names; modules around the units are copied without their parameters.

    All other modules are deep-copied. A module with several names is copied once. Plain attributes of modules around the units that refer
    to modules, such as a list of modules or a bound method, refer to the copies. With a `follower`, the copies follow changes of `model`.
    """
    return _Assembly(model, units, make_unit, make_parameter, follower).whole


class _Assembly:
    """The copies of a model's modules. `whole` is the copy of the model."""

    def __init__(
        self, model: nn.Module, units: Units, make_unit: UnitMaker, make_parameter: ParameterMaker, follower: Follower | None
    ) -> None:
        self.made: dict[nn.Module, nn.Module] = {}
        self.make_parameter = make_parameter
        self._names = {unit: name for name, unit in units.units.items()}
        self._units = units
        self._make_unit = make_unit
        self._follower = follower
        self._refuses_hooks = {"", *units.block_of.values()}
        self.whole = self.make("", model)
        for module in list(self.made):
            if module not in self._names:
                self.lead_to(module, module.__dict__)

    def make(self, name: str, module: nn.Module) -> nn.Module:
        """Returns the copy of the module of this name."""
        if module not in self.made:
            if module in self._names:
                self.made[module] = self._make_unit(self._names[module], module)
            elif name in self._units.around:
                self.made[module] = self._around(name, module)
            else:
                self.made[module] = self.copied(name, module)
        return self.made[module]

    def is_shared(self, module: nn.Module | None) -> bool:
        """Returns whether `module` is a part or around parts, or would be one."""
        return module is not None and (belongs_somewhere(module) or any(part in self._names for part in module.modules()))

    def _around(self, name: str, module: nn.Module) -> nn.Module:
        copied = shallow(module)
        copied._modules = {child: None if part is None else self.make(join(name, child), part) for child, part in module._modules.items()}
        copied._buffers = {attribute: _cloned(buffer) for attribute, buffer in module._buffers.items()}
        copied._parameters = {}
        for attribute, parameter in module._parameters.items():
            place(copied, attribute, parameter if parameter is None else self.make_parameter(join(name, attribute), parameter))
        if self._follower is not None:
            separate: set[str] = set()
            followed = _AroundUnits(self, name, module, copied, separate, refuses_hooks=name in self._refuses_hooks)
            self._follower.add(name, module, followed, copied, separate, contents=False)
        return copied

    def copied(self, name: str, original: nn.Module) -> nn.Module:
        """Returns a deep copy of a module without parameters; in a stage, the module itself if a forward was replaced on the instance.

        Such a forward may call the module by a reference, and so would not run the copy.
        """
        if self._follower is not None and any("forward" in part.__dict__ for part in original.modules()):
            return original
        memo: dict[int, Any] = generators_in(original)
        copied = copy_of(original, memo)
        for path, module in original.named_modules(prefix=name) if self._follower is not None else ():
            assert self._follower is not None
            copy = memo[id(module)]
            self._follower.add(path, module, _WithoutParameters(self, path, module, copy), copy, contents=True)
        return copied

    def lead_to(self, module: nn.Module, names: Iterable[str]) -> None:
        """Copies these plain attributes of `module` to its copy, with each module in them replaced by its copy."""
        copied = self.made[module]
        for name in names:
            if name not in ("_modules", "_parameters", "_buffers") and name in copied.__dict__:
                copied.__dict__[name] = _with_made(self.made, copied.__dict__[name])


class _AroundUnits:
    """The copy of a module around the units, which shares plain attributes with the module, except the `separate` ones, which it copies."""

    def __init__(
        self, assembly: _Assembly, name: str, module: nn.Module, copy: nn.Module, separate: Collection[str], *, refuses_hooks: bool
    ) -> None:
        self._assembly = assembly
        self._name = name
        self._module = module
        self._copy = copy
        self._separate = separate
        self._refused_hooks = (*FORWARD_HOOKS, *BACKWARD_HOOKS) if refuses_hooks else ("_backward_hooks",)

    def fault(self, changes: Changes) -> str:
        entries = changes.entries
        faults = [kind_fault(self._copy, self._module, changes)]
        faults += [name.strip("_") for name in ("forward", "_compiled_call_impl") if name in changes.attributes]
        faults += [f"hooks ({name.strip('_')})" for name in self._refused_hooks if name in entries]
        faults += [f"parameter {name!r}" for name in entries.get("_parameters", ()) if self._held(name) is None]
        faults += [f"module {name!r}" for name in entries.get("_modules", ()) if self._is_structural(name)]
        return ", ".join(filter(None, faults))

    def _held(self, name: str) -> nn.Parameter | None:
        """Returns the new value of a parameter, None for an added or removed parameter."""
        return self._module._parameters.get(name) if name in self._copy._parameters or name in self._copy.__dict__ else None

    def _is_structural(self, name: str) -> bool:
        module_of = {copy: module for module, copy in self._assembly.made.items()}
        before = {child: module_of.get(copy) for child, copy in self._copy._modules.items() if copy is not None}
        return any(map(self._assembly.is_shared, (before.get(name), self._module._modules.get(name))))

    def follow(self, changes: Changes) -> None:
        if changes.kind:
            follow_kind(self._copy, self._module)
        follow_children(self._copy, self._module, changes, lambda name, part: self._assembly.make(join(self._name, name), part))
        for name in changes.entries.get("_parameters", ()):
            parameter = self._held(name)
            assert parameter is not None
            place(self._copy, name, self._assembly.make_parameter(join(self._name, name), parameter))
        put_entries(self._copy, self._module, changes, ("_buffers",), _cloned)
        put_entries(self._copy, self._module, changes, FORWARD_HOOKS, lambda hook: hook)
        for name in changes.attributes:
            self._copy.__dict__.pop(name, None)
            if name in self._module.__dict__:
                value = self._module.__dict__[name]
                self._copy.__dict__[name] = copy_of(value) if name in self._separate else value
        self._assembly.lead_to(self._module, changes.attributes)


class _WithoutParameters:
    """The deep copy of a module without parameters."""

    def __init__(self, assembly: _Assembly, name: str, module: nn.Module, copy: nn.Module) -> None:
        self._assembly = assembly
        self._name = name
        self._module = module
        self._copy = copy

    def fault(self, changes: Changes) -> str:
        faults = [kind_fault(self._copy, self._module, changes), *(["forward"] if "forward" in changes.attributes else [])]
        faults += [f"parameter {name!r}" for name in changes.entries.get("_parameters", ())]
        children = ((name, self._module._modules.get(name)) for name in changes.entries.get("_modules", ()))
        faults += [f"module {name!r}" for name, child in children if self._assembly.is_shared(child)]
        return ", ".join(filter(None, faults))

    def follow(self, changes: Changes) -> None:
        if changes.kind:
            follow_kind(self._copy, self._module)
        follow_children(self._copy, self._module, changes, lambda name, part: self._assembly.copied(join(self._name, name), part))
        put_entries(self._copy, self._module, changes, ("_buffers",), _cloned)
        put_entries(self._copy, self._module, changes, (*FORWARD_HOOKS, *BACKWARD_HOOKS), lambda hook: hook)
        for name in changes.attributes:
            self._copy.__dict__.pop(name, None)
            if name in self._module.__dict__:
                self._copy.__dict__[name] = copy_of(self._module.__dict__[name])


def generators_in(module: nn.Module) -> dict[int, Any]:
    """Returns the random generators that `module` holds, by id: copies share them, since all draw as one model does."""
    values = (value for part in module.modules() for value in vars(part).values())
    return {id(value): value for value in values if generator_place("", value) is not None}


def follow_children(copy: nn.Module, module: nn.Module, changes: Changes, make: Callable[[str, nn.Module], nn.Module]) -> None:
    """Gives a copy the children of `module` in their order, with copies made for those that have changed."""
    changed, before = changes.entries.get("_modules", []), dict(copy._modules)
    if changed:
        copy._modules.clear()
    for name, part in module._modules.items() if changed else ():
        copy._modules[name] = None if part is None else make(name, part) if name in changed else before[name]


_OWN = "_zb_own"


def with_own(kind: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Returns a subclass of `kind` with the same name and these additional members."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**members, **named, _OWN: members})


def own_class(module: nn.Module) -> Any:
    """Returns the class of `module` that `with_own` has made; tools such as `fully_shard` derive another from it."""
    return next(kind for kind in type(module).__mro__ if _OWN in vars(kind))


def kind_fault(copy: nn.Module, module: nn.Module, changes: Changes) -> str:
    """Returns a fault if `copy` cannot get the class of `module`: if a tool has changed either."""
    is_of_tool = any(kind.__module__.startswith("torch.distributed") for kind in (*type(module).__mro__, *type(copy).__mro__))
    return "the class" if changes.kind and is_of_tool else ""


def follow_kind(copy: nn.Module, module: nn.Module) -> None:
    """Gives a copy the class of `module`, and keeps the additional members of the copy's class."""
    members = vars(type(copy)).get(_OWN)
    copy.__class__ = type(module) if members is None else with_own(type(module), members)


def _cloned(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else values_of(buffer)


def _with_made(copies: Mapping[nn.Module, nn.Module], value: Any, depth: int = 3) -> Any:
    """Returns `value` with each module replaced by its copy, or `value` itself if it contains no module."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, MethodType):
        owner = _with_made(copies, value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if depth and type(value) in (dict, OrderedDict):
        items = {key: _with_made(copies, item, depth - 1) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else type(value)(items)
    if depth and type(value) in (list, tuple):
        replaced = [_with_made(copies, item, depth - 1) for item in value]
        return value if all(map(is_, replaced, value)) else type(value)(replaced)
    return value


def give_tensors(stand_in: nn.Module, name: str, unit: nn.Module, make_parameter: ParameterMaker) -> None:
    """Gives the stand-in of unit `name` the tensors that outside code may use: its direct parameters, as created, and buffers.

    Buffers are aliases, because the unit's own buffers are released when another rank has trained it.
    """
    for attribute, parameter in unit._parameters.items():
        if parameter is not None:
            place(stand_in, attribute, make_parameter(join(name, attribute), parameter))
    for attribute, buffer in unit._buffers.items():
        place(stand_in, attribute, buffer if buffer is None or is_released(buffer) else buffer.detach())


def place(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Sets `tensor` on `module` under `name`: a parameter as a parameter, any other value as a plain attribute."""
    if tensor is None or isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module.__dict__[name] = tensor


def shallow(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of a module with its own dicts of submodules, parameters, buffers and hooks."""
    copied: nn.Module = object.__new__(type(module))  # not copy.copy, which pickles modules with parametrizations, and they refuse
    copied.__dict__.update(module.__dict__)
    # An observed model and a released one have bound versions, which refer to their own modules.
    for name in ("named_parameters", "named_modules", "_apply"):
        copied.__dict__.pop(name, None)
    for name in ("_modules", "_parameters", "_buffers", *FORWARD_HOOKS, "_load_state_dict_pre_hooks"):
        copied.__dict__[name] = module.__dict__[name].copy()
    return copied
