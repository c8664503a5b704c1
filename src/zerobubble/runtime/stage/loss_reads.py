"""Finds what `loss_fn` reads of a cut model that only other stages have: parameters that they train, and attributes that they set.

The user's model is whole on every rank, so `loss_fn` reaches all of it. But a term over other ranks' parameters gives them no gradient
here, and an attribute that a forward sets is missing or stale in all modules that the stage of `loss_fn` does not run itself. A read of
either is a fault. The step then ends without gradients, and all ranks raise the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.stage_with_loss import loss_module, stage_alone
from zerobubble.runtime.stage.cut_model import CutModel, models_of
from zerobubble.runtime.stage.hook_reads import HookReads, hook_fault
from zerobubble.runtime.stage.loss_draws import LossDraws
from zerobubble.runtime.stage.loss_writes import LossWrites
from zerobubble.runtime.stage.set_attributes import SetAttribute, SetsElsewhere
from zerobubble.runtime.values.refusing import Refusing, RefusingList
from zerobubble.runtime.values.stored import ABSENT
from zerobubble.units import counted

_RETURN = "return what loss_fn needs from the model's forward"
_ADD = "compute the term in the part, with zb.nn.add_loss"
_PENALTY = "add the gradient of a penalty after step, by p.grad.add_(...) for p in {pipe}.parameters()"


class LossReads:
    """Finds the reads of `loss_fn`, which the rank of the stage `last` calls. `fault` is the first fault of the current step.

    `hooks` are the ones on parts of other stages. `draws` are the random numbers that it may not draw, and `writes` what it may not set.
    """

    def __init__(
        self,
        cut_model: CutModel | None = None,
        last: nn.Module | None = None,
        hooks: HookReads | None = None,
        draws: LossDraws | None = None,
        writes: LossWrites | None = None,
    ) -> None:
        self.fault: InputError | None = None
        self.hooks = HookReads() if hooks is None else hooks
        self._cut_model = cut_model
        self._draws = draws
        self._writes = writes
        self._last = None if last is None else stage_alone(last)
        self._refusing: dict[tuple[int, str, bool], Refusing | RefusingList] = {}

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Context of a call of `loss_fn`. Raises `InputError` if a hook on another stage of this rank stores what it looks for."""
        if module := self.hooks.stored():
            raise self.note(hook_fault(module))
        with ExitStack() as stack:
            if self._cut_model is not None and (torch.is_grad_enabled() or self._cut_model.is_released):
                stack.enter_context(self._cut_model.refusing_reads(self._refuse_tensor))
            if isinstance(self._last, SetsElsewhere):
                stack.enter_context(self._replaced(self._last.set_elsewhere()))
            if self._draws is not None:
                stack.enter_context(self._draws.refused(self.note))
            if self._writes is not None:
                stack.enter_context(self._writes.refused(self.note))
            yield

    def note(self, fault: InputError) -> InputError:
        """Notes a fault of the current step."""
        self.fault = self.fault or fault
        return fault

    @contextmanager
    def _replaced(self, places: Sequence[SetAttribute]) -> Iterator[None]:
        """A context in which every use of these attributes is a fault."""
        before = [vars(place.module).get(place.name, ABSENT) for place in places]
        for place in places:
            vars(place.module)[place.name] = self._refusing_for(place)
        try:
            yield
        finally:
            for place, value in zip(places, before, strict=True):
                if value is ABSENT:
                    vars(place.module).pop(place.name, None)
                else:
                    vars(place.module)[place.name] = value

    def _refusing_for(self, place: SetAttribute) -> Refusing | RefusingList:
        key = id(place.module), place.name, issubclass(place.kind, (list, tuple))
        if key not in self._refusing:
            tensor = Refusing.made(lambda: self._refuse_attribute(place))
            self._refusing[key] = RefusingList([tensor]) if key[-1] else tensor
        return self._refusing[key]

    def _refuse_attribute(self, place: SetAttribute) -> InputError:
        return self.note(
            InputError(
                "loss_fn reads {name!r} of {module}, which a forward sets, and the last stage has only what its own parts set",
                name=place.name,
                module=repr(place.path) if place.path else "the model",
                remedy=f"{_RETURN}, which is then part of the output, or {_ADD}",
            )
        )

    def _refuse_tensor(self, name: str) -> InputError:
        assert self._cut_model is not None
        trains, penalty = torch.is_grad_enabled(), _PENALTY.format(pipe=self._cut_model.pipe)
        return self.note(
            InputError(
                "{function} reads {name!r}, which is of another rank's stage, and {why}",
                function=self._cut_model.loss_name,
                name=name,
                why="the gradient of this term would be lost" if trains else "this rank does not have its trained values",
                remedy=self._cut_model.instead or f"{f'{penalty}, ' if trains else ''}{_ADD}, or {_RETURN}",
            )
        )


def refuse_model_in_loss(loss_fn: object, last: nn.Module) -> None:
    """Raises `InputError` if `loss_fn` is a module that holds parameters of other stages of the model from which `last` was cut."""
    loss = loss_module(loss_fn)
    if loss is None:
        return
    held, kept = (set(map(id, module.parameters())) for module in (loss, last))
    foreign = [
        name
        for model in models_of(last)
        for name, parameter in model.named_parameters()
        if id(parameter) in held and id(parameter) not in kept
    ]
    if foreign:
        penalty = _PENALTY.format(pipe="pipe")
        raise InputError(
            "loss_fn is a module that holds {parameters} of other stages, such as {name!r}, and the last stage would train copies of them",
            parameters=counted(len(foreign), "parameter"),
            name=foreign[0],
            remedy=f"keep the model out of it: {penalty}, {_ADD}, or {_RETURN}; a loss_fn that calls methods of the model is a function, "
            "lambda output, target: ...",
        )
