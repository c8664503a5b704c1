"""Writes checkpoints while training continues: one at a time, from copies made before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.folder import Draft
from zerobubble.runtime.checkpoint.parts import CheckpointPart
from zerobubble.runtime.checkpoint.ranks import CheckpointRanks, faults_of_all
from zerobubble.runtime.step.hook import StepHook

POLL_INTERVAL_S = 0.02
IDLE_TIMEOUT_S = 120.0
"""Seconds that rank 0 waits for the parts of other ranks if none of them grows."""
IDLE_TIMEOUT_AFTER_END_S = 5.0
"""The same after the pipeline has ended."""


class BackgroundSave:
    """A checkpoint that is being written; `zb.save(..., wait=False)` returns one on every rank."""

    def __init__(self, part: CheckpointPart, draft: Draft | None, schedule: Mapping[str, Any] | None, ranks: CheckpointRanks) -> None:
        self._part = part
        self._draft = draft
        self._schedule = schedule
        self._ranks = ranks
        self._fault_of_part = ""
        self._fault_of_whole = ""
        self._part_is_over = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def done(self) -> bool:
        """Whether this rank has nothing left to write. On rank 0: whether the checkpoint is in place or has failed. Never waits."""
        return self._part_is_over.is_set() and (self._thread is None or not self._thread.is_alive())

    @property
    def is_over(self) -> bool:
        """Whether all ranks have waited for it and know the result."""
        return self._failure is not None

    def wait(self) -> None:
        """Waits until the checkpoint is in place; every rank must call it.

        Raises `InputError` on every rank, with all faults, if it could not be written. The previous checkpoint is then intact, and the
        pipeline stays open. Raises `PipelineError` on every rank if one of them fails in the meantime.
        """
        if self._failure is not None:
            if self._failure:
                raise InputError(self._failure)
            return
        with self._ranks.activity("in zb.save"):
            self._failure = self._conclude()
            if self._failure:
                with self._ranks.agreed_errors():
                    raise InputError(self._failure)

    def write_now(self) -> None:
        """Writes this rank's part before it returns."""
        self._write_part()

    def write_in_background(self) -> None:
        """Writes this rank's part, and on rank 0 completes the checkpoint, on a thread."""
        self._thread = threading.Thread(target=self._write_all, name="zerobubble checkpoint")
        self._thread.start()

    def pipeline_ended(self) -> None:
        """Called when the pipeline has ended: completes the checkpoint only if the other ranks still write their parts."""
        self._ending.set()

    def _conclude(self) -> str:
        """Returns the faults of all ranks; empty if the checkpoint is in place."""
        # No rank publishes or removes the draft before all have written their parts, and none returns before it is in place.
        self._part_is_over.wait()
        fault = faults_of_all(self._ranks, self._fault_of_part, "writing its part of a checkpoint")
        if self._draft is not None and self._thread is not None:
            self._thread.join()
        elif self._draft is not None and not fault:
            self._complete(self._draft)
        fault = faults_of_all(self._ranks, fault or self._fault_of_whole, "putting the checkpoint in its place")
        if fault and self._draft is not None:
            self._draft.remove()
        return fault and f"the checkpoint could not be written: {fault}; the one before it is whole"

    def _write_all(self) -> None:
        self._write_part()
        if self._draft is not None:
            if not self._fault_of_part:
                self._complete(self._draft, self._await_parts)
            self._draft.release()

    def _write_part(self) -> None:
        try:
            self._part.write()
        except Exception as error:  # noqa: BLE001 - wait raises it, whatever it is
            self._fault_of_part = self._describe(error)
        finally:
            self._part_is_over.set()

    def _complete(self, draft: Draft, first: Callable[[], None] = lambda: None) -> None:
        """Puts the checkpoint in place, on rank 0."""
        try:
            first()
            self._part.complete(self._schedule)
            draft.publish()
        except Exception as error:  # noqa: BLE001 - wait raises it, whatever it is
            self._fault_of_whole = self._describe(error)

    def _describe(self, error: Exception) -> str:
        """Returns the failure of this rank as part of a sentence."""
        rank = self._ranks.numbers[self._ranks.rank]
        if isinstance(error, OSError) and error.strerror:
            return f"rank {rank}: {error.strerror} in {error.filename or self._part.folder}"
        return f"rank {rank}: {error}" if isinstance(error, InputError) else f"rank {rank}: {error!r}"

    def _await_parts(self) -> None:
        """Waits for all parts. Raises `OSError` if one has failed, or if nothing arrives any more."""
        num_bytes, since = -1, time.monotonic()
        while missing := self._part.missing():
            now = self._part.num_bytes()
            if now != num_bytes:
                num_bytes, since = now, time.monotonic()
            waited = time.monotonic() - since
            if waited > (IDLE_TIMEOUT_AFTER_END_S if self._ending.is_set() else IDLE_TIMEOUT_S):
                raise OSError(f"rank {self._ranks.numbers[missing[0]]} has written nothing for {waited:.0f} s")
            time.sleep(POLL_INTERVAL_S)


class BackgroundSaves(StepHook):
    """The checkpoint of a pipeline, or of a model, that is being written, and the memory of its copies."""

    def __init__(self) -> None:
        self.copies: dict[MetadataIndex, Tensor] = {}
        self._now: BackgroundSave | None = None

    def start(self, saving: BackgroundSave) -> None:
        """Writes `saving` in the background. No other checkpoint may be in progress."""
        self._now = saving
        saving.write_in_background()

    def finish(self) -> None:
        """Waits for the checkpoint in progress, if any; all ranks call it. Raises like `BackgroundSave.wait` for an unseen error."""
        now, self._now = self._now, None
        if now is not None and not now.is_over:
            now.wait()

    def before_close(self) -> None:
        """Waits for the checkpoint in progress."""
        self.finish()

    def on_close(self) -> None:
        """Lets the checkpoint be completed if all ranks still write their parts, and frees the copies."""
        now, self._now = self._now, None
        if now is not None:
            now.pipeline_ended()
        self.copies = {}
