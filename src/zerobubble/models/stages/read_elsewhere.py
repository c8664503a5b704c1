"""Lists the state of a user's model that forwards read elsewhere than in the parts of a stage: one that sets it there needs all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from inspect import getattr_static
from types import FunctionType

from torch import Tensor, nn

from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.equivalent_units import Place
from zerobubble.models.observation.first_reads import is_observable
from zerobubble.models.observation.following import Follower
from zerobubble.models.observation.observed_model import FirstRead, ObservedModel
from zerobubble.models.observation.units import join
from zerobubble.runtime.stage.set_attributes import ReadState
from zerobubble.runtime.values.python_objects import globals_in, is_constant_code, names_in
from zerobubble.runtime.values.python_places import Entries, Entry, class_place
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.runtime.values.shared_values import ATOMS

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ReadElsewhere:
    """What forwards of the user's `model` read before they set it, other than in units of stage `stage` alone.

    These are attributes and buffers of its modules, data of their classes, and global numbers, texts and tensors that their methods use.
    `follower` has the modules around the units.
    """

    def __init__(self, model: nn.Module, observed: ObservedModel, cut: ModelCut, stage: int, follower: Follower) -> None:
        self._model = model
        self._observed = observed
        self._home_of = cut.stage_of
        self._stage = stage
        self._follower = follower
        self._found: tuple[set[FirstRead], int, ReadState] | None = None

    def state(self, *, includes_own: bool) -> ReadState:
        """Returns what forwards have read so far; with `includes_own`, also in units of the stage. It is the same until there is more."""
        reads = self._observed.first_reads
        if self._found is None or self._found[0] is not reads or self._found[1] != len(reads):
            self._found = reads, len(reads), _state_of(self._model, self._names_read(includes_own=includes_own))
        return self._found[2]

    def _names_read(self, *, includes_own: bool) -> dict[nn.Module, set[str]]:
        found: dict[nn.Module, set[str]] = defaultdict(set)
        modules, units = dict(self._model.named_modules(remove_duplicate=False)), self._observed.shape_only_by_name
        for name, attribute in self._places_read(includes_own=includes_own):
            if name in modules:  # not removed since
                found[modules[name]].add(attribute)
        own = {part for unit, home in self._home_of.items() if home == self._stage for part in units[unit].original.modules()}
        for module in modules.values():
            if not is_observable(module) and (includes_own or module not in own):
                found[module].update(vars(module), module._buffers)
        reached = self._follower.reached(PythonState(*(shape_only.original for shape_only in units.values())).owners())
        for module in modules.values() if reached else ():
            if id(vars(module)) in reached:  # a unit has it elsewhere than in a child, as in a list
                found[module].update(vars(module))
        return found

    def _places_read(self, *, includes_own: bool) -> Iterator[Place]:
        """Yields the attributes that units and the code around them read, by the names of their modules."""
        yield from (place for reader, place in self._observed.first_reads if includes_own or self._home_of.get(reader) != self._stage)
        for shape_only in self._observed.shape_only_by_name.values():
            yield from shape_only.read_around()


def _state_of(model: nn.Module, names: dict[nn.Module, set[str]]) -> ReadState:
    """Returns the state in these attributes of modules of `model`."""
    entries: list[Entry] = []
    in_classes: dict[type, set[str]] = defaultdict(set)
    methods: dict[FunctionType, None] = {}
    for path, module in model.named_modules():
        for name in names.get(module, set()) - _OF_EVERY_MODULE - module._parameters.keys() - module._modules.keys():
            in_class = getattr_static(type(module), name, None)
            if isinstance(in_class, FunctionType):
                methods[in_class] = None
            if callable(in_class) or hasattr(type(in_class), "__get__") or name in vars(nn.Module):
                continue
            entries.append(Entry(join(path, name), module._buffers if name in module._buffers else vars(module), name))
            for kind in type(module).__mro__:
                if name in vars(kind) and not is_constant_code(kind.__module__):
                    in_classes[kind].add(name)
    functions = list(_of_user(methods))
    entries += _variables_of(functions)
    places = [Entries(entries)] if entries else []
    return ReadState(
        [*places, *(class_place(kind, sorted(own)) for kind, own in in_classes.items())],
        frozenset(name for function in functions for name in names_in(function.__code__)),
    )


def _of_user(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Yields the functions of the user's among these, and those that they call."""
    waiting = [*functions]
    seen = set(waiting)
    for function in waiting:
        if not is_constant_code(function.__module__):
            yield function
            values = (function.__globals__.get(name) for name in globals_in(function.__code__))
            called = [value for value in values if isinstance(value, FunctionType) and value not in seen]
            seen.update(called)
            waiting += called


def _variables_of(functions: Iterable[FunctionType]) -> Iterator[Entry]:
    """Yields the global numbers, texts and tensors that functions use."""
    for function in functions:
        space = function.__globals__
        for name in globals_in(function.__code__):
            if name in space and (type(space[name]) in ATOMS or isinstance(space[name], Tensor)):
                yield Entry(f"{function.__module__}.{name}", space, name)
