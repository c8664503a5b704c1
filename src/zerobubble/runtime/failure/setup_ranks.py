"""The ranks that create a pipeline together: they gather values and agree on terms, each within the timeout."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerobubble.error_reports.user_code import begin_at_user_code
from zerobubble.errors import InputError
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.failure.report import forget_locals
from zerobubble.runtime.failure.setup_timeout import SetupTimeout
from zerobubble.runtime.transport.terms import Terms, faults_of
from zerobubble.runtime.transport.transport import Transport


class SetupRanks(NamedTuple):
    """The ranks that create a pipeline together. They wait for each other no longer than the timeout in total."""

    transport: Transport
    guard: FailureGuard
    timeout: SetupTimeout

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Returns the `value` of each rank; all ranks must call it."""
        return self.timeout.run(lambda: self.transport.gather_objects(value), doing)

    def gather_by_rank(self, value: Any, doing: str) -> dict[int, Any]:
        """Like `gather`, with the ranks as errors name them."""
        return dict(zip(self.transport.ranks, self.gather(value, doing), strict=True))

    def agree(self, fault: str, terms: Terms, cause: Exception | None = None) -> list[Terms]:
        """Compares `terms` with all ranks, and returns those of each rank.

        If anything is wrong or differs, closes and raises the same `InputError` on every rank, with all faults. On this rank it is raised
        from `cause`, the error of the user's code that `fault` describes, so that its traceback is shown.
        """
        with self.guard.opening("while comparing arguments"):
            gathered = self.gather_by_rank((fault, terms), "comparing arguments")
            faults = faults_of(gathered)
            if faults:
                if cause is not None:
                    forget_locals(cause)
                    begin_at_user_code(cause)
                raise InputError(faults) from cause
        return [theirs for _, theirs in gathered.values()]
