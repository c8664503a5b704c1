"""One stage of a model that was cut: the model's own code, with stand-ins for the units that other stages hold.

The law: a stage runs the model's code from its start, until the last of its own units has given its output. What it needs of other stages'
units comes over the boundary in front of it; all else of theirs is blank (`stand_in.blank`), so that a use of it cannot go unnoticed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.assembly import assemble, place, shallow
from zerobubble.models.cut import Crossings, ModelCut, crossings
from zerobubble.models.dataflow import Dataflow, UnitCall
from zerobubble.models.example import without_cache
from zerobubble.models.observation import ObservedModel
from zerobubble.models.stand_in import Current, StandIn, blank, blank_like, device_of
from zerobubble.models.units import Units, join

Leaves = list[Any]
"""The output of a call of a unit as it crosses boundaries: its tensors, and the constants between them."""

_MESSAGE = frozenset({"args", "kwargs", "crossed"})
"""What a stage gives the next, by name: the model's arguments, and the outputs of units that cross the boundary."""


class _StageIsDoneError(BaseException):
    """Raised in the forward of a stage when it has made all that it makes, to leave the model's code behind that."""


class StageForward:
    """One forward of a stage: what came for the calls of other stages' units, and what the calls of its own have made."""

    def __init__(self, flow: Dataflow, received: Mapping[UnitCall, Leaves], last_call: UnitCall | None) -> None:
        self._flow = flow
        self._received = received
        self._last_call = last_call
        self._counts: dict[str, int] = defaultdict(int)
        self.made: dict[UnitCall, Leaves] = {}

    def stand_in(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of another stage's unit gives here."""
        call = self._next_call(stand_in.skeleton.name)
        called = self._flow.calls[call]
        if call in self._received:
            leaves = self._received[call]
            return called.form.filled([_copied(leaf) for leaf in leaves] if called.changed_later else leaves)
        form = stand_in.skeleton.seen(args, kwargs, training=stand_in.training).form
        return blank(form, device_of(args, kwargs), writable=called.changed_later)

    def note(self, unit: str, output: Any) -> None:
        """A call of one of this stage's units has given `output`; raises where the stage is done with it."""
        call = self._next_call(unit)
        leaves = pytree.tree_leaves(output)
        is_last = call == self._last_call
        self.made[call] = [_copied(leaf) for leaf in leaves] if self._flow.calls[call].changed_later and not is_last else leaves
        if is_last:
            raise _StageIsDoneError

    def leaves_of(self, call: UnitCall) -> Leaves:
        """What is known of a call that a later stage needs."""
        found = self.made.get(call, self._received.get(call))
        if found is None:
            raise InputError(
                f"{call} did not run with this microbatch: either the model's code calls its parts by the numbers of its inputs, which a "
                "model that is cut cannot do, or it calls the part's forward itself: let it call the part as a module"
            )
        return found

    def _next_call(self, unit: str) -> UnitCall:
        call = UnitCall(unit, self._counts[unit])
        self._counts[unit] += 1
        if call not in self._flow.calls:
            raise InputError(
                f"{call} runs with this microbatch and did not run with others like it: the model's code looks at the numbers of its "
                "inputs and calls its parts by them, which a model that is cut cannot do"
            )
        return call


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class _Current(Current):
    """Holds the forward that runs now in a stage."""

    forward: StageForward


class _Boundaries:
    """What stage `stage` of a cut takes and gives, for each kind of arguments of the model."""

    _REMEMBERED = 64

    def __init__(self, observed: ObservedModel, cut: ModelCut, stage: int) -> None:
        self._observed = observed
        self._cut = cut
        self.stage = stage
        self.is_last = stage == cut.num_stages - 1
        self._of_flows: OrderedDict[int, Crossings] = OrderedDict()

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Crossings:
        """What crosses boundaries in a forward with these arguments of the model."""
        flow = self._observed.flow(args, kwargs, training=training)
        found = self._of_flows.get(id(flow))
        if found is None:
            found = self._of_flows[id(flow)] = crossings(flow, self._cut)  # which holds the flow, so that its id stays its own
            while len(self._of_flows) > self._REMEMBERED:
                self._of_flows.popitem(last=False)
        return found


def stage_model(model: nn.Module, units: Units, observed: ObservedModel, cut: ModelCut, stage: int) -> nn.Module:
    """Stage `stage` of `model`: a module of the model's class, whose parameters are named as in the model.

    The first stage is called as the model is. It gives the next stage a dict, which becomes its named arguments: those of the model, and
    the outputs of units that cross the boundary. The last stage gives what the model gives.
    """
    current = _Current()
    made = assemble(model, units, _unit_maker(observed, cut, stage, current), _parameter_maker(cut, stage))
    boundaries = _Boundaries(observed, cut, stage)
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        crossed: list[Leaves] = []
        if stage > 0:
            args, kwargs, crossed = _unpacked(stage, kwargs)
        else:
            kwargs = without_cache(self, kwargs)
        crossing = boundaries.of(args, kwargs, training=self.training)
        received = dict(zip(crossing.arriving[stage], crossed, strict=True))
        last_call = None if boundaries.is_last else crossing.last_calls[stage]
        progress = current.forward = StageForward(crossing.flow, received, last_call)
        try:
            if boundaries.is_last:
                return kind.forward(self, *args, **kwargs)
            if last_call is not None:
                kind.forward(self, *args, **kwargs)
        except _StageIsDoneError:
            pass
        finally:
            del current.forward
        return {"args": args, "kwargs": kwargs, "crossed": [progress.leaves_of(call) for call in crossing.leaving[stage]]}

    def before_tracing(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Find out the boundaries for these arguments, which takes their numbers, before tensors without numbers come in their place."""
        if stage > 0:
            args, kwargs, _ = _unpacked(stage, kwargs)
        else:
            kwargs = without_cache(self, kwargs)
        boundaries.of(args, kwargs, training=self.training)

    own = {"forward": forward, "_before_tracing": before_tracing, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made.__class__ = type(kind.__name__, (kind,), own)
    return made


def _unit_maker(observed: ObservedModel, cut: ModelCut, stage: int, current: _Current) -> Callable[[str, nn.Module], nn.Module]:
    def make(name: str, unit: nn.Module) -> nn.Module:
        if cut.stage_of[name] == stage:
            return _own_unit(name, unit, current)
        stand_in = StandIn(observed.skeletons[name], current)
        make_parameter = _parameter_maker(cut, stage)
        for own, parameter in unit._parameters.items():
            if parameter is not None:
                place(stand_in, own, make_parameter(join(name, own), parameter))
        return stand_in

    return make


def _own_unit(name: str, unit: nn.Module, current: _Current) -> nn.Module:
    """A unit of this stage, which tells of each of its calls.

    A class that has its own `__call__`, such as the checkpointed layers of Transformers, is noted outside of it: what runs inside runs
    again in the backward pass. Any other has a hook and stays of its class, by which layers are known whose gradients wait for W.
    """
    made = shallow(unit)
    kind = type(unit)
    if kind.__call__ is nn.Module.__call__:
        made.register_forward_hook(lambda _, __, output: current.forward.note(name, output))
        return made

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        current.forward.note(name, output)
        return output

    made.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return made


def _parameter_maker(cut: ModelCut, stage: int) -> Callable[[str, nn.Parameter], Tensor]:
    def make(name: str, parameter: nn.Parameter) -> Tensor:
        return parameter if name in cut.parameters[stage] else blank_like(parameter, parameter.device)

    return make


def _unpacked(stage: int, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Leaves]]:
    """The model's arguments and what crossed the boundary in front of `stage`; raises `InputError` for arguments of this stage alone."""
    own = sorted(given.keys() - _MESSAGE)
    if own:
        raise InputError(
            f"step(kwargs=...) gives {', '.join(map(repr, own))} to stage {stage} alone; every stage of a model that is cut runs its "
            "code, so give all of its arguments to the first stage, as inputs"
        )
    args, kwargs, crossed = (given[name] for name in ("args", "kwargs", "crossed"))
    return tuple(args), kwargs, crossed
