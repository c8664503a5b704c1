"""Observes the dataflow between the units of a model, by running the code around them with stand-ins for all units.

Nothing here has a unit's weights or runs one. The code around the units runs on the real arguments. A stand-in returns an output of the
right form, whose source is that call, and `SourceTracker` tracks its uses. Code that reads a value which comes from a unit is refused. So
the observed dataflow is valid for all values that the units may return.

Calls of units are also detected inside of `torch.utils.checkpoint.checkpoint`, and inside of a custom autograd Function, such as Reformer's
reversible layers.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.observation.all_parameters import refuse_going_through, show_all_parameters
from zerobubble.models.observation.assembly import assemble, give_tensors
from zerobubble.models.observation.dataflow import CallRecord, Dataflow, DirectParameter, OutputForm, Sources, Together, UnitCall, kind_of
from zerobubble.models.observation.drawn_around import DrawnAround
from zerobubble.models.observation.equivalent_units import Place
from zerobubble.models.observation.first_reads import recording_first_reads
from zerobubble.models.observation.following import Follower, ModuleSnapshot, frozen_in, is_compound, modules_inside, places_in
from zerobubble.models.observation.handed_mappings import Opened, mappings_in, put_into
from zerobubble.models.observation.recording import Recorder, active_lists, install_hooks, models_with_hooks
from zerobubble.models.observation.shape_only import Seen, ShapeOnlyUnit, shape_only_units
from zerobubble.models.observation.source_tracker import SourceTracker, named, storage_of
from zerobubble.models.observation.stand_in import Current, StandIn, blank, device_of, not_of_the_model, placeholder_like
from zerobubble.models.observation.units import Units, join, modules_outside
from zerobubble.runtime.split.python_state.identity import Identity
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.runtime.values.python_places import Content, GeneratorState, generator_place
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.runtime.values.random_state import devices_with_generators, forked, seed_generators, states_of
from zerobubble.runtime.values.shared_values import sent

_REMEMBERED = 64
"""Maximum number of kinds of arguments in the cache."""


class FirstRead(NamedTuple):
    """A `place` in the model that the unit `reader`, or the code around the units if that is empty, reads before it sets it."""

    reader: str
    place: Place


class ObservedModel:
    """A model without weights, which observes the dataflow of a forward. Stages share it, also across threads."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.shape_only_by_name = shape_only_units(units.units)
        self._given = model
        self._units = units
        self._current = Current()
        self._had_hooks = models_with_hooks(model)
        self.has_hooks: frozenset[str] = frozenset()
        self._flows: OrderedDict[Any, Dataflow] = OrderedDict()
        self.changed: dict[str, set[str]] = defaultdict(set)
        """Names of attributes and buffers that forwards change, by the module around the units that has them."""
        self.changed_late: dict[str, set[str]] = defaultdict(set)
        """The names that forwards change after they have called a unit: stages before the last one may not run that code."""
        self.accumulated: set[tuple[str, str]] = set()
        """The tensors and objects among them, by module and name, that another forward with the same arguments changes again."""
        self._changed_apart: dict[str, set[str]] = defaultdict(set)
        """The names whose objects several stages of a rank would each change: all but those of `ModuleSnapshot.is_named_since`."""
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._assemble()

    def _assemble(self) -> None:
        """Copies the modules around the units, as they are now."""
        model, units = self._given, self._units
        self._parameters: dict[str, Tensor] = {}
        self._stand_ins: dict[str, nn.Module] = {}
        self._flows.clear()
        self.first_reads: set[FirstRead] = set()
        self._holders = _holders_of_buffers(units)
        self._model = assemble(model, units, self._stand_in, self._placeholder_parameter)
        show_all_parameters(self._model, model, units.around, self._current)
        refuse_going_through(self._model, self._current)
        self._modes = [(module, module.training) for module in self._model.modules()]
        # Weak: a unit may replace its buffer, and a new tensor may get the id of a freed one.
        self._held: Any = WeakTensorKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
        for name, shape_only in self.shape_only_by_name.items():
            self._held.update({tensor: join(name, attribute) for attribute, tensor in _tensors_of(shape_only.unit)})
        self._sole_holders: Any = WeakTensorKeyDictionary(_sole_holders(model, units, self.shape_only_by_name))
        self._buffers: Any = WeakTensorKeyDictionary(
            {
                self._stand_ins[name].__dict__[attribute]: (name, attribute)
                for name, unit in units.units.items()
                for attribute, buffer in unit._buffers.items()
                if buffer is not None
            }
        )
        self._python = PythonState(model, self._model)
        outside = modules_outside(model, units).items()
        self._copies = {name: self._model.get_submodule(name) for name, _ in outside}
        self._take_snapshots()
        self._forms = [_form_of(unit) for unit in units.units.values()]

    def _take_snapshots(self) -> None:
        around = self._units.around
        self._snapshots = [
            ModuleSnapshot(module, contents=name not in around) for name, module in modules_outside(self._given, self._units).items()
        ]

    @contextmanager
    def not_changing(self) -> Iterator[None]:
        """A context that gives the model what its forwards have set: no reason to observe it anew, and nothing that stages follow."""
        with self._lock, ExitStack() as stack:
            for follower in self._followers:
                stack.enter_context(follower.not_following())
            is_same = all(snapshot.holds() for snapshot in self._snapshots)
            yield
            if is_same:
                self._take_snapshots()

    def follow(self) -> bool:
        """Observes anew what code around the units may do otherwise, if the model was changed. Returns whether it was."""
        with self._lock:
            is_same = all(snapshot.holds() for snapshot in self._snapshots) and not any(
                shape_only.is_read_differently() for shape_only in self.shape_only_by_name.values()
            )
            if not is_same or self._forms != [_form_of(unit) for unit in self._units.units.values()]:
                self._assemble()
                return True
        return False

    def _stand_in(self, name: str, unit: nn.Module) -> nn.Module:
        stand_in = self._stand_ins[name] = StandIn(self.shape_only_by_name[name], self._current)
        give_tensors(stand_in, name, unit, self._placeholder_parameter)
        return stand_in

    def _placeholder_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        placeholder = nn.Parameter(placeholder_like(parameter, parameter.device), requires_grad=parameter.requires_grad)
        self._parameters[name] = placeholder
        return placeholder

    def flow(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Dataflow:
        """Returns the dataflow of a forward with arguments of this structure, these dtypes and these constants.

        Raises `InputError` if stages without all units could not run the model's code.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (training, repr(structure), *map(_kind_of, leaves))  # torch 2.6 cannot hash a structure
        with self._lock:
            if key not in self._flows:
                self._flows[key] = self._observe(args, kwargs, training)
                while len(self._flows) > _REMEMBERED:
                    self._flows.popitem(last=False)
            return self._flows[key]

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Dataflow:
        around = [leaf for leaf in (*self._model.buffers(), *pytree.tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)]
        meta = any(leaf.is_meta for leaf in around)
        source_tracker = self._tracker(meta=meta)
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # some models change their arguments in place
        inputs = {source_tracker.note(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with self._in_mode(training=training):  # the code of parts may change objects outside of their shape-only copies
            devices = devices_with_generators(self._parameters, around)
            draws = DrawnAround(self._python.generators(), lambda: (source_tracker.draws, states_of(devices)))
            observed = _Observed(source_tracker, self._record, self._states, draws)
            with (
                self._buffers_restored(),
                self._running(observed),
                forked(self._parameters, around),
                torch.no_grad(),
                source_tracker,
                collecting_losses() as added,
            ):
                at_begin = self._states()
                with recording_first_reads(self._copies) as read:
                    output = self._model(*args, **kwargs)
                observed.draws.leave_code(observed.num_calls)
                self._note_changes(at_begin, observed.at_first_call or {})
                sources = source_tracker.sources_in(dict(output) if isinstance(output, Mapping) else output)
            self._note_accumulated(lambda: self._run_again(args, kwargs, around, meta=meta))
        self._separate()
        self.first_reads |= {FirstRead("", place) for place in read} | observed.first_reads()
        _refuse_losses(added)
        _refuse_changed_behind(source_tracker.changed_inside)
        _refuse_stale(source_tracker.used & observed.written)
        together = observed.checkpoints.together() + self._sharing(observed.written)
        return Dataflow(
            observed.calls(),
            sources,
            together,
            changes_inputs=not inputs.isdisjoint(source_tracker.written),
            marked=observed.marked(),
            drawn=observed.draws.drawn(),
            places=frozenset(observed.draws.places),
            reads_draws=source_tracker.reads_draws,
        )

    @contextmanager
    def _in_mode(self, *, training: bool) -> Iterator[None]:
        """A context for forwards of the copy in this mode, after which the Python state is as before; reads all parameters."""
        for module, mode in self._modes:
            module.training = training and mode
        with self._python.restored():
            yield

    @contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)

    @contextmanager
    def _running(self, observed: _Observed) -> Iterator[None]:
        self._current.forward = observed
        try:
            yield
        finally:
            del self._current.forward

    def states_after(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Mapping[str, Content], *, training: bool, seed: int | None
    ) -> dict[str, Content]:
        """Returns the states of these generators after a whole forward that begins with `states`, and with torch's default from `seed`."""
        around = [leaf for leaf in (*self._model.buffers(), *pytree.tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        with self._lock, self._in_mode(training=training), self._buffers_restored(), forked(self._parameters, around):
            generators = self._python.generators()
            for name, content in states.items():
                generators[name].write(content)
            if seed is not None:
                seed_generators(seed, device_of(args, kwargs))
            self._run(args, kwargs, meta=any(leaf.is_meta for leaf in around))
            return {name: generators[name].read() for name in states}

    def generators(self) -> dict[str, GeneratorState]:
        """Returns the generators of Python, NumPy and the code around the units, by path."""
        in_units = tuple(f"{unit}." for unit in self._units.units)
        return {path: generator for path, generator in self._python.generators().items() if not path.startswith(in_units)}

    def _tracker(self, *, meta: bool) -> SourceTracker:
        tracker = SourceTracker(self._model.named_buffers(), self._held, self._buffers, self._sole_holders, meta=meta)
        for name, parameter in self._parameters.items():
            tracker.come_from(parameter, frozenset({DirectParameter(name)}))
        return tracker

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: list[Tensor], *, meta: bool) -> None:
        """Runs a forward whose dataflow is not observed, as far as it can run once more."""
        with suppress(Exception), forked(self._parameters, around):
            self._run(args, kwargs, meta=meta)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, meta: bool) -> None:
        tracker = self._tracker(meta=meta)
        with self._running(_Observed(tracker, self._record, self._states, DrawnAround({}))), torch.no_grad(), tracker, collecting_losses():
            self._model(*args, **kwargs)

    def _note_accumulated(self, run_again: Callable[[], None]) -> None:
        """Notes which changed tensors and objects differ after another forward, such as counts, as far as ranks could share them."""
        before = self._written_objects()
        if before:
            run_again()
            now = self._written_objects()
            self.accumulated.update(place for place, text in before.items() if now.get(place) != text)

    def _written_objects(self) -> dict[tuple[str, str], str]:
        values = {(name, attribute): vars(self._copies[name]).get(attribute) for name, names in self.changed.items() for attribute in names}
        compound = {place: sent(value) for place, value in values.items() if is_compound(value) or isinstance(value, Tensor)}
        return {place: repr(contents) for place, contents in compound.items() if contents is not None}

    def _states(self) -> dict[str, ModuleSnapshot]:
        """Returns the state of each copy of a module around the units."""
        with not_of_the_model(self._current):
            return {name: ModuleSnapshot(module, contents=True) for name, module in self._copies.items()}

    def _note_changes(self, before: Mapping[str, ModuleSnapshot], at_first_call: Mapping[str, ModuleSnapshot]) -> None:
        for name, now in self._states().items():
            for changed, since in ((self.changed, before), (self.changed_late, at_first_call)):
                changes = now.since(since[name]) if name in since else None
                if changes is not None and (names := changes.set_names()):
                    changed[name].update(names)
                    self._changed_apart[name].update(attribute for attribute in names if not now.is_named_since(since[name], attribute))

    def late(self, set_by_call: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """Returns the names that a call of the last stage has or may have set, and other stages may not have set."""
        modules = self.changed_late.keys() | set_by_call.keys()
        late = {name: self.changed_late.get(name, set()) | set_by_call.get(name, set()) - self.changed.get(name, set()) for name in modules}
        return {name: names for name, names in late.items() if names}

    def add(self, follower: Follower) -> None:
        """Adds the follower of a stage.

        Unless that is alone on its rank, its copies get copies of the objects that forwards change, now and whenever others are observed.
        """
        self._followers.add(follower)
        self._separate()

    def _separate(self) -> None:
        for follower in self._followers:
            if not follower.is_alone:
                follower.separate(self._changed_objects())

    def counts(self) -> list[str]:
        """Returns the numbers and buffers around the units that forwards change, and the objects that they accumulate."""
        return [*counts_in(self._model, self.changed), *(join(name, attribute) for name, attribute in sorted(self.accumulated))]

    def _changed_objects(self) -> dict[str, set[str]]:
        """Returns the names of attributes with objects that forwards change, by module around the units."""
        values = {
            (name, attribute): value
            for name, changed in self.changed.items()
            for attribute, value in vars(self._copies[name]).items()
            if attribute in changed & self._changed_apart[name]
            and (is_compound(value) or isinstance(value, Tensor))
            and not modules_inside(value)
            and generator_place("", value) is None
        }
        self._refuse_shared(values)
        return {name: {attribute for holder, attribute in values if holder == name} for name, _ in values}

    def _refuse_shared(self, values: Mapping[tuple[str, str], Any]) -> None:
        """Raises `InputError` if a unit can reach one of these objects."""
        of_units = PythonState(*self._units.units.values()).owners() if values else set()
        for (name, attribute), value in values.items():
            if not of_units.isdisjoint(places_in(value)):
                raise InputError(
                    "the model's code changes {attribute!r} between its parts, and a part uses that object, but a rank has several "
                    "stages, each of which would change it",
                    attribute=join(name, attribute),
                    remedy="pass the value to the part as an argument, or choose a schedule with one stage on each rank, such as 1f1b",
                )

    def _sharing(self, written: set[tuple[str, str]]) -> tuple[Together, ...]:
        """Returns units that share a buffer which one of them changes: `written` has such units, each with the name of the buffer."""
        groups = []
        for unit, name in sorted(written):
            holders = self._holders[unit, name]
            if len(holders) > 1:
                reason = f"both hold buffer {join(unit, name)!r}, which changes in training, and each stage would change its own"
                groups.append(Together(holders, reason))
        return tuple(groups)

    def _record(self) -> None:
        """Installs recording hooks in the shape-only units if the current forward records outputs."""
        with not_of_the_model(self._current):
            missing = models_with_hooks(self._model) - self._had_hooks - self.has_hooks
        if missing:
            units = Units(self._stand_ins, self._units.around, frozenset())
            model = assemble(self._model, units, lambda name, _: self.shape_only_by_name[name].unit, lambda _, parameter: parameter)
            install_hooks(model, missing)
            self.has_hooks |= missing


def counts_in(model: nn.Module, changed: Mapping[str, set[str]]) -> list[str]:
    """Returns the names of the numbers and buffers of `model` among `changed`, the changed names by module."""
    names = [(name, key, model.get_submodule(name)) for name, keys in changed.items() for key in sorted(keys)]
    return [join(name, key) for name, key, part in names if key in part._buffers or type(vars(part).get(key)) in (int, float)]


class _Observed:
    """An observed forward: the observation of each call of a unit."""

    def __init__(
        self,
        source_tracker: SourceTracker,
        record: Callable[[], None],
        states: Callable[[], dict[str, ModuleSnapshot]],
        draws: DrawnAround,
    ) -> None:
        self.draws = draws
        self._states = states
        self.at_first_call: dict[str, ModuleSnapshot] | None = None
        self._tracker = source_tracker
        self._record = record
        self._recorder = Recorder()
        self._counts: dict[str, int] = defaultdict(int)
        self._calls: dict[UnitCall, tuple[Sources, OutputForm, Seen, list[int]]] = {}
        self._marked: list[str | None] = []
        self._marks_inside = 0
        self.checkpoints = Checkpoints()
        self.written: set[tuple[str, str]] = set()

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = stand_in.shape_only.name
        _refuse_transformed(name, pytree.tree_leaves((args, kwargs)))
        self.draws.leave_code(self.num_calls)
        try:
            return self._called(name, stand_in, args, kwargs)
        finally:
            self.draws.leave_unit(name)

    def _called(self, name: str, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.at_first_call is None:
            self.at_first_call = self._states()
        call = UnitCall(name, self._counts[name])
        self._counts[name] += 1
        self._tracker.changed_inside.pop(name, None)
        sources = self._tracker.sources_in((args, kwargs))
        if active_lists():
            self._record()
        seen = stand_in.shape_only.seen(args, kwargs, training=stand_in.training)
        self._mark(name, seen)
        self.checkpoints.note(name)
        self.written.update((name, buffer) for buffer in seen.written)
        arguments = Opened.from_call(args, kwargs)
        for changed in seen.changed:
            self._tracker.was_changed(arguments.leaves[changed], name)
        output, recorded, put = blank(seen.form, device_of(args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((output, recorded, put)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._tracker.come_from(tensor, frozenset({call}))
        with _disable_current_modes():
            on_meta = [torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
            arguments_form = OutputForm.from_output(arguments.closed(on_meta))
        self._calls[call] = (sources, arguments_form, seen, [self._tracker.note(tensor) for tensor in tensors])
        self._recorder.append(recorded)
        put_into(mappings_in(args, kwargs), put)
        return output

    def _mark(self, unit: str, seen: Seen) -> None:
        """Records the calls of `pipe_split()` since the previous unit and inside of this unit."""
        self._marks_inside += seen.mark == "before"
        new = self._tracker.marks + self._marks_inside - len(self._marked)
        if new:
            self._marked += [*[None] * (new - 1), unit]
        self._marks_inside += seen.mark == "behind"

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def first_reads(self) -> set[FirstRead]:
        """Returns what the units read before they set it."""
        return {
            FirstRead(call.unit, Place(f"{call.unit}.{module}".rstrip("."), attribute))
            for call, (*_, seen, _) in self._calls.items()
            for module, attribute in seen.first_reads
        }

    def marked(self) -> tuple[str | None, ...]:
        """Returns the first units of stages, as marked by `pipe_split()` in the model's code."""
        return (*self._marked, *[None] * (self._tracker.marks + self._marks_inside - len(self._marked)))

    def attribute_set(self, stand_in: StandIn, name: str, value: Any) -> None:
        """Refuses values that reach a unit other than through its arguments."""
        sources = self._tracker.sources_in(value)
        if sources:
            raise InputError(
                "code of the model sets attribute {name!r} of part {part!r} to a value from {sources}; stages transfer only "
                "arguments and outputs",
                name=name,
                part=stand_in.shape_only.name,
                sources=named(sources),
                remedy="pass it to the part as an argument",
            )

    def calls(self) -> dict[UnitCall, CallRecord]:
        """Returns the observation of each call."""
        calls = {}
        for call, (sources, arguments_form, seen, storages) in self._calls.items():
            changed = any(self._tracker.has_written_to(storage) for storage in storages)
            calls[call] = CallRecord(call, sources, arguments_form, seen.form, seen.flops, changed)
        return calls


def _form_of(unit: nn.Module) -> tuple[Any, ...]:
    """Returns what code around the units may see of a unit besides its attributes: its class, mode and parameters."""
    return type(unit), unit.training, list(map(Identity, unit._parameters.values())), frozen_in(unit)


def _holders_of_buffers(units: Units) -> dict[tuple[str, str], frozenset[str]]:
    """Returns for each buffer of a unit, by unit and name, all units that hold that buffer."""
    holders: dict[int, set[str]] = defaultdict(set)
    places = [(name, buffer_name, storage_of(buffer)) for name, unit in units.units.items() for buffer_name, buffer in unit.named_buffers()]
    for name, _, storage in places:
        holders[storage].add(name)
    return {(name, buffer_name): frozenset(holders[storage]) for name, buffer_name, storage in places}


def _sole_holders(model: nn.Module, units: Units, shape_only_by_name: Mapping[str, ShapeOnlyUnit]) -> dict[Tensor, str]:
    """Returns the parameters of shape-only units that a single unit holds, with that unit."""
    holders: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name in units.around:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            holders[parameter].add("")
    for name, unit in units.units.items():
        for parameter in unit.parameters():
            holders[parameter].add(name)
    sole: dict[Tensor, str] = {}
    for name, unit in units.units.items():
        now = dict(unit.named_parameters())  # the unit may have got others since
        named = shape_only_by_name[name].unit.named_parameters()
        sole |= {placeholder: name for path, placeholder in named if path in now and holders[now[path]] == {name}}
    return sole


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _refuse_stale(buffers: set[tuple[str, str]]) -> None:
    for unit, name in sorted(buffers):
        raise InputError(
            "code of the model between its parts uses buffer {name!r} of part {unit!r}, which that part changes; other "
            "stages would not see the change",
            name=name,
            unit=unit,
            remedy="let the part return what others need",
        )


def _refuse_transformed(unit: str, leaves: list[Any]) -> None:
    """Refuses calls inside of `torch.func` transforms, whose tensors cannot cross stages."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise InputError(
                "the model's code calls part {unit!r} inside of a transform of torch.func, such as grad or vmap, which cannot "
                "span several stages: transform a function inside of a part, or write it for whole batches and differentiate in "
                "loss_fn",
                unit=unit,
            )


def _refuse_changed_behind(changed: Mapping[str | None, str]) -> None:
    for unit, name in changed.items():
        raise InputError(
            "code of the model changes parameter {name!r} in place after the last call of part {unit!r}, when the stage of "
            "that part has left the model's code",
            name=name,
            unit=unit,
            remedy="change it in the part, before the part is called, or after optimizer.step()",
        )


def _refuse_losses(added: Mapping[str, Tensor]) -> None:
    if added:
        raise InputError(
            "the model's code around its parts adds {losses} to the loss, and that code runs on every stage",
            losses=", ".join(map(repr, added)),
            remedy="call add_loss in one of the parts, such as a block, or let the model return what loss_fn needs for it",
        )


def _kind_of(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.dtype, tensor.dim()))


_REENTRANT = CheckpointFunction.forward.__code__
_CHECKPOINT = getattr(checkpoint, "__wrapped__", checkpoint).__code__


class Checkpoints:
    """The calls of `checkpoint` in one forward, with the units called inside each."""

    def __init__(self) -> None:
        self._units: dict[FrameType, set[str]] = {}

    def note(self, unit: str) -> None:
        """Records a call of `unit`; raises `InputError` inside of code that detaches it from the surrounding graph."""
        for frame in _callers():
            if frame.f_code is _REENTRANT:
                raise InputError(
                    "the model's code calls part {unit!r} inside of torch.utils.checkpoint with use_reentrant=True, where the output "
                    "of the part has no gradient for other stages",
                    unit=unit,
                    remedy="use use_reentrant=False",
                )
            if _is_of_autograd(frame):
                raise InputError(
                    "the model's code calls part {unit!r} inside of the forward of a torch.autograd.Function, where the output of "
                    "the part has no gradient for other stages",
                    unit=unit,
                    remedy="call the part outside of it",
                )
            if frame.f_code is _CHECKPOINT:
                self._units.setdefault(frame, set()).add(unit)

    def together(self) -> tuple[Together, ...]:
        """Returns the units that one call of `checkpoint` runs."""
        reason = (
            "the model's code calls both in one torch.utils.checkpoint, which recomputes them together; checkpoint each part separately"
        )
        return tuple(Together(frozenset(units), reason) for units in self._units.values() if len(units) > 1)


def _is_of_autograd(frame: FrameType) -> bool:
    """Returns whether this frame is the forward of a `torch.autograd.Function`, whose first argument is its context."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return bool(names) and isinstance(frame.f_locals.get(names[0]), FunctionCtx)


def _callers() -> Iterator[FrameType]:
    """Yields the frames around the caller. Its own frame would hold itself, and tensors, if somebody reads its locals."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
