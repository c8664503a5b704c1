"""Refuses a call on all ranks together, so that a wrong call leaves the pipeline open instead of ending it.

Order. A call is checked on each rank before anything of it is sent. A rank with a fault first forwards the refusal along the ranks that
wait for the start of the step; a rank that has begun the call receives it there, as `RefusedError`. Then all ranks exchange their faults.
If all have the same fault, or faults only in their batches, all raise the same `InputError`: no message is in flight, so the pipeline stays
open. Otherwise ranks have begun different calls, and the pipeline ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from zerobubble.errors import InputError, ZeroBubbleError, near
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.program_cache import ProgramCache
from zerobubble.runtime.failure.context import AgreedError
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.mailbox.handshake import RefusedError, StepHandshake
from zerobubble.runtime.step.batch import OUTPUTS
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.outputs import Outputs
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.terms import by_rank

_DOING = "refusing a call"


class _Fault(NamedTuple):
    """A fault of a call on one rank; `text` is empty if there is none. `of_batch` is True for a fault of what the rank was given."""

    text: str = ""
    of_batch: bool = False


class CallRefusals:
    """Refuses calls of one pipeline. `gather` returns the value of each rank."""

    def __init__(
        self, peers: Peers, guard: FailureGuard, programs: ProgramCache, losses: StepLosses, gather: Callable[[Any, str], list[Any]]
    ) -> None:
        self._peers = peers
        self._guard = guard
        self._programs = programs
        self._losses = losses
        self._gather = gather
        self._has_compared_dims = False

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """A context for checks of a call: any exception inside is a fault of the call on this rank."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a user's function that makes a schedule may raise anything
            fault = str(error) if isinstance(error, ZeroBubbleError) else f"{type(error).__name__}: {error}"
            self._forward(fault, self._programs.now.forward_handshake)
            self._raise_different(_Fault(fault), self._exchange(_Fault(fault)))

    def of_unknown_dims(self, dims: Iterable[str], names_of_rank: Callable[[], Set[str] | None]) -> None:
        """Raises `InputError` in the first call if `dims`, the names in `batch_dims`, has a name that no rank knows.

        `names_of_rank` returns the names that this rank knows; None if a stage takes every name.
        """
        if self._has_compared_dims or not dims:
            return
        self._has_compared_dims = True
        names = names_of_rank()
        of_ranks = self._gather(None if names is None else sorted(names), "comparing batch_dims")
        if None not in of_ranks and (unknown := sorted(set(dims).difference([OUTPUTS], *of_ranks))):
            of_all = sorted(set().union(*of_ranks))
            raise AgreedError(
                InputError(
                    "batch_dims has {got}, which is not the name of an argument",
                    argument="batch_dims",
                    got=", ".join(map(repr, unknown)),
                    remedy=f"{near(unknown[0], of_all)}the arguments are {', '.join(of_all)}",
                )
            )

    @contextmanager
    def of_batch(self, executor: Executor, outputs: Outputs | None) -> Iterator[None]:
        """A context for reading the batch: an `InputError` inside is a fault of what this rank was given.

        Other ranks may be given nothing, and so have no fault.
        """
        try:
            yield
        except InputError as error:
            self._forward(str(error), executor.handshake)
            self._raise_with_batches(_Fault(str(error), of_batch=True), executor, outputs)

    @contextmanager
    def of_others(self, executor: Executor, outputs: Outputs | None) -> Iterator[None]:
        """A context for the handshake of a step: if another rank refuses the call, this rank raises that rank's faults."""
        try:
            yield
        except RefusedError:
            self._raise_with_batches(_Fault(), executor, outputs)

    def _forward(self, fault: str, handshake: StepHandshake) -> None:
        """Forwards the refusal to the ranks behind this one. Raises if the ranks before it have begun a step."""
        begun = handshake.refuse(self._guard.num_calls)
        if begun is not None:
            raise InputError("{fault} (while others begin {begun})", fault=fault, begun=begun)

    def _raise_with_batches(self, mine: _Fault, executor: Executor, outputs: Outputs | None) -> NoReturn:
        """Raises the faults of all batches, if there are no others.

        Unless all replicas have refused their shares, this ends the pipeline.
        """
        faults = self._exchange(mine)
        if not all(theirs.of_batch for theirs in faults if theirs.text):
            self._raise_different(mine, faults)
        error = InputError("{faults}", faults="; ".join(by_rank(self._peers.members, [theirs.text for theirs in faults])))
        if not all(self._gather(self._losses.all_refuse(str(error), executor.ends[1], outputs), _DOING)):
            raise error
        raise AgreedError(error)

    def _exchange(self, mine: _Fault) -> list[_Fault]:
        return [_Fault(*theirs) for theirs in self._gather(tuple(mine), _DOING)]

    def _raise_different(self, mine: _Fault, faults: list[_Fault]) -> NoReturn:
        """Raises the fault of this rank: as an `AgreedError`, which leaves the pipeline open, if all ranks have it.

        Without a fault of its own, blames a rank that has one, and whose report has the text.
        """
        if all(theirs.text == mine.text for theirs in faults):
            raise AgreedError(InputError(mine.text))
        if mine.text:
            raise InputError(mine.text)
        raise self._peers.lost_contact(next(rank for rank, theirs in enumerate(faults) if theirs.text), _DOING, "it refused the call")
