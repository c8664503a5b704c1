"""Combines the last stage with a `loss_fn` that is a module, so that the stage's parameters include the parameters of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from zerobubble.errors import InputError

NAME = "loss_fn"
"""Prefix of the loss's names in the stage."""
_STAGE = "_stage"


class StageWithLoss(nn.Module):
    """The module of the last stage with `loss_fn` as an additional child that its forward does not call.

    The names of the stage stay unchanged. Iteration over modules, parameters and buffers, and the state dict, show the stage with one more
    child. A plain container would prefix all names of the stage. A child added to the stage itself would be called if the stage is a
    `Sequential`.
    """

    def __init__(self, stage: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self._modules.update({_STAGE: stage, NAME: loss})
        self.forward = stage.forward  # only for its signature: `__call__` calls the stage, with its hooks

    @property
    def stage(self) -> nn.Module:
        """The module of the stage without the loss."""
        stage = self._modules[_STAGE]
        assert stage is not None
        return stage

    @property
    def loss(self) -> nn.Module:
        """The module of the loss."""
        loss = self._modules[NAME]
        assert loss is not None
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the stage."""
        return self.stage(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            stage = self.__dict__.get("_modules", {}).get(_STAGE)
            if stage is None:
                raise
            return getattr(stage, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the stage, then the modules of the loss."""
        memo = set() if memo is None else memo
        yield from self.stage.named_modules(memo, prefix, remove_duplicate)
        yield from self.loss.named_modules(memo, f"{prefix}.{NAME}".removeprefix("."), remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns the state of the stage and the loss."""
        state = self.stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return self.loss.state_dict(destination=state, prefix=f"{prefix}{NAME}.", keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the result of `state_dict`."""
        of_loss = {name: value for name, value in state_dict.items() if name.startswith(f"{NAME}.")}
        of_stage = {name: value for name, value in state_dict.items() if name not in of_loss}
        keys = self.stage.load_state_dict(of_stage, strict, assign)
        more = self.loss.load_state_dict({name.removeprefix(f"{NAME}."): value for name, value in of_loss.items()}, strict, assign)
        missing = [*keys.missing_keys, *(f"{NAME}.{name}" for name in more.missing_keys)]
        return type(keys)(missing, [*keys.unexpected_keys, *(f"{NAME}.{name}" for name in more.unexpected_keys)])


def stage_alone(module: nn.Module) -> nn.Module:
    """Returns the module of a stage without the loss, if it has one."""
    return module.stage if isinstance(module, StageWithLoss) else module


def with_loss(module: nn.Module, loss_fn: object) -> nn.Module:
    """Returns the module of the last stage, combined with `loss_fn` if that is a module with state, parameters or children.

    A loss that is already part of the stage is not added. Raises `InputError` if the stage uses the name of the loss for something else.
    """
    stage, loss = stage_alone(module), loss_module(loss_fn)
    if loss is None or loss in set(stage.modules()) or not (list(loss.children()) or loss.state_dict()):
        return stage
    taken = [name for name in stage.state_dict() if name.startswith(f"{NAME}.")]
    if taken:
        message = "the last stage has {taken!r}, a name that the state of loss_fn would have"
        raise InputError(message, taken=taken[0], remedy=f"give what the stage has under {NAME!r} as loss_fn, or rename it there")
    return StageWithLoss(stage, loss)


def loss_module(loss_fn: object) -> nn.Module | None:
    """Returns the module behind partial arguments or a bound method; None if `loss_fn` is an opaque function."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, MethodType) and loss_fn.__func__.__name__ in ("forward", "_wrapped_call_impl"):
        loss_fn = loss_fn.__self__
    return loss_fn if isinstance(loss_fn, nn.Module) else None
