"""One stage of a cut model: the model's own code, with stand-ins for the units of other stages.

A stage runs the model's code from the start until the last of its own units has returned. The outputs of other stages' units that it needs
arrive over the boundary before it. All other outputs are NaN placeholders (`stand_in.placeholder`), so that no use of them goes unnoticed.

The stand-in for a unit of another stage is compatible with user code that shards, compiles or initializes all units, or registers hooks.
Such code takes effect on the stage of the unit; here, these calls do nothing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import Crossings, ModelCut, crossings
from zerobubble.models.observation.all_parameters import show_all_parameters
from zerobubble.models.observation.assembly import assemble, give_tensors, shallow
from zerobubble.models.observation.dataflow import Dataflow, UnitCall
from zerobubble.models.observation.example import refuse_sums, without_cache
from zerobubble.models.observation.handed_mappings import Put, entries_like, mappings_in, put_into
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.recording import Recorder, install_hooks
from zerobubble.models.observation.stand_in import Current, StandIn, device_of, placeholder, placeholder_like
from zerobubble.models.observation.units import Units
from zerobubble.models.stages.shared_draws import SharedDraws
from zerobubble.runtime.stage.parts import Part
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.random_state import drawn_seed

Leaves = list[Any]
"""The output of a unit's call as it crosses boundaries: its tensors and constants."""

_ARGS, _KWARGS, _CROSSED, _SEED = _MESSAGE = ("_zb_args", "_zb_kwargs", "_zb_crossed", "_zb_seed")
"""Names of the values that a stage sends to the next: the model's arguments, the outputs of units that cross the boundary, and the seed of
shared random numbers, None without any. The names cannot clash with the model's own arguments, which `step` may pass along with them.
"""


class _StageIsDoneError(BaseException):
    """Raised in the forward of a stage after its last unit, to skip the rest of the model's code. A BaseException, so that no `except
    Exception` in a model catches it.
    """


class StageForward:
    """One forward of a stage: the received outputs of other stages' units, and the outputs of its own."""

    def __init__(
        self, flow: Dataflow, received: Mapping[UnitCall, Leaves], last_call: UnitCall | None, draws: SharedDraws | None = None
    ) -> None:
        self.draws = draws
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
            form = stand_in.shape_only.seen(args, kwargs, training=stand_in.training).form
            output, recorded, put = placeholder(form, device_of(args, kwargs), writable=called.changed_later)
        self._recorder.append(recorded)
        put_into(mappings_in(args, kwargs), put)
        return output

    def attribute_set(self, stand_in: StandIn, name: str, value: Any) -> None:
        """Accepts all: attributes set by code around the units were checked when the dataflow was observed."""

    def note(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Records the `output` of one of this stage's units, and returns the caller's value. Raises `_StageIsDoneError` after the last."""
        if self.draws is not None:
            output = self.draws.leave_unit(output)
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
        found = self.made.get(call, self._received.get(call))
        if found is None:
            raise InputError(
                "{call} did not run with this microbatch: the model's code selects its parts by values of its inputs, which a "
                "cut model does not support",
                call=str(call),
            )
        return found

    def _next_call(self, unit: str) -> UnitCall:
        call = UnitCall(unit, self._counts[unit])
        self._counts[unit] += 1
        if call not in self._flow.calls:
            raise InputError(
                "{call} runs with this microbatch and did not run with others like it: the model's code selects its parts by "
                "values of its inputs, which a cut model does not support",
                call=str(call),
            )
        return call


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _arrived(leaf: Any) -> Any:
    """Returns a leaf that leaves the stage; waits for an asynchronous tensor, such as the output of a tensor-parallel layer."""
    return leaf.clone() if isinstance(leaf, AsyncCollectiveTensor) else leaf


class _Current(Current):
    """Holds the current forward of a stage."""

    forward: StageForward

    def __init__(self) -> None:
        self.notes: list[tuple[nn.Module, int]] = []
        """The units with a hook that records their calls, and the hook's id."""

    def enter_unit(self) -> None:
        """Begins a unit of the stage. Without a current forward, the backward pass is recomputing it."""
        forward = getattr(self, "forward", None)
        if forward is not None and forward.draws is not None:
            forward.draws.enter_unit()


class _Boundaries:
    """The boundaries of stage `stage` of a cut, for each kind of arguments of the model."""

    _REMEMBERED = 64

    def __init__(self, observed: ObservedModel, cut: ModelCut, stage: int) -> None:
        self._observed = observed
        self._cut = cut
        self.stage = stage
        self.is_last = stage == cut.num_stages - 1
        self._of_flows: OrderedDict[int, Crossings] = OrderedDict()
        self._has_hooks: frozenset[str] = frozenset()
        self._called_as_modules: set[str] = set()

    def crossings(self, model: nn.Module, current: _Current, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Crossings:
        """Returns what crosses the boundaries in a forward with these arguments of the model."""
        with making_tensors():
            flow = self._observed.flow(args, kwargs, training=model.training)
        self._record(model, current)
        found = self._of_flows.get(id(flow))
        if found is None:
            self._have_modules_called(model)
            found = self._of_flows[id(flow)] = crossings(flow, self._cut)  # holds the flow, so that its id stays unique
            while len(self._of_flows) > self._REMEMBERED:
                self._of_flows.popitem(last=False)
        return found

    def _have_modules_called(self, model: nn.Module) -> None:
        """Redirects direct calls of a unit's `forward` in the model's code to the module."""
        for name, home in self._cut.stage_of.items():
            if home == self.stage and self._observed.shape_only_by_name[name].forward_is_called and name not in self._called_as_modules:
                self._called_as_modules.add(name)
                _call_as_module(model.get_submodule(name))

    def _record(self, model: nn.Module, current: _Current) -> None:
        """Installs recording hooks in the stage's units if forwards record outputs, before the hooks that record their calls."""
        if self._has_hooks != self._observed.has_hooks:
            install_hooks(model, self._observed.has_hooks - self._has_hooks)
            self._has_hooks = self._observed.has_hooks
            for unit, number in current.notes:
                unit._forward_hooks[number] = unit._forward_hooks.pop(number)  # moves it to the end


def stage_model(model: nn.Module, units: Units, observed: ObservedModel, cut: ModelCut, stage: int) -> nn.Module:
    """Returns stage `stage` of `model`: a module of the model's class, with the model's parameter names.

    The first stage is called like the model. It returns a dict, which becomes the named arguments of the next stage: the model's arguments,
    and the outputs of units that cross the boundary. The last stage returns the model's output.
    """
    current = _Current()
    made = assemble(model, units, _unit_maker(observed, cut, stage, current), _parameter_maker(cut, stage))
    show_all_parameters(made, model, units.around, current)
    boundaries = _Boundaries(observed, cut, stage)
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        crossed: list[Leaves] = []
        seed: Tensor | None = None
        if stage > 0:
            args, kwargs, crossed, seed = _unpacked(stage, kwargs)
        else:
            refuse_sums(kwargs)
            kwargs = without_cache(self, kwargs)
        crossing = boundaries.crossings(self, current, args, kwargs)
        if stage == 0 and crossing.shares_draws:
            seed = drawn_seed()
        original = (args, kwargs)
        if crossing.flow.changes_inputs:  # the next stage gets the unchanged inputs
            args, kwargs = pytree.tree_map(_copied, original)
        received = dict(zip(crossing.arriving[stage], crossed, strict=True))
        last_call = None if boundaries.is_last else crossing.last_calls[stage]
        device = device_of(args, kwargs)
        draws = None if seed is None else SharedDraws(seed, device)
        progress = current.forward = StageForward(crossing.flow, received, last_call, draws)
        try:
            if boundaries.is_last:
                return kind.forward(self, *args, **kwargs)
            if last_call is not None:
                kind.forward(self, *args, **kwargs)
        except _StageIsDoneError:
            pass
        finally:
            del current.forward
            if draws is not None:
                draws.close()
        crossed = [list(map(_arrived, progress.leaves_of(call))) for call in crossing.leaving[stage]]
        return {_ARGS: original[0], _KWARGS: original[1], _CROSSED: crossed, _SEED: None if seed is None else seed.to(device)}

    def before_tracing(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Determines the boundaries for these arguments, which needs real values, before tracing replaces them by fake tensors."""
        if stage > 0:
            args, kwargs, *_ = _unpacked(stage, kwargs)
        else:
            kwargs = without_cache(self, kwargs)
        if boundaries.crossings(self, current, args, kwargs).shares_draws:
            raise InputError(
                "the model's code draws random numbers around its parts, as for dropout of a residual sum, for several stages, "
                "but a traced stage cannot share random numbers",
                remedy="train without dropout there, or use split='deferred' for the stage",
            )

    def model_parts(self: nn.Module) -> list[Part]:
        """Returns the units of this stage."""
        names = [name for name, home in cut.stage_of.items() if home == stage]
        return [Part(name, units.block_of.get(name, ""), self.get_submodule(name), units.units[name]) for name in names]

    own = {
        "forward": forward,
        "_before_tracing": before_tracing,
        "model_parts": model_parts,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made.__class__ = type(kind.__name__, (kind,), own)
    return made


def _unit_maker(observed: ObservedModel, cut: ModelCut, stage: int, current: _Current) -> Callable[[str, nn.Module], nn.Module]:
    def make(name: str, unit: nn.Module) -> nn.Module:
        if cut.stage_of[name] == stage:
            return _own_unit(name, unit, current)
        stand_in = RemoteUnit(observed.shape_only_by_name[name], current)
        give_tensors(stand_in, name, unit, _parameter_maker(cut, stage))
        return stand_in

    return make


def _own_unit(name: str, unit: nn.Module, current: _Current) -> nn.Module:
    """Returns a unit of this stage that records its calls.

    A class with a custom `__call__`, such as the checkpointed layers of Transformers, is wrapped outside of it: code inside runs a second
    time in the backward pass. So is a unit with backward hooks, which torch calls after all others, and a compiled unit, which would
    compile a hook. Any other unit gets a hook and keeps its class, by which layers with deferred weight gradients are recognized.
    """
    is_compiled = unit._compiled_call_impl is not None
    made = _one_with(unit) if is_compiled else shallow(unit)
    kind = type(unit)
    if kind.__call__ is nn.Module.__call__ and not (is_compiled or unit._backward_hooks or unit._backward_pre_hooks):
        made.register_forward_pre_hook(lambda *_: current.enter_unit())
        handle = made.register_forward_hook(
            lambda _, args, kwargs, output: current.forward.note(name, args, kwargs, output) if hasattr(current, "forward") else None,
            with_kwargs=True,
        )
        current.notes.append((made, handle.id))
        return made

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current.enter_unit()
        if is_compiled:
            unit.training = self.training
        output = kind.__call__(self, *args, **kwargs)
        return current.forward.note(name, args, kwargs, output) if hasattr(current, "forward") else output

    made.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return made


def _one_with(unit: nn.Module) -> nn.Module:
    """Returns another module with the same `__dict__`: `compile()` has compiled calls of `unit`, which then sees changes made here."""
    made: nn.Module = object.__new__(type(unit))
    made.__dict__.update(unit.__dict__)
    return made


def _call_as_module(unit: nn.Module) -> None:
    """Redirects calls of the `forward` of `unit` to the module, so that its hooks run."""
    run, entered = unit.forward, []
    unit.register_forward_pre_hook(lambda *_: entered.append(True))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not entered:
            return unit(*args, **kwargs)
        entered.clear()
        return run(*args, **kwargs)

    unit.__dict__["forward"] = forward


def _parameter_maker(cut: ModelCut, stage: int) -> Callable[[str, nn.Parameter], Tensor]:
    def make(name: str, parameter: nn.Parameter) -> Tensor:
        if name in cut.parameters[stage]:
            return parameter
        return placeholder_like(parameter, parameter.device).requires_grad_(parameter.requires_grad)  # the model's code may check it

    return make


def _unpacked(stage: int, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Leaves], Tensor | None]:
    """Returns the model's arguments, the values that crossed the boundary before `stage`, and the seed.

    Every stage runs the model's code with the arguments of the first stage. Arguments of the same names passed to later ranks are ignored.
    Raises `InputError` for arguments that the first stage did not get.
    """
    args, kwargs, crossed, seed = (given[name] for name in _MESSAGE)
    own = sorted(given.keys() - set(_MESSAGE) - kwargs.keys())
    if own:
        raise InputError(
            "step(kwargs=...) gives {own} to stage {stage} and not to the first stage, but every stage of a cut model runs "
            "with the arguments of the first",
            own=", ".join(map(repr, own)),
            stage=stage,
            remedy="give them on the rank of the first stage too, by the same names",
        )
    return tuple(args), kwargs, crossed, seed


class RemoteUnit(StandIn):
    """A unit of another stage. `modules()` lists it only during a forward, or if it holds parameters of this stage."""

    @property
    def __class__(self) -> type:
        return type(self.shape_only.unit)

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
