"""The optimizers of a rank, one or several, and when they may use gradients: ready, unscaled and of one kind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.device import is_host
from zerobubble.runtime.failure.guard import CLOSED, FailureGuard
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.units import counted

Optimizers = Optimizer | Sequence[Optimizer]
"""One optimizer, or several that share the parameters of a rank, such as Muon for matrices and AdamW for the rest."""
SAVED_BY = "zerobubble"
"""The entry of a parameter group that identifies the stages and parameters of its state; see `hooks.optimizer_states`."""


def optimizers_in(value: object) -> tuple[Optimizer, ...]:
    """Returns the given optimizers. Raises `InputError` for anything else, for none, and for a parameter in two of them."""
    optimizers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]
    if wrong or not optimizers:
        message = "optimizer must be a torch.optim.Optimizer, or a list of them, got {got}"
        raise InputError(message, argument="optimizer", got=", ".join(wrong) or "an empty list")
    _refuse_repeated(optimizers)
    return optimizers


def _refuse_repeated(optimizers: Sequence[Optimizer]) -> None:
    """Raises `InputError` for a parameter twice in one optimizer, or in two of them."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if len(set(group["params"])) < len(group["params"]):
                message = "{optimizer} holds a parameter twice in its group {number}"
                raise InputError(message, optimizer=type(optimizer).__name__, number=number, remedy="give it each parameter once")
    parameters = list(parameters_of(optimizers))
    if len(set(parameters)) < len(parameters):
        raise InputError(
            "a parameter is in two groups of the optimizers {optimizers}",
            optimizers=kinds_of(optimizers),
            remedy="give each parameter to one group",
        )


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Returns the parameters of some optimizers, group by group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def kinds_of(optimizers: Iterable[Optimizer]) -> str:
    """Returns the names of some optimizers in errors."""
    return ", ".join(sorted(type(optimizer).__name__ for optimizer in optimizers)) or "none"


class GradientScaling:
    """What the last training step did to the gradients of this rank.

    `scaler` is the one given to the step; None without one, or if it is disabled.
    """

    def __init__(self, gradients: Gradients, device: torch.device) -> None:
        self.scaler: GradScaler | None = None
        self._gradients = gradients
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._unscaled: set[Tensor] = set()

    def begin(self, scaler: GradScaler | None) -> None:
        """Begins a training step with this scaler."""
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._unscaled.clear()
        self.seed(scaler)  # torch creates the scale at its first use, and in a step only ranks with a last stage use it

    def seed(self, scaler: GradScaler | None) -> Tensor:
        """Returns the gradient of the mean loss: the current scale of `scaler`, or 1."""
        return self._one if scaler is None else scaler.scale(self._one)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the gradients of `parameters` are about to be unscaled. Raises `InputError` if some already are."""
        held = set(parameters)
        if any(self._gradients.get(parameter) is not None for parameter in held & self._unscaled):
            raise InputError(
                "gradients of the last step are already unscaled",
                remedy="call unscale_ once after each step, with several optimizers as a list",
            )
        self._unscaled |= held

    def fault(self, parameters: Iterable[Tensor]) -> str:
        """Returns why the gradients of `parameters` cannot be used: some are still scaled. Empty if they can."""
        if self.scaler is None:
            return ""
        ready = [parameter for parameter in parameters if self._gradients.get(parameter) is not None]
        scaled = sum(parameter not in self._unscaled for parameter in ready)
        if not scaled:
            return ""
        return (
            f"{scaled} of {len(ready)} gradients are still scaled by {self.scaler.get_scale():g}, because the last step got a scaler: "
            "call pipe.unscale_(scaler, optimizer) first, or give the scaler to PostValidation; give several optimizers as a list"
        )


class SteppingOptimizers:
    """The optimizers that have stepped parameters of this rank, and those that may: only the `validated` ones, in `stepping()`, if any.

    Calls `announce` before gradients are used.
    """

    def __init__(self, guard: FailureGuard, scaling: GradientScaling, announce: Callable[[], None]) -> None:
        self._guard = guard
        self._scaling = scaling
        self._announce = announce
        self.seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.validated: tuple[Optimizer, ...] = ()
        self.has_stepped = False
        """Whether any optimizer of the process has stepped since the last training step, also one of other ranks' parameters alone."""
        self.elsewhere: dict[Tensor, str] = {}
        """Parameters that get their gradients on another rank, since that one uses the arguments that they make, with what these are."""
        self._is_stepping = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the validated optimizers step with gradients whose use was announced before."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def before_step_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Checks that `optimizer` may step these parameters of this rank. Raises `InputError` if their gradients are not ready for it."""
        is_open = self._guard.closed is None
        is_announced = is_open and self._is_announced(optimizer)
        if is_open and not is_announced and (fault := self._scaling.fault(parameters)):
            raise InputError("{optimizer_type}.step(): {fault}", optimizer_type=type(optimizer).__name__, fault=fault)
        if optimizer not in self.seen:
            _refuse_mixed(optimizer)
        self.seen.add(optimizer)
        if self.elsewhere:
            self._warn_of_drift(optimizer)
        if not is_announced and self._guard.closed != CLOSED:
            self._announce()

    def _warn_of_drift(self, optimizer: Optimizer) -> None:
        """Warns, once, of parameters that `optimizer` cannot step on this rank."""
        held = [self.elsewhere[parameter] for parameter in parameters_of([optimizer]) if parameter in self.elsewhere]
        if held:
            self.elsewhere.clear()
            warn_user(
                f"{type(optimizer).__name__} holds {counted(len(held), 'parameter')} that {held[0]} of step are made of, but another rank "
                f"uses these {held[0]}, and gradients are there alone: on this rank the parameters stay as they are. Make them part of the "
                "model, or copy them from that rank after each step, with torch.distributed.broadcast"
            )

    def _is_announced(self, optimizer: Optimizer) -> bool:
        """Whether this step of `optimizer` was announced. Raises `InputError` if a PostValidation does not know the optimizer."""
        if not self.validated or self._is_stepping:
            return self._is_stepping
        kind = type(optimizer).__name__
        if optimizer in self.validated:
            message = "{optimizer}.step() bypasses the PostValidation of this optimizer"
            raise InputError(message, optimizer=kind, remedy="call the step of the PostValidation")
        message = "{got} steps parameters of a pipeline whose PostValidation has {expected}"
        raise InputError(message, got=kind, expected=kinds_of(self.validated), remedy="give it all optimizers, as a list")

    def refuse_partial(self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> None:
        """Raises `InputError` if another optimizer has stepped `parameters` of this rank that `optimizers` do not hold."""
        refuse_left_out(self.seen, optimizers, parameters_left_by(optimizers, parameters), "this pipeline")


def _refuse_mixed(optimizer: Optimizer) -> None:
    """Raises `InputError` if one kernel would step DTensors and plain tensors together, which torch does not support."""
    for number, group in enumerate(optimizer.param_groups):
        is_divided = [hasattr(parameter, "device_mesh") for parameter in group["params"] if parameter.grad is not None]
        if all(is_divided) or not any(is_divided):
            continue
        for way in ("fused", "foreach"):
            by_default = way == "foreach" and _is_foreach_by_default(group)
            if group.get(way) or by_default:
                option, remedy = ("", f"give {way}=False") if by_default else (f"({way}=True)", f"leave out {way}")
                raise InputError(
                    ("{optimizer_type}{given} steps {num_dtensors} and {num_plain} in its group {number}, and one kernel takes one kind"),
                    optimizer_type=type(optimizer).__name__,
                    given=option,
                    num_dtensors=counted(sum(is_divided), "DTensor"),
                    num_plain=counted(is_divided.count(False), "plain tensor"),
                    number=number,
                    remedy=f"make a group for each, or {remedy}",
                )


def _is_foreach_by_default(group: Mapping[str, Any]) -> bool:
    """Whether torch steps this group with one kernel by default, as it does on accelerators."""
    is_asked = "foreach" not in group or group["foreach"] is not None or bool(group.get("fused"))
    return not is_asked and not all(is_host(parameter.device) for parameter in group["params"])


def parameters_left_by(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> set[Tensor]:
    """Returns those of `parameters` that require a gradient and that none of `optimizers` holds."""
    return {parameter for parameter in parameters if parameter.requires_grad}.difference(parameters_of(optimizers))


def refuse_left_out(stepped: Iterable[Optimizer], optimizers: Sequence[Optimizer], left: AbstractSet[Tensor], owner: str) -> None:
    """Raises `InputError` if any optimizer that has `stepped` holds parameters in `left`, which `optimizers` do not hold."""
    others = [optimizer for optimizer in stepped if not left.isdisjoint(parameters_of([optimizer]))]
    if others:
        why = " that {expected} does not hold" if optimizers else ", and no optimizer was given"
        message = f"{{got}} has stepped parameters of {{owner}}{why}"
        remedy = (
            "give all optimizers, as a list" if optimizers else "give it, or save the parameters and buffers alone, with model_only=True"
        )
        raise InputError(message, got=kinds_of(others), owner=owner, expected=kinds_of(optimizers), remedy=remedy)


def refuse_foreign(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], owner: str) -> None:
    """Raises `InputError` if optimizers train others than `parameters`, or none of `parameters` that requires a gradient.

    Other parameters without a gradient and a state are not trained, such as the placeholder of a rank without trainable parameters.
    """
    held, mine = set(parameters_of(optimizers)), set(parameters)
    states = [optimizer.state for optimizer in optimizers]
    trained = [parameter for parameter in held - mine if parameter.grad is not None or any(state.get(parameter) for state in states)]
    if trained or (held.isdisjoint(mine) and any(parameter.requires_grad for parameter in mine)):
        raise InputError(
            "{got} trains {num_foreign} that {owner} does not have, and {num_own} of its {num_parameters}",
            argument="optimizer",
            got=kinds_of(optimizers),
            num_foreign=counted(len(trained) or len(held - mine), "parameter"),
            owner=owner,
            num_own=len(held & mine),
            num_parameters=len(mine),
            remedy=f"give the optimizers that train {owner} alone",
        )


def optimizers_with_state() -> list[Optimizer]:
    """Returns all optimizers of this process that have a state, which they have once they have stepped."""
    return [optimizer for optimizer in live_optimizers() if optimizer.state]


def live_optimizers() -> list[Optimizer]:
    """Returns all optimizers of this process.

    Torch has no list of them, so this asks the garbage collector, after it has removed unused ones.
    """
    if not _optimizers():
        return []
    gc.collect()
    return _optimizers()


def _optimizers() -> list[Optimizer]:
    objects = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))
    return [optimizer for optimizer in objects if hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")]
