"""The ranks of one pipeline: they agree on what they were given, and what stops one of them stops all, with one error."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.failure.blame import CLOSING, FailureReport, RankStatus
from zerobubble.runtime.failure.watch import FailureWatch, error_of, let_go, why
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.choice import transport_for
from zerobubble.runtime.transport.contact import LostContactError
from zerobubble.runtime.transport.endpoint import Endpoint


class Session:
    """This rank's place among those of `group`, met by all of them when it is made.

    `inside` is what this rank does, in words or the executor that plays, None in code of the user's own. `stages` are those at work.
    `parting(failed)`, a bound method that is held weakly, is called once, when the ranks part.

    Raises `PipelineError` when not all of them come.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, parting: Callable[[bool], None], transport: str | Endpoint) -> None:
        self.inside: str | Executor | None = None
        self.closed: str | None = None
        self.stages: dict[int, Stage] = {}
        self._parting = weakref.WeakMethod(parting)
        try:
            self.transport = transport_for(transport, group, timeout)
        except RuntimeError as error:
            raise PipelineError(f"the ranks of the group did not all come to make a Pipeline: {error}") from error
        self._failure_watch = FailureWatch(self.transport.group, self._doing)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        with self.ending_all("while meeting the other ranks"), self.transport.collective("meeting the other ranks"):
            self.transport.connect()

    def agree(self, fault: str, terms: dict[str, str]) -> None:
        """Compare `terms` with every rank; where something is wrong, raise the same `InputError` on all, with every fault."""
        with self.ending_all("while comparing arguments"), self.transport.collective("comparing arguments"):
            told = self.transport.gather_objects((fault, terms))
        faults = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(told) if theirs]
        for what in dict.fromkeys(name for _, theirs in told for name in theirs):
            found = {rank: theirs[what] for rank, (_, theirs) in enumerate(told) if what in theirs}
            if len(set(found.values())) > 1:
                shown = {rank: value.split(" #")[0] for rank, value in found.items()}
                found = shown if len(set(shown.values())) > 1 else found
                faults.append(f"ranks disagree on the {what}: " + ", ".join(f"rank {rank} has {value}" for rank, value in found.items()))
        if faults:
            self.part("the pipeline was never opened")
            raise InputError("; ".join(faults))

    @contextmanager
    def ending_all(self, when: str) -> Iterator[None]:
        """Whatever stops this rank inside stops them all, and is told as what happened `when`."""
        self.refuse_if_closed()
        around, self.inside = self.inside, when
        try:
            yield
        except PipelineError:
            raise
        except BaseException as error:  # noqa: BLE001 - a rank that is told nothing would wait for this one
            self.fail(error, when)
        finally:
            self.inside = around

    @contextmanager
    def opening(self, when: str) -> Iterator[None]:
        """As `ending_all`, while the pipeline is made: an `InputError` is raised on every rank alike, so each closes and raises its own."""
        around, self.inside = self.inside, when
        try:
            yield
        except InputError:
            self.part("the pipeline was never opened")
            raise
        except BaseException as error:  # noqa: BLE001 - a rank that is told nothing would wait for this one
            self.fail(error, when)
        finally:
            self.inside = around

    @contextmanager
    def playing(self, executor: Executor) -> Iterator[None]:
        """As `ending_all`, for a step: the error names the action in hand."""
        self.refuse_if_closed()
        executor.at = -1
        around, self.inside = self.inside, executor
        try:
            yield
        except BaseException as error:
            if self.closed is not None:  # the optimizer's step failed in validation, and all have been told
                raise
            self.fail(error, *executor.place)
        finally:
            self.inside = around

    def refuse_if_closed(self) -> None:
        """Raise `PipelineError` once the ranks have parted."""
        if self.closed is not None:
            raise PipelineError(f"{self.closed}; make a new Pipeline to go on")

    def fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        """Tell all ranks of `error`, or find out who is lost, part, and raise what all of them raise."""
        lost = isinstance(error, LostContactError)
        if isinstance(error, LostContactError):
            note = self._failure_watch.ask_who_failed(RankStatus(error.what, error.peer, error.reason, action))
        else:
            rank = self.transport.rank
            note = self._failure_watch.report(FailureReport(rank, action, f"rank {rank} failed {when}: {why(error, self.stages)}"))
        self.transport.waiting.forget()
        let_go(error)
        self.part(note.message, note)
        if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit: this process was told to end
            raise error
        raise error_of(note) from (None if lost else error)

    def part(self, reason: str, note: FailureReport | None = None) -> None:
        """Close every connection; with a `note`, after a failure, wait a few seconds for the others to read it."""
        self.closed = reason
        parting = self._parting()
        if parting is not None:
            parting(note is not None)
        self.transport.close()
        self._failure_watch.close(note)

    def _doing(self) -> RankStatus:
        """What this rank says when another waits for it in vain."""
        inside, waits = self.inside, self.transport.waiting.now
        if self.closed is not None:
            return CLOSING
        if inside is None:
            return RankStatus("outside the pipeline, in code of its own")
        if waits is not None:
            return RankStatus(waits[1], waits[0])
        when, action = (inside, "") if isinstance(inside, str) else inside.place
        return RankStatus(when.removeprefix("while "), op=action)


def seal(value: object) -> str:
    """A few letters that differ where `value` does."""
    return "none" if value is None else hashlib.sha256(str(value).encode()).hexdigest()[:8]
