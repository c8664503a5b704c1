"""The weight work that B queues for W, and how a layer finds the pass it runs in.

Each microbatch has a `WeightWork`. A layer's forward stores it in its autograd context, and the layer's backward adds an entry to it. The
layer is called by the user's module, so the current work cannot be passed as an argument; it is a thread-local. A checkpoint recomputes its
forward on a thread of autograd's engine, where that thread-local must be visible too: otherwise layers would save other tensors than in F,
which the checkpoint rejects. PyTorch copies its own thread-local state to engine threads, so the work is stored there if torch holds a
reference to it, and in a table of engine runs otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.device import runs_backward_in_caller
from zerobubble.runtime.measure.memory_meter import Held, Meter, storages_of
from zerobubble.runtime.split.autocast import AutocastCopies
from zerobubble.runtime.values.gradients import IN_GRAD, GradientPart, Gradients

CAN_SEE_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch exposes the saved-tensor hooks, which reveal checkpoints: since 2.8."""

_PASS = "zerobubble.pass_in_progress"
_NO_CONTEXT = nullcontext()
"""Key in torch's thread-local state, which torch copies to the threads of its autograd engine."""

TORCH_KEEPS_REFERENCES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch holds a reference to objects in its thread-local state. 2.13 does; 2.6 does not, and frees them too early."""


class _PassOfThread(threading.local):
    """The pass in progress, if torch cannot store it."""

    work: WeightWork | None = None


_thread = _PassOfThread()
_in_engine: dict[int, tuple[WeightWork, int]] = {}
"""The passes whose backward runs in a thread of autograd's engine, if torch cannot store them: by the engine's run, each with its thread.

The engine runs the nodes of a GPU in a separate thread. A checkpoint recomputes its forward there, and layers that do not find their pass
save other tensors than in F, which the checkpoint rejects. So the first node of a B registers the pass here.
"""
_set_current: Callable[[WeightWork | None], None] = (
    partial(torch._C._stash_obj_in_tls, _PASS) if TORCH_KEEPS_REFERENCES else partial(setattr, _thread, "work")
)
_get_current: Callable[[], WeightWork] = partial(torch._C._get_obj_in_tls, _PASS)


@dataclass(frozen=True)
class StepContext:
    """State shared by the passes of one stage during a step.

    `deferrable` has the `id` of each parameter with a gradient that may be deferred: the stage's parameters, except some that are hooked,
    summed elsewhere or sharded. It uses `id` because hashing a tensor runs Python code, and every layer looks its weight up.
    `meter` counts the bytes of pending work, if given. W adds to `gradients`. `copies` are autocast's copies of parameters.
    `frees_weights` is True if weights are freed between passes, as with sharded weights.
    """

    deferrable: frozenset[int]
    meter: Meter | None = None
    gradients: Gradients = IN_GRAD
    copies: AutocastCopies = field(default_factory=AutocastCopies)
    frees_weights: bool = False


class _Entry(NamedTuple):
    """A deferred gradient of a weight or of a part of it, and the tensors held for it. `counted` are their bytes in the meter."""

    weight: Tensor
    part: GradientPart | None
    cast: object
    gradient: Callable[..., Tensor]
    add_to: Callable[..., None] | None
    held: list[Tensor]
    counted: list[Held]


Entries = list[_Entry]
"""The entries of one weight, or of one part of it, in one microbatch."""


class WeightWork:
    """The weight gradients of one microbatch that B defers to W, in the order of B; `held` are the tensors kept for them.

    Created for F of the microbatch, whose layers store it; filled in B; run in W. `with work:` marks a pass of the microbatch on this
    thread. `in_backward` is True during B, when gradients may be deferred. `may_recompute` is True if a layer ran in F where its backward
    may run it a second time, as in a checkpoint.
    """

    __slots__ = ("_accumulating_task", "_entries", "_outer", "_versions", "context", "held", "in_backward", "may_recompute")

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.held: list[Tensor] = []
        self._versions: list[int] = []
        self._entries: list[_Entry] = []
        self._accumulating_task: int | None = None
        self._outer: WeightWork | None = None
        self.in_backward = False
        self.may_recompute = not CAN_SEE_HOOKS

    def __enter__(self) -> None:
        self._outer = pass_in_progress()
        _set_current(self)

    def __exit__(self, *_: object) -> None:
        _set_current(self._outer)
        self._outer = None

    def followed(self, edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Makes the pass visible to the engine threads that run backward from `edges`, if layers may run there and torch does not."""
        if TORCH_KEEPS_REFERENCES or not self.may_recompute or _runs_in_this_thread(gradients):
            return _NO_CONTEXT
        return self._followed(edges)

    @contextmanager
    def _followed(self, edges: Sequence[Any]) -> Iterator[None]:
        runs: set[int] = set()

        def note(_: Any) -> None:
            run = torch._C._current_graph_task_id()
            _in_engine[run] = self, threading.get_ident()
            runs.add(run)

        handles = [edge.node.register_prehook(note) for edge in edges]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for run in runs:
                del _in_engine[run]

    def can_defer(self, node: Any) -> bool:
        """Returns whether the weight gradient requested from `node`, a Function whose first tensor is the weight, may be deferred.

        It may during the B of this microbatch, if the engine's run adds to `.grad`. A model that calls `torch.autograd.grad` in its own
        forward, possibly in a checkpoint recomputed within B, gets its gradients immediately. So does a backward with `create_graph`.
        """
        if not self.in_backward or torch.is_grad_enabled():
            return False
        task = torch._C._current_graph_task_id()
        if task != self._accumulating_task:  # the query is slower than the comparison, and one run of the engine visits many layers
            if not _accumulates(node.next_functions[0][0]):
                return False
            self._accumulating_task = task
        return True

    def defer(
        self,
        weight: Tensor,
        gradient: Callable[..., Tensor],
        *held: Tensor,
        cast: object = None,
        part: GradientPart | None = None,
        add_to: Callable[..., None] | None = None,
    ) -> None:
        """Defers `gradient(*held)` of `weight`, or of a `part` of it, to W. The tensors `held` must not change until then.

        They are detached: with their history, they would keep the whole graph behind them alive, down to the stage's input.

        If the model used a copy of the weight in another dtype, `cast` identifies the copy. Gradients of one copy are summed before they
        are cast to the weight's dtype. `add_to(sum, *held)` adds a gradient that changes only a part of a dense sum, with the same result
        as `sum.add_(gradient)`.
        """
        detached = [tensor.detach() if tensor.requires_grad else tensor for tensor in held]
        meter = self.context.meter
        counted = [] if meter is None else [meter.hold(tensor) for tensor in detached]
        self._entries.append(_Entry(weight, part, cast, gradient, add_to, detached, counted))
        self.held += detached
        self._versions += [tensor._version for tensor in detached]

    def weights(self) -> set[Tensor]:
        """Returns the weights with deferred gradients."""
        return {entry.weight for entry in self._entries}

    def run(self) -> None:
        """Adds every queued gradient to the gradient of its weight. Gradients of a weight used repeatedly are summed first, as in autograd.

        Each gradient is added and its tensors are freed before the next one is computed, so that their memory is reused while in cache.
        Raises `InputError` if a tensor that W reads was changed in place after B.
        """
        self._refuse_changes()
        groups = self.waiting()
        self._release()
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # like `torch.no_grad`, in a tenth of its time: every W runs this
        try:
            for group in groups:
                self._add(group)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    @torch.no_grad()
    def add(self, group: Entries) -> None:
        """Runs a `group` of entries from `waiting`, after `hand_over`; empties the group."""
        self._add(group)

    def hand_over(self) -> None:
        """Drops all entries. The caller holds the entries from `waiting` and will `add` them. Raises the same errors as `run`."""
        self._refuse_changes()
        self._release()

    def _add(self, group: Entries) -> None:
        """Adds the gradients of one weight, or of one part of it, to the sum; empties `group`."""
        weight, part, add_to = group[0].weight, group[0].part, group[0].add_to
        gradients = self.context.gradients
        if part is not None:
            gradients.add_part(weight, part, _sum_of(group))
            return
        so_far = None if add_to is None or len(group) > 1 else gradients.dense(weight)
        if add_to is None or so_far is None:
            gradients.add(weight, _sum_of(group))
        else:
            add_to(so_far, *group[0].held)

    def waiting(self) -> Collection[Entries]:
        """Returns the entries, grouped by weight and part."""
        groups: dict[tuple[int, GradientPart | None], Entries] = {}
        for entry in self._entries:
            groups.setdefault((id(entry.weight), entry.part), []).append(entry)
        return groups.values()

    def _release(self) -> None:
        self._entries.clear()
        self._versions.clear()
        self.held.clear()

    def _refuse_changes(self) -> None:
        frees_weights = self.context.frees_weights
        for tensor, version in zip(self.held, self._versions, strict=True):
            if frees_weights and tensor.numel() and not any(storage.nbytes() for storage in storages_of(tensor)):
                raise InputError(
                    "a tensor of shape {shape} that a weight gradient needs was freed between B and W, with the gathered weights of its "
                    "stage: {remedy}",
                    shape=str(tuple(tensor.shape)),
                    remedy="pass a copy to the deferral, or compute that gradient in backward",
                )
            refuse_changed(tensor, version)


def refuse_changed(tensor: Tensor, version: int) -> None:
    """Raises `InputError` if `tensor`, which a W needs, no longer has this `version`."""
    if tensor._version != version:
        raise InputError(
            "a tensor of shape {shape} that a weight gradient needs was changed in place between B and W; {remedy}",
            shape=str(tuple(tensor.shape)),
            remedy="give the layer a copy (x.clone()), or choose a schedule that does not split this stage",
        )


def _sum_of(group: Entries) -> Tensor:
    """Returns the sum of the gradients of a weight or part; sums the gradients of each cast first, and empties `group`."""
    dtype = group[0].weight.dtype
    if len(group) == 1:
        entry = group.pop()
        return entry.gradient(*entry.held).to(dtype)
    sums: dict[object, Tensor] = {}
    for entry in group:
        gradient = entry.gradient(*entry.held)
        sums[entry.cast] = sums[entry.cast] + gradient if entry.cast in sums else gradient
    group.clear()
    total, *others = [partial.to(dtype) for partial in sums.values()]
    for other in others:
        total = total + other
    return total


def _accumulates(node: Any) -> bool:
    """Returns whether the engine will run `node`, which adds to a weight's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `autograd.grad` computes the gradient of the weight itself
        return False


def _runs_in_this_thread(gradients: Sequence[Tensor | None]) -> bool:
    """Returns whether autograd's engine runs backward in the calling thread for these gradients."""
    return all(gradient is None or runs_backward_in_caller(gradient.device) for gradient in gradients)


def _pass_of_engine() -> WeightWork | None:
    """Returns the pass that this engine thread runs backward for, None in other threads."""
    run = torch._C._current_graph_task_id()
    if run in _in_engine:
        return _in_engine[run][0]
    # a model that calls autograd in its forward runs the engine within the engine, in the same thread
    inside = [work for work, thread in _in_engine.values() if thread == threading.get_ident()] if run >= 0 else []
    return inside[-1] if inside else None


def pass_in_progress() -> WeightWork | None:
    """Returns the weight work of the pass that this thread runs, None if the pass does not split."""
    if not TORCH_KEEPS_REFERENCES:
        work = _thread.work
        if work is None:
            return _pass_of_engine() if _in_engine else None
        if not work.may_recompute:
            work.may_recompute = _is_recomputed_later()
        return work
    try:
        return _get_current()
    except RuntimeError:  # this thread has run no pass yet
        return None


def _is_recomputed_later() -> bool:
    """Returns whether backward may repeat what runs now: in a checkpoint, which saves by hooks or, if reentrant, runs without gradients."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
