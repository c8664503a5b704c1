"""One stage of a cut model: the model's own code, with stand-ins for the units of other stages.

A stage runs the model's code from the start until the last of its own units has returned. The outputs of other stages' units that it needs
arrive over the boundary before it. All other outputs are NaN placeholders (`stand_in.placeholder`), so that no use of them goes unnoticed.

The stand-in for a unit of another stage is compatible with user code that shards, compiles or initializes all units, or registers hooks.
Such code takes effect on the stage of the unit; here, these calls do nothing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import Crossings, ModelCut, calls_before, crossings
from zerobubble.models.observation.all_parameters import show_all_parameters
from zerobubble.models.observation.assembly import (
    ParameterMaker,
    assemble,
    follow_kind,
    give_tensors,
    kind_fault,
    own_class,
    with_own,
)
from zerobubble.models.observation.dataflow import Dataflow, UnitCall
from zerobubble.models.observation.example import refuse_sums, without_cache
from zerobubble.models.observation.following import Changes, Follower
from zerobubble.models.observation.handed_mappings import Put, entries_like, mappings_in, put_into
from zerobubble.models.observation.late_state import held_in, late_state, put_late_state
from zerobubble.models.observation.observed_model import ObservedModel, counts_in
from zerobubble.models.observation.recording import Recorder, install_hooks
from zerobubble.models.observation.seen_tensors import show_on
from zerobubble.models.observation.stand_in import Current, StandIn, device_of, placeholder, placeholder_like
from zerobubble.models.observation.units import Units
from zerobubble.models.stages.code_values import CodeValues
from zerobubble.models.stages.read_elsewhere import ReadElsewhere
from zerobubble.models.stages.set_elsewhere import SetElsewhere
from zerobubble.models.stages.shared_draws import CodeGenerators, DrawsMessage, DrawsMessages, LateDraws, SharedDraws, unpacked
from zerobubble.models.stages.slice_cache import SliceArguments
from zerobubble.runtime.stage.parts import Part
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.far_gradients import Origin
from zerobubble.runtime.values.python_places import GeneratorState
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.runtime.values.random_state import drawn_seed
from zerobubble.runtime.without_weights import refuse_copy

Leaves = list[Any]
"""The output of a unit's call as it crosses boundaries: its tensors and constants."""

_SELECTS = "the model's code selects its parts by values of its inputs or by random numbers, which a cut model does not support"
_SELECT_INSIDE = "decide inside the part, whose forward may return its input"
_ARGS, _KWARGS, _CROSSED, _DRAWS = _MESSAGE = ("_zb_args", "_zb_kwargs", "_zb_crossed", "_zb_draws")
"""Names of the values that a stage sends to the next: the model's arguments, the outputs of units that cross the boundary, and what shared
random numbers begin with. The names cannot clash with the model's own arguments, which `step` may pass along with them.
"""


class _StageIsDoneError(BaseException):
    """Raised in the forward of a stage after its last unit, to skip the rest of the model's code. A BaseException, so that no `except
    Exception` in a model catches it.
    """


class StageForward:
    """One forward of a stage: the received outputs of other stages' units, and the outputs of its own."""

    def __init__(
        self,
        flow: Dataflow,
        received: Mapping[UnitCall, Leaves],
        last_call: UnitCall | None,
        late: LateDraws,
        draws: SharedDraws | None = None,
    ) -> None:
        self.draws = draws
        self._late = late
        self._num_calls = 0
        self._flow = flow
        self._received = received
        self._last_call = last_call
        self._recorder = Recorder()
        self._counts: dict[str, int] = defaultdict(int)
        self.made: dict[UnitCall, Leaves] = {}

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of a call of another stage's unit."""
        call = self._next_call(stand_in.shape_only.name)
        called = self._flow.calls[call]
        if call in self._received:
            leaves = self._received[call]
            output, recorded, put = called.form.filled([_copied(leaf) for leaf in leaves] if called.changed_later else leaves)
        else:
            form = stand_in.shape_only.seen(args, kwargs, training=stand_in.training, restores=True).form
            output, recorded, put = placeholder(form, device_of(args, kwargs), writable=called.changed_later)
        self._recorder.append(recorded)
        put_into(mappings_in(args, kwargs), put)
        return output

    def attribute_set(self, stand_in: StandIn, name: str, value: Any) -> None:
        """Accepts all: attributes set by code around the units were checked when the dataflow was observed."""

    def note(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Records the `output` of one of this stage's units, and returns the caller's value. Raises `_StageIsDoneError` after the last."""
        self._late.leave_unit(unit, self._num_calls + 1)
        if self.draws is not None:
            output = self.draws.leave_unit(unit, output)
        call = self._next_call(unit)
        form, mappings, put = self._flow.calls[call].form, mappings_in(args, kwargs), Put()
        if mappings:
            put = entries_like(form.filled(list(form.leaves))[2], mappings, call)
        leaves = pytree.tree_leaves((output, self._recorder.since_last(), put))
        if len(leaves) != len(form.leaves):
            raise InputError(
                "{call} returns or records other values than when the model was observed with such arguments",
                call=str(call),
                remedy="if the model's configuration was changed since, create a new pipeline",
            )
        is_last = call == self._last_call
        self.made[call] = [_copied(leaf) for leaf in leaves] if self._flow.calls[call].changed_later and not is_last else leaves
        if is_last:
            raise _StageIsDoneError
        return output

    def leaves_of(self, call: UnitCall) -> Leaves:
        """Returns the output of a call that a later stage needs."""
        leaves = self.made.get(call, self._received.get(call))
        if leaves is None:
            raise InputError(
                "{call} did not run with this microbatch: {reason}",
                call=str(call),
                reason=_SELECTS,
                remedy=_SELECT_INSIDE,
            )
        return leaves

    def leave_code(self) -> None:
        """Ends code around the units, before a unit of this stage or at the end of the forward."""
        self._late.leave_code(self._num_calls)

    def _next_call(self, unit: str) -> UnitCall:
        call = UnitCall(unit, self._counts[unit])
        self._counts[unit] += 1
        self._num_calls += 1
        if call not in self._flow.calls:
            raise InputError(
                "{call} runs with this microbatch and did not run with others like it: {reason}",
                call=str(call),
                reason=_SELECTS,
                remedy=_SELECT_INSIDE,
            )
        return call


def _tensors_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _arrived(leaf: Any) -> Any:
    """Returns a leaf that leaves the stage; waits for an asynchronous tensor, such as the output of a tensor-parallel layer."""
    return leaf.clone() if isinstance(leaf, AsyncCollectiveTensor) else leaf


class _Current(Current):
    """Holds the current forward of a stage."""

    forward: StageForward

    def enter_unit(self) -> None:
        """Begins a unit of the stage. Without a current forward, the backward pass is recomputing it."""
        forward = getattr(self, "forward", None)
        if forward is None:
            return
        forward.leave_code()
        if forward.draws is not None:
            forward.draws.enter_unit()


class _Boundaries(NamedTuple):
    """What crosses the boundaries in a forward, and the generators that the code around the units draws from, None without any.

    `late` refuses draws from others.
    """

    crossing: Crossings
    generators: CodeGenerators | None
    late: LateDraws


class _StageCode:
    """The code of a model of class `kind`, as stage `stage` of a cut runs it, with the boundaries for each kind of arguments."""

    _REMEMBERED = 64

    def __init__(
        self,
        observed: ObservedModel,
        cut: ModelCut,
        stage: int,
        kind: type[nn.Module],
        current: _Current,
        refuse_draws: Callable[[Collection[str]], None],
    ) -> None:
        self._observed = observed
        self._refuse_draws = refuse_draws
        self._messages = DrawsMessages()
        self.generators: CodeGenerators | None = None
        """Those of the last forward."""
        self._cut = cut
        self._stage = stage
        self._is_last = stage == cut.num_stages - 1
        self._kind = kind
        self._slices = SliceArguments(kind)
        self._current = current
        self._of_flows: OrderedDict[int, _Boundaries] = OrderedDict()
        self._has_hooks: frozenset[str] = frozenset()
        self._called_as_modules: set[str] = set()

    def run(self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `forward`, the model's own, until the last unit of the stage has returned; see `stage_model` for the values."""
        original, crossed, shared = self._arguments(model, args, kwargs)
        completed = self._slices.completed(model, *original)
        crossing, self.generators, late = self._boundaries(model, *completed)
        draws = self._draws(model, completed, crossing, self.generators, shared)
        # the next stage gets the unchanged inputs
        args, kwargs = pytree.tree_map(_copied, completed) if crossing.flow.changes_inputs else completed
        last_call = None if self._is_last else crossing.last_calls[self._stage]
        if len(crossed) != len(crossing.arriving[self._stage]):
            message = "stage {stage} receives other values than its code uses: {reason}"
            raise InputError(message, stage=self._stage, reason=_SELECTS, remedy=_SELECT_INSIDE)
        received = dict(zip(crossing.arriving[self._stage], crossed, strict=True))
        has_gradients = torch.is_grad_enabled()
        progress = self._current.forward = StageForward(crossing.flow, received, last_call, late, draws)
        late.begin()
        try:
            output = forward(*args, **kwargs) if self._is_last or last_call is not None else None
            progress.leave_code()
            if draws is not None:
                draws.finish()
            if self._is_last:
                return self._slices.without_cache(output)
        except _StageIsDoneError:
            if draws is not None:
                draws.finish()
            torch.set_grad_enabled(has_gradients)  # the skipped code might have
        finally:
            del self._current.forward
            if draws is not None:
                draws.close()
        crossed = [list(map(_arrived, progress.leaves_of(call))) for call in crossing.leaving[self._stage]]
        if self._stage == 0 and draws is not None:
            shared = self._messages.packed(draws, device_of(*completed))
        return {_ARGS: original[0], _KWARGS: original[1], _CROSSED: crossed, _DRAWS: shared}

    def _draws(
        self,
        model: nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        crossing: Crossings,
        generators: CodeGenerators | None,
        shared: DrawsMessage,
    ) -> SharedDraws | None:
        """Returns the random numbers of the code around the units in this forward, None if it draws none that stages share."""
        if generators is None and not crossing.shares_draws:
            return None
        device = device_of(*arguments)
        if self._stage > 0:
            return unpacked(shared, device, generators, is_whole=self._is_last)
        seed, begun, after = drawn_seed() if crossing.shares_draws else None, {} if generators is None else generators.read(), None
        if generators is not None and not self._draws_all(crossing):
            number = None if seed is None else int(seed.item())
            after = self._observed.states_after(*arguments, begun, training=model.training, seed=number)
        return SharedDraws(seed, device, generators, begun, after, is_whole=self._is_last)

    def _draws_all(self, crossing: Crossings) -> bool:
        """Returns whether the stage runs all code that draws from generators of Python, NumPy and the model."""
        last_call = crossing.last_calls[self._stage]
        calls = list(crossing.flow.calls)
        most = len(calls) if self._is_last else -1 if last_call is None else calls.index(last_call)
        return max(crossing.flow.drawn.values()) <= most

    def prepare_tracing(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Determines the boundaries for these arguments, which needs real values, before tracing replaces them by fake tensors."""
        crossing = self.boundaries(model, args, kwargs)
        if crossing.shares_draws or crossing.flow.drawn:
            raise InputError(
                "the model's code draws random numbers around its parts, as for dropout of a residual sum, for several stages, "
                "but a traced stage cannot share random numbers",
                remedy="draw none there, or use split='deferred' for the stage",
            )

    def boundaries(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Crossings:
        """Returns what crosses the boundaries in a forward of the stage. Raises `InputError` if stages cannot run it."""
        original, *_ = self._arguments(model, args, kwargs)
        return self._boundaries(model, *original).crossing

    def origins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Origin]:
        """Returns the origin of each tensor that arrives with these arguments. All may derive from the model's arguments."""
        if self._stage == 0:
            return []
        original, crossed, _ = self._arguments(model, args, kwargs)
        crossing = self._boundaries(model, *original).crossing
        inputs = _tensors_in(original)
        arrived = {call: _tensors_in(leaves) for call, leaves in zip(crossing.arriving[self._stage], crossed, strict=True)}
        before = calls_before(crossing.flow)
        behind = {call: [*inputs, *chain.from_iterable(arrived.get(other, ()) for other in before[call])] for call in arrived}
        return [Origin(call.unit, tensor, behind[call]) for call, tensors in arrived.items() for tensor in tensors]

    def _arguments(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Leaves], DrawsMessage]:
        """Returns the model's arguments, the values that crossed the boundary before this stage, and what shared draws begin with."""
        if self._stage > 0:
            return _unpacked(self._stage, kwargs)
        refuse_sums(model, kwargs)
        return (args, without_cache(model, kwargs, self._kind)), [], (None, None)

    def _boundaries(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Boundaries:
        """Returns the boundaries in a forward with these arguments of the model."""
        with making_tensors():
            flow = self._observed.flow(args, kwargs, training=model.training)
        self._record(model)
        boundaries = self._of_flows.get(id(flow))
        if boundaries is None:
            self._have_modules_called(model)
            self._refuse_draws(flow.drawn)
            generators = CodeGenerators(model, flow.drawn) if flow.drawn else None
            crossing = crossings(flow, self._cut)
            others = {path: generator for path, generator in self._observed.generators().items() if path not in flow.drawn}
            late = LateDraws(others, device_of(args, kwargs), None if crossing.shares_draws else flow.places)
            boundaries = self._of_flows[id(flow)] = _Boundaries(crossing, generators, late)  # holds the flow: its id stays unique
            while len(self._of_flows) > self._REMEMBERED:
                self._of_flows.popitem(last=False)
        return boundaries

    def _have_modules_called(self, model: nn.Module) -> None:
        """Redirects direct calls of a unit's `forward` in the model's code to the module."""
        for name, home in self._cut.stage_of.items():
            if home == self._stage and self._observed.shape_only_by_name[name].forward_is_called and name not in self._called_as_modules:
                self._called_as_modules.add(name)
                _call_as_module(model.get_submodule(name))

    def _record(self, model: nn.Module) -> None:
        """Installs recording hooks in the stage's units if forwards record outputs."""
        if self._has_hooks != self._observed.has_hooks:
            install_hooks(model, self._observed.has_hooks - self._has_hooks)
            self._has_hooks = self._observed.has_hooks


def stage_model(
    model: nn.Module,
    units: Units,
    observed: ObservedModel,
    cut: ModelCut,
    stage: int,
    traced: nn.Module | None = None,
    device: torch.device | None = None,
    *,
    is_alone: bool = True,
    refuse_counts: Callable[[Sequence[str]], None] | None = None,
    code_values: CodeValues | None = None,
    refuse_draws: Callable[[Collection[str]], None] = lambda _: None,
) -> nn.Module:
    """Returns stage `stage` of `model`: a module of the model's class, with the model's parameter names.

    Its stand-ins for parameters of other stages are on `device`, by default where these parameters are. If `model` is a trace, `traced` is
    the user's model, whose changes are refused except for the mode and values of tensors, and so are changes of what its code has read
    elsewhere, the `code_values`. Unless it `is_alone` on its rank, it has copies of lists, dicts and other objects that the code around the
    units changes. With several routes, `refuse_counts` raises `InputError` for numbers and buffers that this code has set.
    `refuse_draws` raises it for generators that this code draws from, if stages cannot share them.

    The first stage is called like the model. It returns a dict, which becomes the named arguments of the next stage: the model's arguments,
    and the outputs of units that cross the boundary. The last stage returns the model's output.
    """
    current, follower = _Current(), Follower(is_alone=is_alone)
    of_trace = _Trace(traced, model, code_values)
    make_parameter = _parameter_maker(cut, stage, device)
    make_unit = _unit_maker(observed, cut, stage, current, follower, make_parameter)
    model_of_stage = assemble(model, units, make_unit, make_parameter, follower)
    observed.add(follower)
    if device is not None:
        for shape_only in observed.shape_only_by_name.values():
            show_on(shape_only.unit, device)
    show_all_parameters(model_of_stage, model, units.around, current)
    code = _StageCode(observed, cut, stage, type(model), current, refuse_draws)
    changes = _ChangesOfModel(model, observed, follower, of_trace, refuse_counts, is_last=stage == cut.num_stages - 1)
    elsewhere = SetElsewhere(model, observed, cut, stage, follower)

    def model_parts(self: nn.Module) -> list[Part]:
        """Returns the units of this stage."""
        names = [name for name, home in cut.stage_of.items() if home == stage]
        return [Part(name, units.block_of.get(name, ""), self.get_submodule(name), units.units[name]) for name in names]

    members: dict[str, Any] = _calls_of(code) | {"model_parts": model_parts, "__deepcopy__": refuse_copy, "__reduce_ex__": refuse_copy}
    members |= {"follow_model": changes.follow_model, "has_state": changes.has_state, "give_back": changes.give_back}
    members |= {"set_elsewhere": elsewhere.attributes, "parts_elsewhere": elsewhere.parts, "set_by_other_parts": elsewhere.of_other_units}
    members |= {"read_elsewhere": ReadElsewhere(model, observed, cut, stage, follower).state}
    model_of_stage.__class__ = with_own(type(model), members)
    return model_of_stage


def _calls_of(code: _StageCode) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a stage that run its `code`, or look at its arguments."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return code.run(self, super(own_class(self), self).forward, args, kwargs)

    def before_tracing(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        code.prepare_tracing(self, args, kwargs)

    def refuse_call(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `InputError` if stages cannot run a forward with these arguments."""
        code.boundaries(self, args, kwargs)

    def origins(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Origin]:
        """Returns the origin of each tensor that arrives with these arguments."""
        return code.origins(self, args, kwargs)

    def shared_generators(self: nn.Module) -> Collection[GeneratorState]:
        """Returns the generators from which the code around the units has drawn in the last forward."""
        return () if code.generators is None else code.generators.all()

    called = {"forward": forward, "_before_tracing": before_tracing, "refuse_call": refuse_call, "origins": origins}
    return {**called, "shared_generators": shared_generators}


class _Trace:
    """Refuses changes that the trace `model` of the user's model `traced` lacks; without a trace, `traced` and `code_values` are None."""

    def __init__(self, traced: nn.Module | None, model: nn.Module, code_values: CodeValues | None) -> None:
        self._follower = Follower()
        self._code_values = code_values
        for name, module in () if traced is None else traced.named_modules():
            assert traced is not None
            self._follower.add(name, module, _InTrace(name, module, traced, model), contents=True)

    def follow(self) -> None:
        """Makes changes of the mode. Raises `InputError` for all others."""
        self._follower.follow()
        if self._code_values is not None:
            self._code_values.refuse_changes()


class _ChangesOfModel:
    """Implements `FollowsModel`: makes changes of `model` in a stage, and gives the model what the stage has set."""

    def __init__(
        self,
        model: nn.Module,
        observed: ObservedModel,
        follower: Follower,
        of_trace: _Trace,
        refuse_counts: Callable[[Sequence[str]], None] | None,
        *,
        is_last: bool,
    ) -> None:
        self._model = model
        self._observed = observed
        self._follower = follower
        self._of_trace = of_trace
        self._refuse_counts = refuse_counts
        self._is_last = is_last

    def follow_model(self) -> bool:
        """Makes the changes of the model since the last call in the stage, and returns whether messages may change."""
        with making_tensors():
            self._of_trace.follow()
            self._follower.follow()
            return self._observed.follow()

    def has_state(self) -> bool:
        """Returns whether this is the last stage and has set what others may not."""
        set_by_call = self._follower.set_by_call()
        return self._gives(set_by_call) and bool(self._refuse_counts is not None or self._observed.late(set_by_call))

    def _gives(self, set_by_call: Mapping[str, set[str]]) -> bool:
        """Returns whether this is the last stage, on a route of the call: an evaluation takes only one."""
        return self._is_last and (self._refuse_counts is None or bool(set_by_call))

    def give_back(self, share: Callable[[Any], Any] | None) -> None:
        """Gives the model what the code around its parts has set since `follow_model`."""
        set_by_call = self._follower.set_by_call()
        if share is None and not set_by_call:
            return
        counts: list[str] = []
        with making_tensors(), torch.no_grad(), self._observed.not_changing():
            names = self._observed.late(set_by_call) if share is not None and self._gives(set_by_call) else {}
            before = held_in(self._model, names)
            self._follower.give_back()
            if share is not None:
                state = late_state(held_in(self._model, names), before)
                mine = (state, counts_in(self._model, set_by_call)) if self._gives(set_by_call) else None
                late, counts = share(mine)
                if mine is None:
                    put_late_state(self._model, late)
        if self._refuse_counts is not None:
            self._refuse_counts(counts)


def _unit_maker(
    observed: ObservedModel, cut: ModelCut, stage: int, current: _Current, follower: Follower, make_parameter: ParameterMaker
) -> Callable[[str, nn.Module], nn.Module]:
    @cache
    def reached() -> set[int]:
        return follower.reached(PythonState(*units_here).owners())

    def showing() -> AbstractContextManager[None]:
        return follower.shown(reached()) if reached() else nullcontext()

    units_here: list[nn.Module] = []

    def make(name: str, unit: nn.Module) -> nn.Module:
        if cut.stage_of[name] == stage:
            units_here.append(unit)
            recording = _own_unit(name, unit, current, showing)
            follower.add(name, unit, _OwnUnit(unit, recording), contents=False)
            return recording
        stand_in = RemoteUnit(observed.shape_only_by_name[name], current)
        give_tensors(stand_in, name, unit, make_parameter)
        follower.add(name, unit, _Remote(name, unit, stand_in, make_parameter), contents=False)
        return stand_in

    return make


def _own_unit(name: str, unit: nn.Module, current: _Current, showing: Callable[[], AbstractContextManager[None]]) -> nn.Module:
    """Returns a unit of this stage that records its calls: another module with the same `__dict__`, so that both share all changes.

    In the context `showing`, the model has what the code around the units has set so far.

    It records outside of the class's own `__call__`, because code inside of a checkpointed layer's `__call__` in Transformers runs a second
    time in the backward pass.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current.enter_unit()
        with showing():
            output = super(own_class(self), self).__call__(*args, **kwargs)
        return current.forward.note(name, args, kwargs, output) if hasattr(current, "forward") else output

    recording: nn.Module = object.__new__(with_own(type(unit), {"__call__": call}))
    recording.__dict__ = unit.__dict__
    return recording


class _OwnUnit(NamedTuple):
    """A unit of this stage, which has another class than the `module` of the model."""

    module: nn.Module
    copy: nn.Module

    def fault(self, changes: Changes) -> str:
        return kind_fault(self.copy, self.module, changes)

    def follow(self, changes: Changes) -> None:
        if changes.kind:
            follow_kind(self.copy, self.module)


class _Remote(NamedTuple):
    """The stand-in for a unit of another stage, with the parameters and the mode of the unit."""

    name: str
    module: nn.Module
    copy: RemoteUnit
    make_parameter: ParameterMaker

    def fault(self, _: Changes) -> str:
        return ""

    def follow(self, changes: Changes) -> None:
        self.copy.training = self.module.training
        for name in (*changes.entries.get("_parameters", ()), *changes.entries.get("_buffers", ())):
            self.copy._parameters.pop(name, None)
            self.copy.__dict__.pop(name, None)
        give_tensors(self.copy, self.name, self.module, self.make_parameter)


class _InTrace(NamedTuple):
    """A `module` of a traced model `root`. `trace` has the operations, tensors and mode of the model."""

    name: str
    module: nn.Module
    root: nn.Module
    trace: nn.Module

    def fault(self, changes: Changes) -> str:
        faults = ["the class"] * changes.kind + [f"attribute {name!r}" for name in changes.attributes if name != "training"]
        tensors = {**self.module._parameters, **self.module._buffers}
        for kind, names in changes.entries.items():
            if kind not in ("_modules", "_parameters", "_buffers"):
                faults.append(f"hooks ({kind.strip('_')})")
                continue
            faults += [f"{kind.strip('_')} {name!r}" for name in names if kind == "_modules" or not self._has(tensors.get(name), name)]
        if "training" in changes.attributes and self.module.training is not self.root.training:
            faults.append("the mode")
        return ", ".join(faults)

    def _has(self, tensor: Tensor | None, name: Any) -> bool:
        """Returns whether the trace has this tensor of the module."""
        if tensor is None:
            return False
        full = f"{self.name}.{name}" if self.name else name
        find = self.trace.get_parameter if isinstance(tensor, nn.Parameter) else self.trace.get_buffer
        return find(full) is tensor

    def follow(self, changes: Changes) -> None:
        if not self.name and "training" in changes.attributes:
            self.trace.train(self.module.training)


def _call_as_module(unit: nn.Module) -> None:
    """Redirects calls of the `forward` of `unit`, a unit of this stage, to the module, so that its hooks run."""
    kind = own_class(unit)
    forward = _ForwardOfModule(kind.forward)

    def call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward.entered.append(self)
        return super(kind, self)._call_impl(*args, **kwargs)

    kind._call_impl, kind.forward = call_impl, forward


class _ForwardOfModule:
    """The attribute `forward` of a unit: inside of a call of the module, its forward; otherwise a function that calls the module."""

    def __init__(self, of_class: Callable[..., Any]) -> None:
        self._of_class = of_class
        self.entered: list[nn.Module] = []

    def __get__(self, unit: nn.Module | None, kind: type | None = None) -> Callable[..., Any]:
        if unit is None:
            return self._of_class

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.entered:
                return unit(*args, **kwargs)
            self.entered.clear()
            return unit.__dict__.get("forward", partial(self._of_class, unit))(*args, **kwargs)

        return forward

    def __set__(self, unit: nn.Module, value: Any) -> None:
        unit.__dict__["forward"] = value


def _parameter_maker(cut: ModelCut, stage: int, device: torch.device | None) -> Callable[[str, nn.Parameter], Tensor]:
    def make(name: str, parameter: nn.Parameter) -> Tensor:
        if name in cut.parameters[stage]:
            return parameter
        placeholder = placeholder_like(parameter, parameter.device if device is None else device)
        return placeholder.requires_grad_(parameter.requires_grad)  # the model's code may check it

    return make


def _unpacked(stage: int, kwargs_given: dict[str, Any]) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Leaves], DrawsMessage]:
    """Returns what `_StageCode._arguments` does, for a later stage.

    Every stage runs the model's code with the arguments of the first stage. Arguments of the same names passed to later ranks are ignored.
    Raises `InputError` for arguments that the first stage did not get.
    """
    args, kwargs, crossed, shared = (kwargs_given[name] for name in _MESSAGE)
    unknown = sorted(kwargs_given.keys() - set(_MESSAGE) - kwargs.keys())
    if unknown:
        raise InputError(
            "step(kwargs=...) gives {own} to stage {stage} and not to the first stage, but every stage of a cut model runs "
            "with the arguments of the first",
            own=", ".join(map(repr, unknown)),
            stage=stage,
            remedy="give them on the rank of the first stage too, by the same names",
        )
    return (tuple(args), kwargs), crossed, shared


class RemoteUnit(StandIn):
    """A unit of another stage. `modules()` lists it only during a forward, or if it holds parameters of this stage."""

    @property
    def __class__(self) -> type:
        return type(self.shape_only.original)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Ignores a change of class, as by `fully_shard`. Raises `InputError` if that would shard parameters."""
        if self._parameters:
            raise InputError(
                "part {name!r} is in another stage, and this one shares its {parameters}",
                name=self.shape_only.name,
                parameters=", ".join(self._parameters),
                remedy="leave it out here and apply fully_shard to the whole stage",
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields itself if it is visible."""
        if self._parameters or hasattr(self._current, "forward"):
            yield from super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> RemoteUnit:
        """Does nothing: `fn` applies on the stage of the unit."""
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        """Does nothing: the unit is compiled on its own stage."""

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        """Registers nothing: hooks run on the stage of the unit."""
        return RemovableHandle(OrderedDict())

    register_full_backward_hook = register_full_backward_pre_hook = register_forward_pre_hook
