"""How methods of a pipeline are called: by all ranks, in numbered steps, and again by those that are left when a rank is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from zerobubble.runtime.failure.frame import Frame
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.session import Session


class Called(Protocol):
    """What has such methods: a pipeline, with the session in which it is, and what makes a call again."""

    _session: Session

    def surviving(self, call: Callable[[], Any], *, adds_gradients: bool = False) -> Any:
        """What `call` gives, made again where a rank has gone and the others go on."""


S = TypeVar("S", bound=Called)
P = ParamSpec("P")
R = TypeVar("R")


def called_by_all(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that every rank must call: whatever stops one of them in it, wrong arguments included, is told to all."""
    return _framed(method, FailureGuard.during)


def plays_steps(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that every rank must call, and whose calls are numbered, so that a rank out of step with the others is found."""
    return _framed(method, FailureGuard.during_call)


def _framed(method: Callable[Concatenate[S, P], R], frame: Callable[[FailureGuard, str], Frame]) -> Callable[Concatenate[S, P], R]:
    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with frame(self._session.guard, f"in {method.__name__}"):
            return method(self, *args, **kwargs)

    return call


def survives(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that those that are left make again when a rank is gone, where the pipeline is to survive that."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.surviving(partial(method, self, *args, **kwargs), adds_gradients=method.__name__ == "step")
        return result

    return call
