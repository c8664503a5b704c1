"""The last stage together with a `loss_fn` that is a module: its parameters are the stage's, wherever parameters are looked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from zerobubble.errors import InputError

NAME = "loss_fn"
"""What stands before the names of the loss in the stage."""
_STAGE = "_stage"


class StageWithLoss(nn.Module):
    """The module of the last stage, and `loss_fn` as a part of it that its forward does not call.

    Names of the stage stay as they are. To every walk over modules, parameters and buffers, and in its state, it looks like the stage with
    one more child. It is no container around the stage because its name would stand before all others, and no child is added to the stage
    because a `Sequential` would call it.
    """

    def __init__(self, stage: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self._modules.update({_STAGE: stage, NAME: loss})
        self.forward = stage.forward  # for its signature: calls go to the stage, with its hooks

    @property
    def stage(self) -> nn.Module:
        """The module of the stage alone."""
        found = self._modules[_STAGE]
        assert found is not None
        return found

    @property
    def loss(self) -> nn.Module:
        """The module of the loss."""
        found = self._modules[NAME]
        assert found is not None
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage."""
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
        """Those of the stage, and behind them those of the loss."""
        memo = set() if memo is None else memo
        yield from self.stage.named_modules(memo, prefix, remove_duplicate)
        yield from self.loss.named_modules(memo, _under(prefix), remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The states of both."""
        found = self.stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return self.loss.state_dict(destination=found, prefix=f"{prefix}{NAME}.", keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` gave."""
        of_loss = {name: value for name, value in state_dict.items() if name.startswith(f"{NAME}.")}
        of_stage = {name: value for name, value in state_dict.items() if name not in of_loss}
        found = self.stage.load_state_dict(of_stage, strict, assign)
        more = self.loss.load_state_dict({name.removeprefix(f"{NAME}."): value for name, value in of_loss.items()}, strict, assign)
        missing = [*found.missing_keys, *(f"{NAME}.{name}" for name in more.missing_keys)]
        return type(found)(missing, [*found.unexpected_keys, *(f"{NAME}.{name}" for name in more.unexpected_keys)])


def _under(prefix: str) -> str:
    return f"{prefix}.{NAME}" if prefix else NAME


def stage_alone(module: nn.Module) -> nn.Module:
    """The module of a stage without the loss that it may be together with."""
    return module.stage if isinstance(module, StageWithLoss) else module


def with_loss(module: nn.Module, loss_fn: object) -> nn.Module:
    """The module of the last stage with `loss_fn` where that is a module with anything to keep, to train or to switch to evaluation.

    What the stage holds already is not added. Raises `InputError` where the stage has something else under the name of the loss.
    """
    stage, loss = stage_alone(module), _module_of(loss_fn)
    if loss is None or loss in set(stage.modules()) or not (list(loss.children()) or loss.state_dict()):
        return stage
    taken = [name for name in stage.state_dict() if name.startswith(f"{NAME}.")]
    if taken:
        raise InputError(
            f"the last stage has {taken[0]!r}, a name that the state of loss_fn would have: "
            f"give what the stage has under {NAME!r} as loss_fn, or rename it there"
        )
    return StageWithLoss(stage, loss)


def _module_of(loss_fn: object) -> nn.Module | None:
    """The module that is called, behind partial arguments and as a bound method; None where it cannot be told which one a function uses."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, MethodType) and loss_fn.__func__.__name__ in ("forward", "_wrapped_call_impl"):
        loss_fn = loss_fn.__self__
    return loss_fn if isinstance(loss_fn, nn.Module) else None
