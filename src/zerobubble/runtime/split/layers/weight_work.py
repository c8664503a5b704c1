"""The weight work that B leaves for W, and how a layer finds the pass it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.measure.storages import storages_of
from zerobubble.runtime.split.autocast import AutocastCopies
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients, Part

_PASS = "zerobubble.pass_in_progress"
"""The name of what torch keeps for the thread, and hands on to the threads on which its engine goes back."""

TORCH_KEEPS_REFERENCES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch counts a reference to an object that it keeps for a thread. It does in 2.13; 2.6 does not, and frees it too early."""


class _PassOfThread(threading.local):
    """The pass in progress, where torch cannot keep it."""

    work: WeightWork | None = None


_here = _PassOfThread()
_in_engine: dict[int, tuple[WeightWork, int]] = {}
"""The passes that go back in a thread of autograd's engine, where torch cannot keep them: by the engine's run, each with its thread.

The engine runs the nodes of a GPU in a thread of its own. A checkpoint recomputes its forward there, and layers that do not find their pass
save other tensors than in F, which the checkpoint refuses. So the first node of a B notes the pass.
"""
_keep: Callable[[WeightWork | None], None] = (
    partial(torch._C._stash_obj_in_tls, _PASS) if TORCH_KEEPS_REFERENCES else partial(setattr, _here, "work")
)
_kept: Callable[[], WeightWork] = partial(torch._C._get_obj_in_tls, _PASS)


@dataclass(frozen=True)
class StepContext:
    """What the passes of one stage share for the length of a step.

    `can_wait` are the parameters whose gradients may wait for W: those of the stage, but for some that others watch, sum or shard. They go
    by their `id`, because torch hashes a tensor in Python, and every layer asks.
    `meter` counts the bytes that wait, None where nobody asks. `gradients` is where W adds. `copies` are autocast's copies of parameters.
    `lets_go` says whether weights are freed between passes, as those that lie in shards are.
    """

    can_wait: frozenset[int]
    meter: Meter | None = None
    gradients: Gradients = IN_GRAD
    copies: AutocastCopies = field(default_factory=AutocastCopies)
    lets_go: bool = False


class _Entry(NamedTuple):
    """The gradient of a weight, or of a part of it, that waits, and what is kept for it. `counted` is its share in the meter."""

    weight: Tensor
    part: Part | None
    cast: object
    gradient: Callable[..., Tensor]
    add_to: Callable[..., None] | None
    held: list[Tensor]
    counted: list[Held]


Entries = list[_Entry]
"""The entries of one weight, or of one part of it, in one microbatch."""


class WeightWork:
    """The weight gradients of one microbatch that B leaves for W, in the order B met them; `held` are the tensors kept for them.

    Made for the F of the microbatch, whose layers remember it; filled in its B; run in its W. Inside `with work:` this thread runs a pass
    of the microbatch. In its B `goes_back` is set, and gradients may be left for W.
    """

    __slots__ = ("_accumulating_task", "_entries", "_outer", "_versions", "context", "goes_back", "held")

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.held: list[Tensor] = []
        self._versions: list[int] = []
        self._entries: list[_Entry] = []
        self._accumulating_task: int | None = None
        self._outer: WeightWork | None = None
        self.goes_back = False

    def __enter__(self) -> None:
        self._outer = pass_in_progress()
        _keep(self)

    def __exit__(self, *_: object) -> None:
        _keep(self._outer)
        self._outer = None

    @contextmanager
    def followed(self, edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> Iterator[None]:
        """Makes the pass known to the threads of autograd's engine that go back from `edges`, where torch does not hand it on."""
        if TORCH_KEEPS_REFERENCES or _go_back_here(gradients):
            yield
            return

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

    def may_take(self, node: Any) -> bool:
        """Whether the weight gradient that `node`, a Function whose first tensor is the weight, is asked for may wait.

        It may when the B of this microbatch is in progress, and what autograd runs adds to `.grad`. A model that asks for gradients in
        its own forward, which a checkpoint may run again within B, gets them at once, and so does one that will go back through them.
        """
        if not self.goes_back or torch.is_grad_enabled():
            return False
        task = torch._C._current_graph_task_id()
        if task != self._accumulating_task:  # asking torch takes longer than comparing, and one run of its engine meets many layers
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
        part: Part | None = None,
        add_to: Callable[..., None] | None = None,
    ) -> None:
        """Leave `gradient(*held)` of `weight`, or of a `part` of it, for W; nobody may change what is held until then.

        It is held apart from its graph: what autograd saved would keep all behind it, down to the stage's input and its gradient.
        Where the model used a copy of the weight in another type, `cast` tells one copy from another: the gradients of one are summed
        before they get the weight's type. `add_to(sum, *held)` adds the gradient to a dense sum, with the numbers that `sum.add_(gradient)`
        would give, where less than all of the sum changes.
        """
        apart = [tensor.detach() if tensor.requires_grad else tensor for tensor in held]
        meter = self.context.meter
        counted = [] if meter is None else [meter.hold(tensor) for tensor in apart]
        self._entries.append(_Entry(weight, part, cast, gradient, add_to, apart, counted))
        self.held += apart
        self._versions += [tensor._version for tensor in apart]

    def weights(self) -> set[Tensor]:
        """The weights whose gradients wait."""
        return {entry.weight for entry in self._entries}

    def run(self) -> None:
        """Add every queued gradient to those of its weight. A weight used twice is summed first, as autograd does.

        A gradient is added before the next one is computed, which so finds memory that is in the cache; what was kept for it is let go.
        Raises `InputError` when a tensor that W reads was changed in place after B.
        """
        self._refuse_changes()
        groups = self.waiting()
        self._let_go()
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what `torch.no_grad` does, in a tenth of its time: every W comes by here
        try:
            for group in groups:
                self._add(group)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    @torch.no_grad()
    def add(self, group: Entries) -> None:
        """Do the part of `run` that `waiting` gave as `group`, once the entries were handed over; they are taken out of it."""
        self._add(group)

    def hand_over(self) -> None:
        """Keep no entry any longer: whoever has those of `waiting` will `add` them. Raises as `run` does."""
        self._refuse_changes()
        self._let_go()

    def _add(self, group: Entries) -> None:
        """Add the gradients of one weight, or of one part of it, to the sum; the entries are taken out of `group`."""
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
        """The entries, those of one weight or of one part of it together."""
        groups: dict[tuple[int, Part | None], Entries] = {}
        for entry in self._entries:
            groups.setdefault((id(entry.weight), entry.part), []).append(entry)
        return groups.values()

    def _let_go(self) -> None:
        self._entries.clear()
        self._versions.clear()
        self.held.clear()

    def _refuse_changes(self) -> None:
        lets_go = self.context.lets_go
        for tensor, version in zip(self.held, self._versions, strict=True):
            if lets_go and tensor.numel() and not any(storage.nbytes() for storage in storages_of(tensor)):
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a weight gradient needs was let go between B and W, with the gathered "
                    "weights of its stage: let the Function hold a copy, or compute that gradient in backward"
                )
            if tensor._version != version:
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a weight gradient needs was changed in place between B and W; "
                    "give the layer a copy (x.clone()), or choose a schedule that does not split this stage"
                )


def _sum_of(group: Entries) -> Tensor:
    """The sum of the gradients of one weight, or of a part of it, those of one cast summed first; the entries are taken out of `group`."""
    dtype = group[0].weight.dtype
    if len(group) == 1:
        entry = group.pop()
        return entry.gradient(*entry.held).to(dtype)
    sums: dict[object, Tensor] = {}
    for entry in group:
        found = entry.gradient(*entry.held)
        sums[entry.cast] = sums[entry.cast] + found if entry.cast in sums else found
    group.clear()
    total, *others = [found.to(dtype) for found in sums.values()]
    for other in others:
        total = total + other
    return total


def _accumulates(node: Any) -> bool:
    """Whether the engine is going to run `node`, which adds to a weight's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad is asked for the gradient of the weight itself
        return False


def _go_back_here(gradients: Sequence[Tensor | None]) -> bool:
    """Whether autograd's engine goes back from these in the thread that asks it to."""
    return all(gradient is None or gradient.device.type == "cpu" for gradient in gradients)


def _pass_of_engine() -> WeightWork | None:
    """The pass that this thread of autograd's engine goes back in, None in other threads."""
    run = torch._C._current_graph_task_id()
    if run in _in_engine:
        return _in_engine[run][0]
    # a model that asks for gradients in a forward runs the engine within the engine, in the same thread
    inside = [work for work, thread in _in_engine.values() if thread == threading.get_ident()] if run >= 0 else []
    return inside[-1] if inside else None


def pass_in_progress() -> WeightWork | None:
    """The weight work of the pass that this thread runs, None where the pass does not split.

    Torch calls a layer's forward without a handle of ours, and a checkpoint runs it again in B on a thread of autograd's engine. The
    pass is therefore kept where torch keeps what belongs to a thread and follows its work into the engine.
    """
    if not TORCH_KEEPS_REFERENCES:
        return _here.work or (_pass_of_engine() if _in_engine else None)
    try:
        return _kept()
    except RuntimeError:  # this thread has run no pass yet
        return None
