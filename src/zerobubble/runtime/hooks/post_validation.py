"""`PostValidation`: the optimizer's step of every rank at once, judged afterwards, and taken back where it should have been another.

What a step must know of all ranks goes down the ranks on a `ledger`: each writes its norms, and steps if what is written so far needs
neither clipping nor skipping. The last rank reads the whole and tells all others. They read it in the next step of the pipeline, when they
have run the forwards before their rollback point. Where some rank had to wait, all undo their steps, make the exact one, and start over.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (post-update validation); the rollback points are this project's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.clip import counted, norms_of
from zerobubble.runtime.hooks.forward_snapshot import Snapshot
from zerobubble.runtime.hooks.norm_ledger import NormLedger, NormsOfAll, NormsSoFar, dtypes_of
from zerobubble.runtime.hooks.undo_by_arithmetic import ByFormula, why_not
from zerobubble.runtime.hooks.undo_by_copy import SavedCopy
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.transport.control import Expected, Sending
from zerobubble.runtime.values.gradients import IN_GRAD

_STEPPING, _VALIDATING = "while stepping the optimizer", "while validating the optimizer's step"

Way = Literal["copy", "arithmetic"]


class PostValidation:
    """An optimizer around `optimizer`, this rank's, that clips by the norm of the whole model's gradients without waiting for it.

    Every rank of `pipe` makes one with the same arguments, and then trains as ever: `pipe.step`, `step`, `zero_grad`. What comes out is
    what `pipe.clip_grad_norm_(max_norm)` and `optimizer.step()` give where the norm is finite, to the bit with `undo="copy"`; a step
    whose gradients are not finite is left out on all ranks. Without `max_norm` nothing is clipped. `scaler` unscales the gradients before
    and is updated alike on every rank; scale the loss with it in the pipeline's `loss_fn`.

    `undo` says how a step is taken back: "copy" keeps a copy of parameters and state, "arithmetic" inverts the formulas of SGD, Adam or
    AdamW up to rounding; None takes the copy if it fits in half of the memory that is free now, else arithmetic.

    Between `step` and the next `pipe.step`, weights may still be those of a step to be taken back: call `settle` before you read them.

    Raises `InputError` on every rank when an argument is wrong on one, or when they disagree.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pipe: Pipeline,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        undo: Way | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.norm: Tensor | None = None
        self._pipe = pipe
        self._transport = pipe._transport
        self._max_norm = max_norm
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_last = self._transport.rank == self._transport.size - 1
        self._verdict: bool | None = True
        self._has_stepped = False
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._options: list[dict[str, Any]] = []
        self._down: Expected[NormsSoFar] | None = None
        self._back: Expected[NormsOfAll] | None = None
        self._telling: list[Sending] = []
        self._parts = counted(pipe.modules, pipe._copies.elsewhere)
        fault = _fault(optimizer, pipe, max_norm, undo)
        with pipe._session.ending_all("while making the optimizer"), self._transport.collective("making the optimizer"):
            told = self._transport.gather_objects((fault, (max_norm, self._scaler is not None), dtypes_of(self._parts)))
        faults = [f"rank {rank}: {entry[0]}" for rank, entry in enumerate(told) if entry[0]]
        if not faults and len({entry[1] for entry in told}) > 1:
            listed = (f"rank {r} has {entry[1][0]} {'with' if entry[1][1] else 'without'} a scaler" for r, entry in enumerate(told))
            faults = [f"ranks disagree on max_norm or scaler: {', '.join(listed)}"]
        if faults:
            raise InputError("; ".join(faults))
        self._undo: SavedCopy | ByFormula = (
            SavedCopy(optimizer) if undo == "copy" or (undo is None and _copy_fits(optimizer, pipe.device)) else ByFormula(optimizer)
        )
        self._form = NormLedger(self._parts, [entry[2] for entry in told], self._transport.rank, max_norm)
        if self._scaler is not None:
            self._scaler.scale(torch.ones((), device=pipe.device))  # its scale is made by its first use, which only a last stage has
        pipe._validate_with(self)
        self._expect()

    def step(self) -> None:
        """The optimizer's step with the gradients as they are; final when the next `pipe.step`, or `settle`, has come past it."""
        with self._pipe._session.ending_all(_STEPPING):
            self._judge()
            with self._pipe.recording_optimizer():
                self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. They are kept until the step is final, so they cannot be set to 0: raises `InputError` for that."""
        if not set_to_none:
            raise InputError("a step that may be taken back needs its gradients, which zero_grad(set_to_none=False) overwrites; drop them")
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Make the last step final on this rank: afterwards its weights and the optimizer's state are those of the exact step.

        Waits for the ranks before this one, and the last, to have called `step`. `norm` tells then the norm of all gradients.
        """
        if self._back is not None or self._telling:
            with self._pipe._session.ending_all(_VALIDATING):
                self._judge()
                self._wait_until_told()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, for reading and for setting options of the next step."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, settled."""
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the optimizer's state, once the last step is settled."""
        self.settle()
        self.optimizer.load_state_dict(state_dict)

    def question(self) -> Callable[[], bool] | None:
        """What a step that begins now asks at its rollback point: whether its forwards stand. None when they surely do."""
        if self._verdict is True:
            return None
        snapshot = Snapshot(self._pipe.modules.values(), self._pipe.device)

        def stands() -> bool:
            with self._pipe._session.ending_all(_VALIDATING):
                self._judge()
                stood, self._verdict = self._verdict, True
                if not stood:
                    snapshot.restore()
                return bool(stood)

        return stands

    def clear(self) -> None:
        """For the pipeline: let go of every message, as one that was sent keeps its connection open."""
        self._down = self._back = None
        self._telling = []

    def _step(self) -> None:
        """Step early, if this rank may; the last rank knows all."""
        self._wait_until_told()
        overflown = self._unscale()
        norms = norms_of(self._parts, 2.0, IN_GRAD)
        ledger = self._receive_down()
        self._form.write(ledger, norms, overflown=overflown)
        rank, size = self._transport.rank, self._transport.size
        if self._is_last:
            self._telling = [self._transport.tell(NormsOfAll(ledger), other) for other in range(size - 1)]
        else:
            self._telling = [self._transport.tell(NormsSoFar(ledger), rank + 1)]
        self._keep()
        if self._is_last:
            self._conclude(ledger)
        else:
            self._verdict = None
            self._back = self._transport.listen(NormsOfAll, self._form.length, size - 1)
            self._has_stepped = not self._form.waits(ledger)
            if self._has_stepped:
                self._step_early()
        self._expect()

    def _expect(self) -> None:
        """Post the receive of the next ledger, so that it never waits for this rank."""
        if self._transport.rank > 0:
            self._down = self._transport.listen(NormsSoFar, self._form.length, self._transport.rank - 1)

    def _receive_down(self) -> Tensor:
        if self._down is None:
            return self._form.empty()
        return self._down.wait("waiting for the norms of its gradients").ledger

    def _wait_until_told(self) -> None:
        for sending in self._telling:
            sending.wait("telling it of the norms of gradients")
        self._telling = []

    def _unscale(self) -> bool:
        """Unscale the gradients if there is a scaler; whether it found one that is not finite."""
        if self._scaler is None:
            return False
        self._scaler.unscale_(self.optimizer)
        return any(found.item() for found in self._scaler._found_inf_per_device(self.optimizer).values())

    def _keep(self) -> None:
        """Keep what it takes to make this step again: its gradients and its options."""
        held = [*self._pipe.parameters(), *(parameter for group in self.optimizer.param_groups for parameter in group["params"])]
        self._gradients = {parameter: parameter.grad for parameter in held}
        self._options = self._options_now()

    def _options_now(self) -> list[dict[str, Any]]:
        return [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def _step_early(self) -> None:
        """Make the step that may have to be taken back."""
        self._undo.save()
        self.optimizer.step()
        if self._options_now() != self._options:
            kind = type(self.optimizer).__name__
            raise InputError(
                f"{kind} changes its param_groups as it steps, which cannot be taken back; clip with pipe.clip_grad_norm_ instead"
            )

    def _judge(self) -> None:
        """Learn whether the last step stands, and make it the exact one."""
        if self._back is None:
            return
        ledger = self._back.wait("waiting for its judgement of the optimizer's step").ledger
        self._back = None
        with self._pipe.recording_optimizer():
            self._conclude(ledger)

    def _conclude(self, ledger: Tensor) -> None:
        """Judge the whole ledger. Where a rank waited, every rank makes the exact step, which may be none."""
        self._verdict = not self._form.waits(ledger)
        self.norm = self._form.total(ledger).to(self._pipe.device)
        if not (self._verdict and self._has_stepped):
            with self._as_it_was():
                self._make_exact(ledger, self.norm)
        if self._scaler is not None:
            found = self._scaler._found_inf_per_device(self.optimizer)
            found.clear()
            found[str(self._pipe.device)] = torch.full((), float(self._form.overflown(ledger)), device=self._pipe.device)
            self._scaler.update()
        self._gradients = {}
        self._has_stepped = False

    def _make_exact(self, ledger: Tensor, norm: Tensor) -> None:
        if self._has_stepped:
            self._undo.undo()
        if not self._form.is_skipped(ledger):
            if self._max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._pipe.parameters(), self._max_norm, norm)
            self.optimizer.step()

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Inside, gradients and options are those that `step` was called with."""
        gradients = {parameter: parameter.grad for parameter in self._gradients}
        groups = self.optimizer.param_groups
        options = [dict(group) for group in groups]
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        for group, before in zip(groups, self._options, strict=False):
            group.update(before)
        yield
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, now in zip(groups, options, strict=True):
            group.update(now)


def _fault(optimizer: Any, pipe: Pipeline, max_norm: float | None, undo: Any) -> str:
    """What is wrong with the arguments; nothing when they will do."""
    if not isinstance(optimizer, Optimizer):
        return f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
    if pipe._validation is not None:
        return "the pipeline has a PostValidation already; use that, or make a new Pipeline"
    if pipe._gradients.dtype is not None:
        return "an optimizer's step reads .grad, which main_grad leaves None; clip with pipe.clip_grad_norm_, or leave main_grad out"
    if max_norm is not None and not max_norm > 0:
        return f"max_norm must be above 0, or None to clip nothing, got {max_norm}"
    if undo not in ("copy", "arithmetic", None):
        return f"undo must be 'copy', 'arithmetic' or None, got {undo!r}"
    reason = why_not(optimizer) if undo == "arithmetic" else ""
    if undo is None and not _copy_fits(optimizer, pipe.device) and why_not(optimizer):
        reason = f"a copy of parameters and state would take more than half of the free memory, and {why_not(optimizer)}"
    return f'{reason}; use undo="copy"' if reason else ""


def _copy_fits(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a copy of the parameters and, for each, of two more tensors of state, fits in half of the memory that is free."""
    held = sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
    return bool(2 * 3 * held <= _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
