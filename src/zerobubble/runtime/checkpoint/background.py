"""Checkpoints that are written while training goes on: one at a time, from copies that were made before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.folder import Draft
from zerobubble.runtime.checkpoint.parts import Part
from zerobubble.runtime.checkpoint.together import Together, faults_of_all
from zerobubble.runtime.step.hook import StepHook

LOOKS_EVERY_S = 0.02
PATIENCE_S, PATIENCE_AFTER_END_S = 120.0, 5.0
"""How long rank 0 waits while nothing more of the other ranks' parts arrives: as long as the pipeline lives, and when it has ended."""


class Saving:
    """A checkpoint that is being written; `zb.save(..., wait=False)` gives one on every rank."""

    def __init__(self, part: Part, draft: Draft | None, schedule: Mapping[str, Any] | None, together: Together) -> None:
        self._part = part
        self._draft = draft
        self._schedule = schedule
        self._together = together
        self._fault_of_part = ""
        self._fault_of_whole = ""
        self._part_is_over = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def done(self) -> bool:
        """Whether this rank has nothing left to write: on rank 0, whether the checkpoint is in its place or has failed. Never waits."""
        return self._part_is_over.is_set() and (self._thread is None or not self._thread.is_alive())

    @property
    def is_over(self) -> bool:
        """Whether all ranks have waited for it and heard how it ended."""
        return self._failure is not None

    def wait(self) -> None:
        """Return when the checkpoint is in its place; every rank must call it.

        Raises `InputError` on every rank, with what is wrong on any, where it could not be written: the one before it is still whole,
        and the pipeline stays open. Raises `PipelineError` on every rank when one of them fails meanwhile.
        """
        if self._failure is not None:
            if self._failure:
                raise InputError(self._failure)
            return
        with self._together.activity("while saving a checkpoint"):
            self._failure = self._conclude()
            if self._failure:
                with self._together.alike():
                    raise InputError(self._failure)

    def write_now(self) -> None:
        """Write this rank's part here, before anything else is done."""
        self._write_part()

    def write_in_background(self) -> None:
        """Write this rank's part, and on rank 0 the whole, while training goes on."""
        self._thread = threading.Thread(target=self._write_all, name="zerobubble checkpoint")
        self._thread.start()

    def hurry(self) -> None:
        """The pipeline has ended: complete the checkpoint only if the other ranks still write their parts."""
        self._ending.set()

    def _conclude(self) -> str:
        """What went wrong on any rank, nothing where the checkpoint is in its place."""
        self._part_is_over.wait()
        fault = faults_of_all(self._together, self._fault_of_part, "writing its part of a checkpoint")
        if self._draft is not None and self._thread is not None:
            self._thread.join()
        elif self._draft is not None and not fault:
            self._complete(self._draft)
        fault = faults_of_all(self._together, fault or self._fault_of_whole, "putting the checkpoint in its place")
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
        except Exception as error:  # noqa: BLE001 - wait tells it, whatever it is
            self._fault_of_part = self._told(error)
        finally:
            self._part_is_over.set()

    def _complete(self, draft: Draft, first: Callable[[], None] = lambda: None) -> None:
        """On rank 0: put the checkpoint in its place."""
        try:
            first()
            self._part.complete(self._schedule)
            draft.publish()
        except Exception as error:  # noqa: BLE001 - wait raises it, whatever it is
            self._fault_of_whole = self._told(error)

    def _told(self, error: Exception) -> str:
        """What went wrong on this rank, as a part of a sentence."""
        if isinstance(error, OSError) and error.strerror:
            return f"rank {self._together.rank}: {error.strerror} in {error.filename or self._part.folder}"
        return f"rank {self._together.rank}: {error}" if isinstance(error, InputError) else f"rank {self._together.rank}: {error!r}"

    def _await_parts(self) -> None:
        """Return when all parts are there; raises `OSError` where one has failed, or nothing arrives any more."""
        num_bytes, since = -1, time.monotonic()
        while missing := self._part.missing():
            now = self._part.num_bytes()
            if now != num_bytes:
                num_bytes, since = now, time.monotonic()
            waited = time.monotonic() - since
            if waited > (PATIENCE_AFTER_END_S if self._ending.is_set() else PATIENCE_S):
                raise OSError(f"rank {missing[0]} has written nothing for {waited:.0f} s")
            time.sleep(LOOKS_EVERY_S)


class BackgroundSaves(StepHook):
    """The checkpoint of a pipeline, or of a model, that is being written, and the memory of the copies that it is written from."""

    def __init__(self) -> None:
        self.copies: dict[MetadataIndex, Tensor] = {}
        self._now: Saving | None = None

    def start(self, saving: Saving) -> None:
        """Write in the background; no other checkpoint is being written."""
        self._now = saving
        saving.write_in_background()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; all ranks call it. Raises as `Saving.wait` what nobody has heard yet."""
        now, self._now = self._now, None
        if now is not None and not now.is_over:
            now.wait()

    def before_close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.finish()

    def on_close(self) -> None:
        """Let a checkpoint be completed if all ranks still do their part, and keep nothing for another."""
        now, self._now = self._now, None
        if now is not None:
            now.hurry()
        self.copies = {}
