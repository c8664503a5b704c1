"""Detects equivalent units, so that observations of one are reused for the others.

Code that reads the same values gives the same result. Units are equivalent if they have modules of the same classes and names, with
parameters and buffers of the same shapes. They may differ in other attributes, such as a layer index. Then a run records which of these
attributes it reads, and its result is reused only for units with the same values of these.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Found = TypeVar("Found")
Outcome = TypeVar("Outcome")

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range})
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
_DEEPEST = 6
"""Maximum depth at which nested lists and dicts are compared by value; below, objects are compared by identity."""
_REMEMBERED = 64
"""Maximum number of keys in the cache."""


class Place(NamedTuple):
    """An attribute of a module in a unit."""

    module: str
    attribute: str


Values = frozenset[tuple[Place, Hashable]]
"""The values of a unit at some places."""


class EquivalentUnits:
    """A group of equivalent units. `values` has, by name of a unit, its values at the `places` where the units differ.

    Both are empty for a unit without an equivalent.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        every = {name: values_of(unit) for name, unit in units.items()} if len(units) > 1 else {}
        first = next(iter(every.values()), {})
        self.places = frozenset(place for place in first if any(values[place] != first[place] for values in every.values()))
        self.values = {name: frozenset((place, values[place]) for place in self.places) for name, values in every.items()}


def equivalents_of(units: Mapping[str, nn.Module]) -> dict[str, EquivalentUnits]:
    """Returns for each of `units` its equivalents, including itself."""
    groups: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
    for name, unit in units.items():
        groups[_structure(unit)][name] = unit
    equivalents = {structure: EquivalentUnits(group) for structure, group in groups.items()}
    return {name: equivalents[structure] for structure, group in groups.items() for name in group}


class ResultCache(Generic[Found]):
    """Caches the results of running units of one `EquivalentUnits`, by keys of their arguments."""

    def __init__(self, equivalents: EquivalentUnits) -> None:
        self._alike = equivalents
        self._found: OrderedDict[Hashable, list[tuple[Values, Found]]] = OrderedDict()
        self.lock = threading.RLock()
        """Held while a unit runs, because the unit itself is patched to record reads."""

    def find(self, name: str, key: Hashable) -> Found | None:
        """Returns the cached result for unit `name` and this key."""
        present = self._alike.values.get(name, frozenset())
        return next((result for values, result in self._found.get(key, ()) if values <= present), None)

    def keep(self, name: str, key: Hashable, result: Found, read: Collection[Place] | None) -> None:
        """Caches the result of a run of unit `name` that has read these places."""
        if read is None or name not in self._alike.values:
            return
        values = frozenset((place, value) for place, value in self._alike.values[name] if place in read)
        self._found.setdefault(key, []).append((values, result))
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)

    def run(self, unit: nn.Module, look: Callable[[], Outcome]) -> tuple[Outcome, frozenset[Place] | None]:
        """Returns the result of `look`, which runs `unit`, and the places read, None if it sets attributes."""
        if not self._alike.values:
            return look(), None
        held: list[Any] = []  # keeps ids unique
        before, places = values_of(unit, held), self._alike.places
        try:
            with _recording_reads(unit, places) as reads:
                outcome = look()
            read = reads.places
        except Exception:  # any error: code may access hidden attributes in unobserved ways, and its own errors recur in the second run
            if not places:
                raise
            read = None
        if read is None:
            outcome, read = look(), places
        is_changed = values_of(unit) != before
        del held
        return outcome, None if is_changed else frozenset(read)


def _structure(unit: nn.Module) -> Hashable:
    """Returns the modules in `unit` with their classes, attribute names, and tensor shapes."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            name,
            numbers.setdefault(id(module), len(numbers)),
            type(module),
            frozenset(module.__dict__),
            tuple(module._modules),
            tuple((key, _form(tensor, numbers)) for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items())),
        )
        for name, module in unit.named_modules(remove_duplicate=False)
    )


def _form(tensor: Tensor | None, numbers: dict[int, int]) -> Hashable:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    number = numbers.setdefault(id(tensor), len(numbers))  # one tensor with several names has one number
    return number, type(tensor), tensor.shape, strides, tensor.dtype, tensor.requires_grad


def values_of(unit: nn.Module, held: list[Any] | None = None) -> dict[Place, Hashable]:
    """Returns the attribute values of the modules in `unit`. Equal results are indistinguishable for all code; the converse need not hold.

    Opaque objects are compared by id, and added to `held`: results are comparable while these are alive.
    """
    held = [] if held is None else held
    names = {id(module): name for name, module in unit.named_modules()}
    held += unit.modules()
    return {
        Place(name, attribute): _value(value, names, held, _DEEPEST)
        for name, module in unit.named_modules()
        for attribute, value in module.__dict__.items()
        if attribute not in _STRUCTURE
    }


def _value(value: Any, names: Mapping[int, str], held: list[Any], depth: int) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value) if kind in (float, complex) else value  # 0.0 == -0.0, and nan != nan
    if id(value) in names:
        return "module", names[id(value)]
    if depth == 0:
        return _identity(value, held)
    inside = functools.partial(_value, names=names, held=held, depth=depth - 1)
    if kind in (list, tuple):
        return kind, tuple(map(inside, value))
    if kind in (dict, OrderedDict):
        return kind, tuple((inside(key), inside(item)) for key, item in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(map(inside, value))
    if kind is MethodType:
        return kind, inside(value.__self__), _identity(value.__func__, held)
    if kind is functools.partial:
        return kind, inside(value.func), inside(value.args), inside(value.keywords)
    return _identity(value, held)


def _identity(value: Any, held: list[Any]) -> Hashable:
    held.append(value)
    return "object", id(value)


class _Reads:
    """The places that code reads; None if the code does more than read one, such as setting it, and must rerun unobserved."""

    def __init__(self) -> None:
        self._read: set[Place] = set()
        self._asked: list[Place] = []

    def ask(self, place: Place) -> None:
        """Records that code queries an attribute."""
        self._asked.append(place)

    def read(self, place: Place) -> None:
        """Records that code reads an attribute."""
        if place in self._asked:
            self._asked.remove(place)
        self._read.add(place)

    @property
    def places(self) -> Collection[Place] | None:
        """Returns the places read."""
        return None if self._asked else self._read


class _Hiding(dict[str, Any]):
    """A dict of a module without the `hidden` attributes, which records queries for them."""

    def __init__(self, visible: Mapping[str, Any], hidden: Mapping[str, Any], module: str, reads: _Reads) -> None:
        super().__init__(visible)
        self._hidden, self._module, self._reads = hidden, module, reads

    def _ask(self, names: Iterable[object]) -> None:
        for name in names:
            if name in self._hidden:
                self._reads.ask(Place(self._module, str(name)))

    def __contains__(self, name: object) -> bool:
        self._ask([name])
        return name in self._hidden or super().__contains__(name)


class _SetsHiddenError(Exception):
    """Raised if code sets an observed attribute, and must rerun unobserved."""


class _Parameters(_Hiding):
    """The parameters of a module: `nn.Module.__getattr__` looks here for attributes that are missing from `__dict__`."""

    def __getitem__(self, name: str) -> Any:
        if name not in self._hidden:
            return super().__getitem__(name)
        self._reads.read(Place(self._module, name))
        return self._hidden[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._hidden:  # as for any attribute set to None, which would otherwise be read with its old value
            raise _SetsHiddenError(name)
        super().__setitem__(name, value)


class _Attributes(_Hiding):
    """The `__dict__` of a module. Python's own lookups bypass these methods; only explicit uses of the dict call them."""

    def __missing__(self, name: str) -> Any:
        self._ask([name])
        return self._hidden[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._ask([name])
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._ask(self._hidden)
        return super().__iter__()

    def keys(self) -> Any:
        self._ask(self._hidden)
        return super().keys()

    def values(self) -> Any:
        self._ask(self._hidden)
        return super().values()

    def items(self) -> Any:
        self._ask(self._hidden)
        return super().items()


@contextmanager
def _recording_reads(unit: nn.Module, places: Collection[Place]) -> Iterator[_Reads]:
    """Records which of `places` code reads; places that cannot be observed count as read.

    The attributes are removed from the modules, so that lookups reach the recording dicts, and restored afterwards.
    """
    reads = _Reads()
    with ExitStack() as restore:
        for name, group in itertools.groupby(sorted(places), key=lambda place: place.module):
            module = unit.get_submodule(name)
            attributes = {place.attribute for place in group}
            seen = {attribute for attribute in attributes if _is_seen_when_read(module, attribute)}
            for attribute in attributes - seen:
                reads.read(Place(name, attribute))
            restore.enter_context(_hidden(module, seen, name, reads))
        yield reads


@contextmanager
def _hidden(module: nn.Module, attributes: Collection[str], name: str, reads: _Reads) -> Iterator[None]:
    attributes_dict, parameters = module.__dict__, module._parameters
    before, parameters_before = dict(attributes_dict), dict(parameters)
    hidden = {attribute: attributes_dict[attribute] for attribute in attributes}
    visible = {attribute: value for attribute, value in attributes_dict.items() if attribute not in hidden}
    watched = _Parameters(parameters, hidden, name, reads)
    object.__setattr__(module, "__dict__", _Attributes(visible | {"_parameters": watched}, hidden, name, reads))
    was_watched = False
    try:
        yield
        was_watched = reads.places is not None
    finally:
        after = dict(dict.items(module.__dict__))
        object.__setattr__(module, "__dict__", attributes_dict)
        attributes_dict.clear()
        attributes_dict.update(hidden | after if was_watched else before)
        attributes_dict["_parameters"] = parameters
        parameters.clear()
        parameters.update(dict.items(watched) if was_watched else parameters_before)


def _is_seen_when_read(module: nn.Module, attribute: str) -> bool:
    """Returns whether the lookup of an attribute missing from `__dict__` ends only in `nn.Module.__getattr__`."""
    kind = type(module)
    is_plain = kind.__getattribute__ is object.__getattribute__ and kind.__getattr__ is nn.Module.__getattr__
    return is_plain and not hasattr(kind, attribute)
