"""Decorators for methods of a pipeline: called by all ranks, counted, or repeated by the survivors if a rank is lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from zerobubble.arguments import bound, takes
from zerobubble.runtime.failure.context import FailureContext
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.session import Session
from zerobubble.runtime.step.runner import StepRunner


class PipelineLike(Protocol):
    """The part of a pipeline that the decorators use: its current session and steps, and a method that repeats calls."""

    _session: Session

    @property
    def _steps(self) -> StepRunner: ...

    def _with_recovery(self, call: Callable[[], Any], *, adds_gradients: bool = False) -> Any:
        """Returns the result of `call`, repeated by the survivors if a rank is lost."""


S = TypeVar("S", bound=PipelineLike)
P = ParamSpec("P")
R = TypeVar("R")


def collective_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wraps a method that every rank must call. Any error in it on one rank, wrong arguments included, is reported to all."""
    return _in_context(takes()(method), FailureGuard.during)


def counted_collective_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wraps a method that every rank must call, and counts its calls, so that a rank with fewer or more calls is detected.

    If all ranks make the same wrong call, such as one with an unknown argument, all raise its `InputError` and the pipeline stays open.
    """
    name, signature = method.__qualname__, inspect.signature(method)

    @wraps(method)
    def refusing(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except TypeError:
            with self._steps.refusals.of_call():
                bound(name, signature, (self, *args), kwargs)
            raise  # from inside the method

    return _in_context(refusing, FailureGuard.during_call)


def _in_context(
    method: Callable[Concatenate[S, P], R], context: Callable[[FailureGuard, str], FailureContext]
) -> Callable[Concatenate[S, P], R]:
    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with context(self._session.guard, f"in {method.__name__}"):
            return method(self, *args, **kwargs)

    return call


def repeated_by_survivors(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wraps a method that the survivors repeat if a rank is lost and the pipeline was made with `survive=True`."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._with_recovery(partial(method, self, *args, **kwargs), adds_gradients=method.__name__ == "step")
        return result

    return call
