"""Calls of `nn.Module` on a pipeline: an error with the call of the pipeline to make instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from torch import nn

from zerobubble.errors import InputError, near

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_RUN = "pipe.step(inputs, targets) trains on a batch, and pipe.eval_step(inputs) returns outputs"
_MODE = "pipe.eval_step runs stages in evaluation mode, pipe.step in their own: call {name}() on each of pipe.modules.values()"
_PLACE = "give zb.Pipeline(..., device='cuda'), which moves this rank's stages; batches are yours to move"
_DTYPE = "convert the model before zb.split, or call pipe.step inside torch.autocast"
_STAGES = "each rank has its own stages: call {name}(...) on each of pipe.modules.values()"
_GRADIENTS = "pipe.step adds gradients, so clear them with optimizer.zero_grad() of the optimizer over pipe.parameters()"
_WEIGHTS = "zb.gathered(model) brings the trained weights into the model given to zb.split"
_COMPILE = "give zb.Pipeline(..., split='compiled'), which compiles the parts of each stage"
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "accelerate", "deepspeed")
"""Packages that wrap a module in replicas or shards."""
_WRAPPED = "a pipeline is not wrapped: give zb.Pipeline(..., mesh=...) for replicas of it, or for sharded stages"
_LOOKED_UP_TO_COMPILE = "_torchdynamo_orig_callable"
"""The attribute that `torch.compile` looks up first in what it compiles."""
_INSTEAD = {
    **dict.fromkeys(("forward", "train_batch", "train_step", "training_step", "fit", "predict", "run"), _RUN),
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("to", "cuda", "cpu", "xpu", "to_empty"), _PLACE),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), _DTYPE),
    **dict.fromkeys(("module", "model", "generate", "save_pretrained"), _WEIGHTS),
    "backward": "pipe.step has run the backward pass when it returns",
    "zero_grad": _GRADIENTS,
    "no_sync": "several calls of pipe.step before optimizer.step() accumulate gradients",
    "compile": _COMPILE,
    "save": "call zb.save(path, pipe, optimizer) on every rank",
    "load": "call zb.load(path, pipe, optimizer) on every rank",
    "loss": "pipe.step returns the mean loss, and pipe.losses has that of each microbatch",
    "num_stages": "pipe.schedule.num_stages is their number",
    "num_microbatches": "pipe.schedule.num_microbatches is their number",
}
"""What to do in place of a call or attribute that a pipeline does not have. All others of `nn.Module` are those of its stages."""
_CHANGED = {
    "loss_fn": "write one loss function that chooses by a value of your program, which every rank sets",
    "num_microbatches": "call pipe.step(..., num_microbatches=N)",
    "hooks": "call pipe.attach(hook)",
}
"""What to do in place of an assignment to an attribute of a pipeline."""


class MissingNameError(InputError, AttributeError):
    """A pipeline has no such method or attribute."""


class RefusesModuleCalls:
    """A base of `Pipeline`: what it is not is refused with what to call."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `InputError`: call `step` or `eval_step`."""
        raise InputError("a Pipeline cannot be called like a module", remedy=_RUN)

    def __iter__(self) -> Iterator[Any]:
        """Raises `InputError`: iterate over `parameters()` or `modules`."""
        remedy = "pass pipe.parameters() to an optimizer; pipe.modules has the stages of this rank"
        raise InputError("a Pipeline has no elements", remedy=_unless_wrapped(remedy))

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            """Raises `InputError` for an argument or attribute of the pipeline, whose steps would not see the new value."""
            if not name.startswith("_") and "_session" in vars(self) and _is_fixed(self, name):
                remedy = _CHANGED.get(name, "close the pipeline, and create one with the new value")
                raise InputError("{attribute} of a Pipeline cannot be assigned", attribute=name, remedy=remedy)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an `AttributeError` with what to call instead."""
            if name == _LOOKED_UP_TO_COMPILE:
                raise InputError("torch.compile cannot compile a Pipeline", remedy=_COMPILE)
            if name.startswith("_"):
                raise AttributeError(f"'Pipeline' object has no attribute {name!r}", name=name, obj=self)
            remedy = _unless_wrapped(_remedy(name, dir(type(self))))
            raise MissingNameError("a Pipeline has no {attribute}", attribute=name, remedy=remedy)


def _is_fixed(pipeline: RefusesModuleCalls, name: str) -> bool:
    """Returns whether `name` is an argument or attribute of a pipeline. A method may be wrapped."""
    kind = type(pipeline)
    held = getattr(kind, name, None)
    if callable(held):
        return False
    return name in vars(pipeline) or (isinstance(held, property) and held.fset is None) or name in inspect.signature(kind).parameters


def _unless_wrapped(remedy: str) -> str:
    """Returns `remedy`, or that for a wrapper of modules if one makes the call two frames above."""
    return _WRAPPED if sys._getframe(2).f_globals.get("__name__", "").startswith(_WRAPPERS) else remedy


def _remedy(name: str, attributes: Iterable[str]) -> str:
    """Returns what to do in place of the attribute `name` of a pipeline, which has `attributes`."""
    if name in _INSTEAD or hasattr(nn.Module, name):
        return _INSTEAD.get(name, _STAGES).format(name=name)
    return f"{near(name, attributes)}help(zb.Pipeline) lists its methods"


class StageModules(dict[int, nn.Module]):
    """The modules of this rank's stages by index."""

    def __call__(self) -> NoReturn:
        """Raises `InputError`: `modules` of a pipeline is no method."""
        remedy = _unless_wrapped("write pipe.modules.values(), or module.modules() for each of them")
        raise InputError("pipe.modules is a dict of this rank's stages, and is not called", remedy=remedy)


class NotYetCalled(partial[R]):
    """A bound method that says so if it is used in place of its result."""

    def __iter__(self) -> Iterator[Any]:
        """Raises `InputError`: call it first."""
        name = self.func.__name__
        raise InputError("{got} is a method, which is to be called first", got=f"pipe.{name}", remedy=f"write pipe.{name}()")


class called_first(Generic[S, P, R]):  # noqa: N801 - a decorator
    """Decorates a method whose result is an iterable, so that iterating over the method itself is an `InputError`."""

    def __init__(self, method: Callable[Concatenate[S, P], R]) -> None:
        self._method = method
        update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[S, P], R]: ...
    @overload
    def __get__(self, instance: S, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: S | None, owner: type) -> Callable[..., R]:
        """Returns the method, bound to `instance` if there is one."""
        return self._method if instance is None else NotYetCalled(self._method, instance)
