"""`PostValidation`: every rank makes its optimizer's step at once, validates it afterwards, and undoes it if it should have been different.

1. A `ledger` goes down the ranks. Each rank writes its norms, and steps early if the norms so far need neither clipping nor skipping.
2. The last rank has the whole ledger and sends it to all others.
3. They read it in the next step of the pipeline, after the forwards before their rollback point.
4. If any rank waited, all ranks undo their steps, make the exact step, and run these forwards again.

Order matters in two places. The receive of the next ledger is posted before this rank passes its own on (`_expect`). Gradients and
parameter groups are kept until the verdict, because the exact step needs those of the call to `step`, and user code may have changed them
since. Gradients are kept without a copy, so changes in place are an error.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (post-update validation). The rollback points are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from zerobubble.arguments import NUMBER, takes
from zerobubble.errors import InputError, raise_faults, shown
from zerobubble.runtime.device import interface, is_host
from zerobubble.runtime.hooks.clip import counted, norms_of, scale
from zerobubble.runtime.hooks.gradient_scaling import set_found_inf, unscale_own
from zerobubble.runtime.hooks.norm_ledger import NormLedger, NormsOfAll, NormsSoFar, dtypes_of
from zerobubble.runtime.hooks.undo_by_arithmetic import ByFormula, why_not
from zerobubble.runtime.split.stage_with_loss import stage_alone
from zerobubble.runtime.stage.loss_draws import SharesGenerators
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.step.optimizers import SAVED_BY, Optimizers, kinds_of, optimizers_in, parameters_of
from zerobubble.runtime.transport.control import Expected, Sending
from zerobubble.runtime.transport.terms import by_rank, each_has
from zerobubble.runtime.values.buffers import buffers_of, changing_weights, put_buffers
from zerobubble.runtime.values.gradients import IN_GRAD
from zerobubble.runtime.values.memory import local_part

_STEPPING, _VALIDATING = "while stepping the optimizer", "while validating the optimizer's step"

Way = Literal["copy", "arithmetic"]


class Attaches(Protocol):
    """The part of a `Pipeline` that a hook needs to attach itself."""

    def attach(self, hook: StepHook) -> None:
        """Call `hook` from the next training step on."""


@takes()
class PostValidation(StepHook):
    """An optimizer around this rank's, or a list of them, that clips by the norm of the whole model's gradients without waiting for it.

    Every rank of `pipe` makes one with the same arguments, and then trains as usual: `pipe.step`, `step`, `zero_grad`. If the norm is
    finite, the result equals that of `pipe.clip_grad_norm_(max_norm)` and `optimizer.step()`, to the bit with `undo="copy"`. All ranks skip
    a step whose gradients are not finite.

        optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters()), pipe, max_norm=1.0)

    Args:
        optimizer: The optimizer of this rank, or a list of several.
        pipe: The pipeline whose parameters it steps.
        max_norm: The norm to which gradients of the whole model are clipped; None clips nothing.
        scaler: A `torch.amp.GradScaler` that first unscales the gradients and is updated in the same way on every rank; pass it to
            `pipe.step` as well.
        undo: How a step is undone. "copy" keeps a copy of parameters and state. "arithmetic" inverts the formulas of SGD, Adam or AdamW up
            to rounding. None uses the copy if it fits in half of the memory that is free now, else arithmetic.

    Between `step` and the next `pipe.step`, weights may belong to a step that is undone later: call `settle` before you read them.

    Raises `InputError` on every rank if an argument is wrong on any rank or differs between ranks. `step` raises it if `pipe.step` got a
    different scaler. From then on, any other optimizer over this rank's parameters raises it when it steps.
    """

    needs_rollback_point = True

    def __init__(
        self,
        optimizer: Optimizers,
        pipe: Attaches,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        undo: Way | None = None,
    ) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()
        self.norm: Tensor | None = None
        self._max_norm = max_norm
        self._scaler = None if isinstance(scaler, GradScaler) and not scaler.is_enabled() else scaler
        self._way = undo
        self._given = optimizer
        self._verdict: bool | None = True
        self._has_stepped = False
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._versions: dict[Tensor, int] = {}
        self._groups: list[list[dict[str, Any]]] = []
        self._options: list[dict[str, Any]] = []
        self._down: Expected[NormsSoFar] | None = None
        self._back: Expected[NormsOfAll] | None = None
        self._sends: list[Sending] = []
        self._undo: list[SavedCopy | ByFormula] = []
        self._pipeline: AttachedPipeline
        pipe.attach(self)

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Compares the arguments with all ranks of `pipeline`. Raises `InputError` on every rank if one is wrong or they disagree."""
        self._pipeline = pipeline
        self._peers = pipeline.peers
        self._is_last = pipeline.rank == pipeline.num_ranks - 1
        self._parts = counted(pipeline.modules, pipeline.counted_elsewhere)
        terms = (self._max_norm, self._scaler is not None)
        gathered = pipeline.gather((self._fault(pipeline), terms, dtypes_of(self._parts)), "making the optimizer")
        faults = by_rank(pipeline.peers.members, [fault for fault, _, _ in gathered])
        if not faults and len({theirs for _, theirs, _ in gathered}) > 1:
            settings = [f"{norm} {'with' if scaled else 'without'} a scaler" for _, (norm, scaled), _ in gathered]
            faults = [f"ranks disagree on max_norm or scaler: {each_has(pipeline.peers.members, settings)}"]
        raise_faults(faults)
        copies = self._copies(pipeline.device)
        self._undo = [SavedCopy(optimizer) if copies else ByFormula(optimizer) for optimizer in self.optimizers]
        pipeline.optimizers.validated = self.optimizers
        self._form = NormLedger(self._parts, [dtypes for _, _, dtypes in gathered], pipeline.rank, self._max_norm)
        if self._scaler is not None:
            self._scaler.scale(torch.ones((), device=pipeline.device))  # its first use creates its scale, and only a last stage uses it
        self._expect()

    def step(self) -> None:
        """Makes the optimizer's step with the current gradients. The step is final after the next `pipe.step` or `settle`."""
        with self._pipeline.activity(_STEPPING):
            self._refuse_other_scaler()
            self._judge()
            self._pipeline.before_optimizer()
            with self._pipeline.record_optimizer():
                self._step()
            for optimizer in self.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns where the step is made by the next pipe.step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients. The exact step may need their values, so `set_to_none=False` raises `InputError`."""
        if not set_to_none:
            raise InputError("a step that may be taken back needs its gradients, which zero_grad(set_to_none=False) overwrites; drop them")
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def settle(self) -> None:
        """Makes the last step final on this rank: its weights and the optimizer's state then equal the result of the exact step.

        Waits until the ranks before this one, and the last rank, have called `step`. `norm` is then the norm of all gradients.
        """
        if self._back is not None or self._sends:
            with self._pipeline.activity(_VALIDATING):
                self._judge()
                self._finish_sends()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizers, for reading and for setting options of the next step."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Settles the last step, and returns the state of the optimizer, or the list of states of several under the key "optimizers"."""
        self.settle()
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"optimizers": states} if len(states) > 1 else states[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settles the last step, and sets the optimizers' state to `state_dict`, which `state_dict()` returned."""
        self.settle()
        states = state_dict["optimizers"] if len(self.optimizers) > 1 else [state_dict]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Makes `step` start over at its rollback point if needed, unless the last optimizer's step is known to be final."""
        if self._verdict is True:
            return
        snapshot = StageSnapshot(self._pipeline.modules.values())

        def forwards_stand() -> bool:
            with self._pipeline.activity(_VALIDATING):
                snapshot.refuse_changed_parameters()
                self._judge()
                stood, self._verdict = self._verdict, True
                if not stood:
                    snapshot.restore()
                return bool(stood)

        step.start_over_unless(forwards_stand)

    def on_close(self) -> None:
        """Drops all messages in flight: they would keep connections open."""
        self._down = self._back = None
        self._sends = []

    def _step(self) -> None:
        """Steps early if this rank may. The last rank knows all norms and makes the exact step."""
        self._finish_sends()
        overflowed = self._unscale()
        norms = norms_of(self._parts, 2.0, IN_GRAD, self._pipeline.sharded)
        ledger = self._receive_down()
        self._expect()
        self._form.write(ledger, norms, overflowed=overflowed)
        rank, size = self._peers.rank, self._peers.size
        if self._is_last:
            self._sends = [self._peers.send_control(NormsOfAll(ledger), other) for other in range(size - 1)]
        else:
            self._sends = [self._peers.send_control(NormsSoFar(ledger), rank + 1)]
        self._keep()
        if self._is_last:
            self._conclude(ledger)
        else:
            self._verdict = None
            self._back = self._peers.expect_control(NormsOfAll, self._form.length, size - 1)
            self._has_stepped = not self._form.waits(ledger)
            if self._has_stepped:
                self._step_early()

    def _expect(self) -> None:
        """Posts the receive of the next ledger, so that its sender never waits for this rank."""
        if self._peers.rank > 0:
            self._down = self._peers.expect_control(NormsSoFar, self._form.length, self._peers.rank - 1)

    def _receive_down(self) -> Tensor:
        if self._down is None:
            return self._form.empty()
        return self._down.wait("waiting for the norms of its gradients").ledger

    def _finish_sends(self) -> None:
        for sending in self._sends:
            sending.wait("sending it the norms of gradients")
        self._sends = []

    def _unscale(self) -> bool:
        """Unscales the gradients if there is a scaler; returns whether a gradient of any rank is not finite."""
        if self._scaler is None:
            return False
        is_infinite = unscale_own(self._pipeline, self._scaler, self.optimizers)
        return self._pipeline.sharded.largest(float(is_infinite), "sharing which gradients are not finite") > 0

    def _keep(self) -> None:
        """Keeps what the exact step needs: the gradients, groups and options of this call."""
        held = [*self._pipeline.parameters(), *parameters_of(self.optimizers)]
        self._gradients = {parameter: parameter.grad for parameter in held}
        self._versions = self._versions_now()
        self._groups = [list(optimizer.param_groups) for optimizer in self.optimizers]
        self._options = self._options_now()

    def _options_now(self) -> list[dict[str, Any]]:
        return [{name: _frozen(value) for name, value in group.items() if name != SAVED_BY} for group in self.param_groups]

    def _versions_now(self) -> dict[Tensor, int]:
        """Returns the version of each kept gradient, which every change in place increases."""
        kept = self._gradients.items()
        return {parameter: local_part(gradient)._version for parameter, gradient in kept if gradient is not None}

    def _step_early(self) -> None:
        """Makes the step that may have to be undone."""
        for undo in self._undo:
            undo.save()
        for parameter in _with_overwritten_gradients(self.optimizers):
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad.clone()
        self._versions = self._versions_now()
        self._step_all()
        if self._options_now() != self._options:
            raise InputError(
                ("{optimizers} changes param_groups as it steps, which cannot be taken back; clip with pipe.clip_grad_norm_ instead"),
                optimizers=kinds_of(self.optimizers),
            )
        if self._needs_gradients(skips=self._max_norm is None) and self._versions_now() != self._versions:
            raise InputError(
                "{optimizers} or one of its hooks changes gradients as it steps, which cannot be taken back; "
                "clip with pipe.clip_grad_norm_ instead",
                optimizers=kinds_of(self.optimizers),
            )

    def _needs_gradients(self, *, skips: bool) -> bool:
        """Returns whether an exact step needs the gradients of the call: to step, unless it `skips`, or to undo a step by arithmetic."""
        return not skips or (self._has_stepped and any(isinstance(undo, ByFormula) for undo in self._undo))

    def _judge(self) -> None:
        """Receives the verdict on the last step, and makes the exact step if needed."""
        if self._back is None:
            return
        ledger = self._back.wait("waiting for its judgment of the optimizer's step").ledger
        self._back = None
        with self._pipeline.record_optimizer():
            self._conclude(ledger)

    def _conclude(self, ledger: Tensor) -> None:
        """Judges the whole ledger. If any rank waited, every rank makes the exact step, or skips it."""
        self._verdict = not self._form.waits(ledger)
        self.norm = self._form.total(ledger).to(self._pipeline.device)
        if not (self._verdict and self._has_stepped):
            with self._as_it_was(), changing_weights():
                self._make_exact(ledger, self.norm)
        if self._scaler is not None:
            set_found_inf(self._scaler, self.optimizers, self._pipeline.device, is_found=self._form.overflowed(ledger))
            self._scaler.update()
        self._gradients = {}
        self._has_stepped = False

    def _make_exact(self, ledger: Tensor, norm: Tensor) -> None:
        skips = self._form.is_skipped(ledger)
        if self._needs_gradients(skips=skips) and self._versions_now() != self._versions:
            raise InputError(
                "gradients were changed in place after the step of PostValidation, which may need them until the next step of the pipeline",
                remedy="set .grad to None, as its zero_grad does, or call its settle first",
            )
        if self._has_stepped:
            for undo in self._undo:
                undo.undo()
        if not skips:
            if self._max_norm is not None:
                scale(self._pipeline.parameters(), self._max_norm, norm, IN_GRAD)
            self._step_all()

    def _step_all(self) -> None:
        with changing_weights(), self._pipeline.optimizers.stepping():
            for optimizer in self.optimizers:
                optimizer.step()

    def _refuse_other_scaler(self) -> None:
        """Raises `InputError` if the last step of the pipeline was scaled by another scaler than the one that unscales here."""
        scaler = self._pipeline.scaling.scaler
        begins_backward = any(route[-1] == self._pipeline.rank for route in self._pipeline.schedule.placement.routes)
        if scaler is not self._scaler and (scaler is not None or begins_backward):
            was_given = "no scaler" if scaler is None else "a scaler" if self._scaler is None else "another scaler"
            raise InputError(
                "the last step was given {was_given}, and PostValidation has {given_here}",
                was_given=was_given,
                given_here="none" if self._scaler is None else "one",
                remedy="give pipe.step(..., scaler=scaler) and PostValidation(..., scaler=scaler) the same, and leave it out of loss_fn",
            )

    def _fault(self, pipeline: AttachedPipeline) -> str:
        """Returns the fault in this rank's arguments, empty without a fault."""
        try:
            self.optimizers = optimizers_in(self._given)
            pipeline.optimizers.refuse_partial(self.optimizers, pipeline.parameters())
        except InputError as error:
            return str(error)
        if any(isinstance(hook, PostValidation) for hook in pipeline.hooks):
            return "the pipeline has a PostValidation already; use that, or make a new Pipeline"
        if pipeline.gradients.dtype is not None:
            return "an optimizer's step reads .grad, which main_grad leaves None; clip with pipe.clip_grad_norm_, or leave main_grad out"
        if self._max_norm is not None and not (NUMBER.accepts(self._max_norm) and self._max_norm > 0):
            return f"max_norm must be a number above 0, or None to clip nothing, got {shown(self._max_norm)}"
        if self._scaler is not None and not isinstance(self._scaler, GradScaler):
            return f"scaler must be a torch.amp.GradScaler, or None, got {shown(self._scaler)}"
        if self._way not in ("copy", "arithmetic", None):
            return f"undo must be 'copy', 'arithmetic' or None, got {self._way!r}"
        return self._cannot_undo(pipeline)

    def _copies(self, device: torch.device) -> bool:
        """Returns whether steps are undone by a copy, and not by arithmetic."""
        return self._way == "copy" or (self._way is None and _copy_fits(self.optimizers, device))

    def _cannot_undo(self, pipeline: AttachedPipeline) -> str:
        """Returns why this optimizer's steps cannot be undone as requested; empty if they can."""
        reason = "" if self._copies(pipeline.device) else _why_not(pipeline, self.optimizers)
        if self._way is None and reason:
            reason = f"a copy of parameters and state would take more than half of the free memory, and {reason}"
        return f'{reason}; use undo="copy"' if reason else ""

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """A context with the gradients, groups and options from the call to `step`."""
        gradients = {parameter: parameter.grad for parameter in self._gradients}
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        groups_now = [list(optimizer.param_groups) for optimizer in self.optimizers]
        self._set_groups(self._groups)
        groups = self.param_groups
        options = [dict(group) for group in groups]
        for group, before in zip(groups, self._options, strict=True):
            group.update(before)
        yield
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, now in zip(groups, options, strict=True):
            group.update(now)
        self._set_groups(groups_now)

    def _set_groups(self, groups: Sequence[list[dict[str, Any]]]) -> None:
        for optimizer, groups_before in zip(self.optimizers, groups, strict=True):
            optimizer.param_groups[:] = groups_before


def _frozen(option: Any) -> Any:
    """Returns an option of a parameter group, or its list of parameters, as later changes in place leave it."""
    return option.clone() if isinstance(option, Tensor) else list(option) if isinstance(option, list) else option


def _why_not(pipeline: AttachedPipeline, optimizers: Sequence[Optimizer]) -> str:
    """Returns why a step of this rank cannot be undone by arithmetic; empty if it can."""
    if pipeline.counted_elsewhere:
        return "rounding would make shared parameters differ, of which only some ranks undo a step by arithmetic"
    return next(filter(None, map(why_not, optimizers)), "")


def _with_overwritten_gradients(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yields the parameters with gradients that a step overwrites: torch's foreach SGD adds Nesterov's momentum to them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            if group["nesterov"] and group["foreach"] is not False:
                yield from (parameter for parameter in group["params"] if group["foreach"] or not is_host(parameter.device))


def _copy_fits(optimizers: Sequence[Optimizer], device: torch.device) -> bool:
    """Returns whether a copy of the parameters, and of two tensors of state for each, fits in half of the free memory."""
    held = sum(parameter.nbytes for parameter in parameters_of(optimizers))
    return bool(2 * 3 * held <= interface(device).free_bytes())


class StageSnapshot:
    """The buffers of `modules`, and the generators that their stages share, when the snapshot was taken.

    Other random state is not part of it: a forward draws the same numbers when rerun.

    A forward may change a buffer in place or assign another tensor to its name. So the snapshot keeps the tensors and copies of them.
    It has no copies of parameters: a forward that changes one cannot be discarded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        named = [entry for module in modules for entry in module.named_parameters() if local_part(entry[1]) is entry[1]]
        self._parameters = [(name, parameter, parameter._version) for name, parameter in named]
        parts = chain.from_iterable(module.modules() for module in modules)
        self._buffers_of = [(part, buffers) for part in parts if (buffers := buffers_of(part))]
        held = chain.from_iterable(buffers.values() for _, buffers in self._buffers_of)
        self._contents = {buffer: buffer.clone() for buffer in held if buffer is not None}
        stages = [stage for stage in map(stage_alone, modules) if isinstance(stage, SharesGenerators)]
        self._generators = [(generator, generator.read()) for stage in stages for generator in stage.shared_generators()]

    def refuse_changed_parameters(self) -> None:
        """Raises `InputError` if a parameter has changed in place since the snapshot."""
        changed = [name for name, parameter, version in self._parameters if parameter._version != version]
        if changed:
            raise InputError(
                "a forward changes parameter {name!r}, and PostValidation may have to discard forwards",
                name=changed[0],
                remedy="clip with pipe.clip_grad_norm_, or change the parameter after optimizer.step()",
            )

    @torch.no_grad()
    @changing_weights()
    def restore(self) -> None:
        """Restores the buffers and the generators."""
        for generator, state in self._generators:
            generator.write(state)
        for part, buffers in self._buffers_of:
            put_buffers(part, buffers)
        for buffer, content in self._contents.items():
            buffer.copy_(content)


class SavedCopy:
    """A copy of an optimizer's parameters and state, in buffers that are allocated once. `save` before a step, `undo` after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[Tensor, Tensor] = {}
        self._state: dict[Any, dict[str, Any]] = {}

    def save(self) -> None:
        """Copies parameters and state."""
        state = self._optimizer.state
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        held += [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
        copies, self._copies = self._copies, {}
        self._copies = {tensor: copies[tensor] if tensor in copies else torch.empty_like(tensor) for tensor in held}
        self._state = {
            key: {name: value if isinstance(value, Tensor) else deepcopy(value) for name, value in entry.items()}
            for key, entry in state.items()
        }
        _copy(self._copies, self._copies.values())

    def undo(self) -> None:
        """Restores parameters and state."""
        _copy(self._copies.values(), self._copies)
        self._optimizer.state.clear()
        self._optimizer.state.update({key: dict(entry) for key, entry in self._state.items()})


@torch.no_grad()
def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    local_sources = [local_part(source) for source in sources]
    if local_sources:
        torch._foreach_copy_([local_part(target) for target in targets], local_sources)
