"""What the units of a model get from each other, found out by running the code around them, with stand-ins for all units.

The law: nothing here has the numbers of a unit, or runs one. The code around the units runs on the arguments as they are; a unit gives an
output of the right form, which comes from that call alone, and `Following` sees where it goes. Where that code would look at a number that
comes from a unit, it is refused; so what is found holds whatever numbers the units give.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.observation.all_parameters import show_all_parameters
from zerobubble.models.observation.all_parts import refuse_going_through
from zerobubble.models.observation.assembly import assemble, give_tensors
from zerobubble.models.observation.checkpoints import Checkpoints
from zerobubble.models.observation.dataflow import Called, Dataflow, DirectParameter, OutputForm, Sources, Together, UnitCall, kind_of
from zerobubble.models.observation.following import Following, named, storage_of
from zerobubble.models.observation.handed_mappings import Opened, mappings_in, put_into
from zerobubble.models.observation.recording import Recorder, active_lists, make_hooks, models_with_hooks
from zerobubble.models.observation.skeleton import Seen, Skeleton, skeletons_of
from zerobubble.models.observation.stand_in import Current, StandIn, blank, blank_like, device_of, not_of_the_model
from zerobubble.models.observation.units import Units, join
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.runtime.values.random_state import forked

_REMEMBERED = 64
"""For how many kinds of arguments the dataflow is remembered."""


class ObservedModel:
    """A model without its numbers, which tells the dataflow of a forward. Stages share it, in whatever threads they run."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.skeletons = skeletons_of(units.units)
        self._current = Current()
        self._parameters: dict[str, Tensor] = {}
        self._stand_ins: dict[str, nn.Module] = {}
        self._holders = _holders_of_buffers(units)
        self._model = assemble(model, units, self._stand_in, self._blank_parameter)
        show_all_parameters(self._model, model, units.around, self._current)
        self._around = units.around
        self._had_hooks = models_with_hooks(model)
        self.has_hooks: frozenset[str] = frozenset()
        refuse_going_through(self._model, self._current)
        self._modes = [(module, module.training) for module in self._model.modules()]
        # Weakly, for a unit may put another tensor in the place of its buffer, and a new tensor may get the id of one that is gone.
        self._held: Any = WeakTensorKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
        for name, skeleton in self.skeletons.items():
            self._held.update({tensor: join(name, own) for own, tensor in _tensors_of(skeleton.unit)})
        self._sole_holders: Any = WeakTensorKeyDictionary(_sole_holders(model, units, self.skeletons))
        self._buffers: Any = WeakTensorKeyDictionary(
            {buffer: (name, own) for name, unit in units.units.items() for own, buffer in unit._buffers.items() if buffer is not None}
        )
        self._flows: OrderedDict[Any, Dataflow] = OrderedDict()
        self._lock = threading.Lock()

    def _stand_in(self, name: str, unit: nn.Module) -> nn.Module:
        stand_in = self._stand_ins[name] = StandIn(self.skeletons[name], self._current)
        give_tensors(stand_in, name, unit, self._blank_parameter)
        return stand_in

    def _blank_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(blank_like(parameter, parameter.device), requires_grad=parameter.requires_grad)
        self._parameters[name] = made
        return made

    def flow(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Dataflow:
        """The dataflow of a forward with such arguments: of this structure, of these types and with these constants.

        Raises `InputError` where stages that do not hold all units could not run the model's code.
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
        following = Following(self._model.named_buffers(), self._held, self._buffers, self._sole_holders, meta=meta)
        for name, parameter in self._parameters.items():
            following.come_from(parameter, frozenset({DirectParameter(name)}))
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # some code changes its arguments in place
        given = {following.note(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for module, mode in self._modes:
            module.training = training and mode
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self._current.forward = observed = _Observed(following, self._record)
        try:
            with forked(self._parameters, around), torch.no_grad(), following, collecting_losses() as added:
                output = self._model(*args, **kwargs)
                sources = following.sources_in(dict(output) if isinstance(output, Mapping) else output)
        finally:
            del self._current.forward
            for buffer, before in buffers:
                buffer.copy_(before)
        _refuse_losses(added)
        _refuse_changed_behind(following.changed_inside)
        _refuse_stale(following.used & observed.written)
        together = observed.checkpoints.together() + self._sharing(observed.written)
        return Dataflow(observed.calls(), sources, together, not given.isdisjoint(following.written), observed.marked())

    def _sharing(self, written: set[tuple[str, str]]) -> tuple[Together, ...]:
        """Units that hold one buffer, which one of them changes: `written` are units, each with the name of such a buffer of its."""
        found = []
        for unit, name in sorted(written):
            holders = self._holders[unit, name]
            if len(holders) > 1:
                reason = f"both hold buffer {join(unit, name)!r}, which changes in training, and each stage would change its own"
                found.append(Together(holders, reason))
        return tuple(found)

    def _record(self) -> None:
        """Where the forward that runs records outputs, let the units without their numbers have the hooks for it."""
        with not_of_the_model(self._current):
            missing = models_with_hooks(self._model) - self._had_hooks - self.has_hooks
        if missing:
            units = Units(self._stand_ins, self._around, frozenset())
            model = assemble(self._model, units, lambda name, _: self.skeletons[name].unit, lambda _, parameter: parameter)
            make_hooks(model, missing)
            self.has_hooks |= missing


class _Observed:
    """A forward that is observed: each call of a unit with what was seen of it."""

    def __init__(self, following: Following, record: Callable[[], None]) -> None:
        self._following = following
        self._record = record
        self._recorder = Recorder()
        self._counts: dict[str, int] = defaultdict(int)
        self._calls: dict[UnitCall, tuple[Sources, OutputForm, Seen, list[int]]] = {}
        self._marked: list[str | None] = []
        self._marks_inside = 0
        self.checkpoints = Checkpoints()
        self.written: set[tuple[str, str]] = set()

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = stand_in.skeleton.name
        call = UnitCall(name, self._counts[name])
        self._counts[name] += 1
        self._following.changed_inside.pop(name, None)
        _refuse_transformed(name, pytree.tree_leaves((args, kwargs)))
        sources = self._following.sources_in((args, kwargs))
        if active_lists():
            self._record()
        seen = stand_in.skeleton.seen(args, kwargs, training=stand_in.training)
        self._mark(name, seen)
        self.checkpoints.note(name)
        self.written.update((name, buffer) for buffer in seen.written)
        arguments = Opened.of(args, kwargs)
        for changed in seen.changed:
            self._following.was_changed(arguments.leaves[changed], name)
        output, recorded, put = blank(seen.form, device_of(args, kwargs), writable=True)
        tensors = [leaf for leaf in pytree.tree_leaves((output, recorded, put)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._following.come_from(tensor, frozenset({call}))
        with _disable_current_modes():
            on_meta = [torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
            given = OutputForm.of(arguments.closed(on_meta))
        self._calls[call] = (sources, given, seen, [self._following.note(tensor) for tensor in tensors])
        self._recorder.append(recorded)
        put_into(mappings_in(args, kwargs), put)
        return output

    def _mark(self, unit: str, seen: Seen) -> None:
        """Note the calls of `pipe_split()` since the unit before, and those in this one."""
        self._marks_inside += seen.mark == "before"
        new = self._following.marks + self._marks_inside - len(self._marked)
        if new:
            self._marked += [*[None] * (new - 1), unit]
        self._marks_inside += seen.mark == "behind"

    def marked(self) -> tuple[str | None, ...]:
        """The units with which stages begin, as the model's code says by `pipe_split()`."""
        return (*self._marked, *[None] * (self._following.marks + self._marks_inside - len(self._marked)))

    def was_given(self, stand_in: StandIn, name: str, value: Any) -> None:
        """Refuse what flows into a unit past its arguments."""
        sources = self._following.sources_in(value)
        if sources:
            raise InputError(
                f"code of the model sets attribute {name!r} of part {stand_in.skeleton.name!r} to what comes from {named(sources)}; stages "
                "pass on arguments and outputs alone: give it to the part as an argument"
            )

    def calls(self) -> dict[UnitCall, Called]:
        """What was seen of each call."""
        calls = {}
        for call, (sources, given, seen, storages) in self._calls.items():
            changed = any(self._following.has_written_to(storage) for storage in storages)
            calls[call] = Called(call, sources, given, seen.form, seen.flops, changed)
        return calls


def _holders_of_buffers(units: Units) -> dict[tuple[str, str], frozenset[str]]:
    """For each buffer of a unit, by the unit and the buffer's name in it, all units that hold that buffer."""
    holders: dict[int, set[str]] = defaultdict(set)
    places = [(name, own, storage_of(buffer)) for name, unit in units.units.items() for own, buffer in unit.named_buffers()]
    for name, _, storage in places:
        holders[storage].add(name)
    return {(name, own): frozenset(holders[storage]) for name, own, storage in places}


def _sole_holders(model: nn.Module, units: Units, skeletons: Mapping[str, Skeleton]) -> dict[Tensor, str]:
    """The parameters of skeletons that one unit alone holds, with that unit."""
    holders: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name in units.around:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            holders[parameter].add("")
    for name, unit in units.units.items():
        for parameter in unit.parameters():
            holders[parameter].add(name)
    found: dict[Tensor, str] = {}
    for name, unit in units.units.items():
        pairs = zip(unit.parameters(), skeletons[name].unit.parameters(), strict=True)
        found |= {blank: name for parameter, blank in pairs if holders[parameter] == {name}}
    return found


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _refuse_stale(buffers: set[tuple[str, str]]) -> None:
    for unit, name in sorted(buffers):
        raise InputError(
            f"code of the model between its parts uses buffer {name!r} of part {unit!r}, which that part changes; other stages would not "
            "see the change: let the part return what others need"
        )


def _refuse_transformed(unit: str, leaves: list[Any]) -> None:
    """Refuse a call inside of `torch.func.grad` and the like, whose tensors are no other stage's."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise InputError(
                f"the model's code calls part {unit!r} inside of a transform of torch.func, such as grad or vmap, which cannot go through "
                "several stages: transform a function inside of a part, or write it for whole batches and differentiate in loss_fn"
            )


def _refuse_changed_behind(changed: Mapping[str | None, str]) -> None:
    for unit, name in changed.items():
        raise InputError(
            f"code of the model changes parameter {name!r} in place behind the last call of part {unit!r}, where the stage of that part "
            "has left the model's code: change it in the part, before the part is called, or behind optimizer.step()"
        )


def _refuse_losses(added: Mapping[str, Tensor]) -> None:
    if added:
        raise InputError(
            f"the model's code around its parts adds {', '.join(map(repr, added))} to the loss, and that code runs on every stage; call "
            "add_loss in one of the parts, such as a block, or let the model return what loss_fn needs for it"
        )


def _kind_of(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.dtype, tensor.dim()))
