"""The loss of a step: one value per microbatch on the last stage's rank, and their weighted mean, or their sum, on every rank.

Order. Shares of the mean are summed in the order of microbatches, in whatever order the schedule ran them, so the sum has the bits of one
device that accumulates. Ranks exchange losses twice at most: those with a last stage send theirs to the rank where the first microbatch
ends, and that rank sends the result to all others. Their receives are posted when the step begins, so no rank waits before the end of its
row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.device import is_host
from zerobubble.runtime.stage.hook_reads import hook_fault
from zerobubble.runtime.stage.loss_reads import LossReads
from zerobubble.runtime.step.batch import as_target
from zerobubble.runtime.step.loss_comparison import LossComparison
from zerobubble.runtime.step.loss_faults import note_given, unknown_parameter
from zerobubble.runtime.step.loss_report import DTYPES, AddedLossReport, LossReport, SetState
from zerobubble.runtime.step.loss_state import LossState
from zerobubble.runtime.step.outputs import Outputs
from zerobubble.runtime.transport.control import Expected, Sending
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.added_losses import losses_so_far
from zerobubble.runtime.values.far_gradients import refuse_far_gradient
from zerobubble.runtime.values.payload import tensors_in

LossFunction = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], "float | Tensor"]
OnLoss = Callable[[int, Tensor], object]

_COMPARING = "comparing the weights of the replicas' shares of the batch"
_NUM_HASHES = 2**52
"""The number of hashes of weights, which a float64 represents exactly. Python hashes equal floats equally on every machine."""


class StepLosses:
    """The losses of consecutive steps: computed on the ranks with a last stage, with their mean on all ranks.

    Each loss is weighted by its share of the samples, or of what `loss_weight(target)` returns. The rank where the first microbatch ends
    sums the shares; with several routes, the other ranks with a last stage send it theirs. On a CPU with one route the result is sent with
    the last forward, so no rank waits for it at the end of the step. Otherwise it is sent at the end, because reading a loss makes the host
    of a GPU wait.

    Args:
        peers: The ranks of the pipeline.
        loss_fn: Computes the mean loss of a microbatch.
        loss_weight: Returns the weight of a microbatch, given its target.
        on_loss: Is called with each microbatch and its loss, on the rank that computes it.
        replicas: The ranks that end the microbatches of other shares of the batch; shares and the mean are then those of the whole batch.
        scales_gradients: Whether backward passes begin with losses instead of their shares, weighted if weights differ. The gradients of a
            step are then `divisor` times too large: the number of microbatches of the whole batch, otherwise 1.
        sums: Whether the losses are summed instead: backward passes begin with them, and nothing is scaled.
        held: Returns the parameters of this rank's stages. In each step, one loss is searched for others.
        has_state: Returns whether the model's code has set state on this rank, which has a last stage, that other ranks lack.

    The loss of a microbatch includes what stages added. After `close`, `losses` has those of all microbatches, and `added` the part of the
    mean that was added under each name. `requires_grad` then says whether the loss of any microbatch of the batch requires a gradient,
    `output_requires_grad` whether any output of the model on this rank did, `set_state` who has set such state, and `is_refused`
    whether `loss_fn` has a fault that all ranks raise. `reads` finds such faults.
    """

    def __init__(
        self,
        peers: Peers,
        loss_fn: LossFunction,
        loss_weight: LossWeight | None = None,
        on_loss: OnLoss | None = None,
        replicas: Peers | None = None,
        *,
        scales_gradients: bool = False,
        sums: bool = False,
        held: Callable[[], Iterable[Tensor]] = tuple,
        has_state: Callable[[], bool] = bool,
    ) -> None:
        self._peers = peers
        self.loss_fn = loss_fn
        self._loss_weight = loss_weight
        self._on_loss = on_loss
        self._replicas = replicas
        self._scales_gradients = scales_gradients
        self._sums = sums
        self._held = held
        self._has_state = has_state
        self.state = LossState(loss_fn)
        self.comparison = LossComparison(loss_fn, peers.device, is_on=not sums)
        self.reads = LossReads()
        self.divisor = 1
        self.losses: Tensor | None = None
        self.added: dict[str, Tensor] = {}
        self.requires_grad = self.output_requires_grad = self.is_refused = False
        self.set_state = SetState.NOTHING
        self.clear()

    def clear(self) -> None:
        """Drops everything in flight."""
        self.comparison.clear()
        self._loss_ranks: list[int] = []
        self._targets: list[Any] | None = None
        self._outputs: Outputs | None = None
        self._weights: list[float] | None = None
        self._known: list[Tensor | None] = []
        self._gradients: dict[tuple[torch.dtype, float], Tensor] = {}
        self._added: dict[int, dict[str, Tensor]] = {}
        self._sendings: list[Sending] = []
        self._result: Tensor | None = None
        self._expected: dict[int, Expected[LossReport]] = {}

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context without calls of `on_loss`, after which `losses` has its previous value."""
        on_loss, losses, added = self._on_loss, self.losses, self.added
        self._on_loss = None
        try:
            yield
        finally:
            self._on_loss, self.losses, self.added = on_loss, losses, added

    def open(self, loss_ranks: list[int], targets: list[Any] | None, sizes: Sequence[int], outputs: Outputs | None) -> None:
        """Begins a step in which microbatch j ends on rank `loss_ranks[j]` and has `sizes[j]` samples.

        In evaluation, `outputs` takes the outputs of the model. Raises `InputError` for negative or infinite weights, and if all are 0.
        """
        rank = self._peers.rank
        self._loss_ranks = loss_ranks
        self._summing_rank = loss_ranks[0]
        self._targets = None if targets is None else [as_target(target) for target in targets]
        weights = [] if self._targets is None else _weights(self._targets, sizes, self._loss_weight)
        self._total_weight = sum(weights)
        divides = self._scales_gradients and outputs is None
        self._whole_weight, num_in_batch = self._compare_replicas() if self._compares(loss_ranks, outputs) else (0.0, 0)
        self.divisor = num_in_batch if divides else 1
        if weights and not self._whole_weight and not self._sums:
            raise _unusable(weights)
        self._weights = weights if not self._sums and (len(set(weights)) > 1 or not self._total_weight) else None
        self._weights_hash = hash(tuple(weights)) % _NUM_HASHES if len(set(loss_ranks)) > 1 else 0
        self._outputs = outputs
        self._sizes = sizes
        self._known = [None] * len(loss_ranks)
        self._gradients = {}
        self._num_unfinished = loss_ranks.count(rank)
        self._sends_early = len(set(loss_ranks)) == 1 and self._replicas is None and is_host(self._peers.device)
        self._has_summed = False
        self._sendings = []
        self._result = self.losses = None
        self._added, self.added = {}, {}
        self.state.begin()
        self.requires_grad = self.output_requires_grad = self.is_refused = False
        self.set_state = SetState.NOTHING
        self.reads.fault = None
        others = [other for other in dict.fromkeys(loss_ranks) if other != rank]
        sources = others if rank == self._summing_rank else [self._summing_rank]
        self._expected = {
            source: self._peers.expect_control(LossReport, LossReport.num_numbers(len(loss_ranks)), source) for source in sources
        }

    def begin_comparison(self, *, is_cut_by_user: bool) -> None:
        """Begins to compare losses in a training step that is open. Microbatches that the user has cut are not compared."""
        is_compared = self.comparison.is_next and not is_cut_by_user
        ends_here = [microbatch for microbatch, rank in enumerate(self._loss_ranks) if rank == self._peers.rank] if is_compared else []
        self.comparison.begin({microbatch: self._weight_of(microbatch) for microbatch in ends_here})

    def finish(self, microbatch: int, output: Any) -> Tensor:
        """Returns the loss of one microbatch, from which backward starts with `gradient_of`; in evaluation without targets, the output.

        If it is called once more for a microbatch, because its forward is recomputed, `on_loss` is not called a second time.
        """
        if self._outputs is not None:
            self._outputs.put(microbatch, output)
        if self._known[microbatch] is not None and self._targets is not None:
            return self._loss(microbatch, output, self._targets[microbatch], is_first=False)
        result: Tensor = output if self._targets is None else self._loss(microbatch, output, self._targets[microbatch], is_first=True)
        self._count_finished()
        return result

    def store_output(self, microbatch: int, output: Any) -> Any:
        """Stores the output of an evaluated microbatch. If there are targets, ranks compute its loss together later."""
        if not self.has_targets:
            return self.finish(microbatch, output)
        if self._outputs is not None:
            self._outputs.put(microbatch, output)
        return output

    @property
    def has_targets(self) -> bool:
        """Whether this rank has the targets of the step."""
        return self._targets is not None

    def target_of(self, microbatch: int) -> Any:
        """Returns the target of a microbatch, if ranks divide the head."""
        assert self._targets is not None
        return self._targets[microbatch]

    def backward_factor(self, microbatch: int) -> float:
        """Returns the factor by which the loss of a microbatch is multiplied before backward."""
        return self._backward_loss(microbatch, torch.ones((), dtype=torch.float64, device="cpu")).item()

    def record_loss(self, microbatch: int, loss: Tensor, *, requires_grad: bool) -> None:
        """Records the loss of a microbatch that ranks have computed together, and whether any of them requires its gradient."""
        self._known[microbatch] = loss
        self.requires_grad |= requires_grad
        if self._on_loss is not None:
            self._on_loss(microbatch, loss)
        self._count_finished()

    def _count_finished(self) -> None:
        """Counts a finished microbatch. After the last one, sends the result if it depends on no other rank."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and self._sends_early:
            self._send_result()

    def _loss(self, microbatch: int, output: Any, target: Any, *, is_first: bool) -> Tensor:
        if is_first:
            self.comparison.before_loss()
        loss = None if self.is_refused else self._called(output, target)
        if self.is_refused:
            return self._refused(microbatch, output)
        loss = _scalar(loss)
        if is_first:
            self.comparison.note(microbatch, output, target, loss, size=self._sizes[microbatch])
        added = losses_so_far()
        if added:
            loss = loss + sum(added.values())
        if is_first:
            self._note_loss(microbatch, loss, added)
        counts = self._weights is None or self._weights[microbatch]
        result = loss if counts else _zero_loss((output, added), loss)
        if is_first:
            self._note_gradients(result, loss, output, added)
        return self._refused(microbatch, output) if self.is_refused else result

    def _note_loss(self, microbatch: int, loss: Tensor, added: Mapping[str, Tensor]) -> None:
        """Notes the loss of a microbatch and the parts that stages `added` to it, and calls `on_loss`."""
        if added:
            self._added[microbatch] = {name: value.detach().to(loss.dtype) for name, value in added.items()}
        value = self._known[microbatch] = loss.detach()
        if self._on_loss is not None:
            self._on_loss(microbatch, value)

    def _note_gradients(self, result: Tensor, loss: Tensor, output: Any, added: Mapping[str, Tensor]) -> None:
        """Notes whether the result and the output require a gradient. Refuses a loss of parameters that this rank does not hold."""
        if not self.requires_grad and (unknown := unknown_parameter(loss, tensors_in((output, added)), self._held())):
            self.reads.note(unknown)
            self.is_refused = True
            return
        self.requires_grad |= result.requires_grad
        if not self.output_requires_grad:
            self.output_requires_grad = any(tensor.requires_grad for tensor in tensors_in(output))

    def _called(self, output: Any, target: Any) -> Any:
        """Returns what `loss_fn` returns. A fault in what it reads refuses the step."""
        try:
            with self.reads.finding():
                return self.loss_fn(output, target)
        except Exception as error:
            if self.reads.fault is None and (module := self.reads.hooks.lacking()):
                self.reads.note(hook_fault(module, error))
            if self.reads.fault is None:
                refuse_far_gradient(error, "loss_fn")
                note_given(error, "loss_fn", output=output, target=target)
                raise
        finally:
            self.is_refused = self.reads.fault is not None

    def _refused(self, microbatch: int, output: Any) -> Tensor:
        """Returns NaN instead of the loss of a refused step, without a gradient: the step ends on every rank, and trains nothing."""
        dtype = next((tensor.dtype for tensor in tensors_in(output) if tensor.dtype in DTYPES), torch.float32)
        loss = self._known[microbatch] = torch.full((), math.nan, dtype=dtype, device=self._peers.device)
        return loss

    def gradient_of(self, seed: Callable[[], Tensor], microbatch: int) -> Tensor:
        """Returns the gradient of a microbatch's loss, with which its backward starts; `seed()` is the gradient of the mean loss.

        Scaling this gradient instead of the loss gives bitwise equal results and saves two kernels per microbatch.
        """
        loss = self._known[microbatch]
        assert loss is not None
        key = loss.dtype, 0.0 if self._weights_are_equal or self._sums else self._weight_of(microbatch)
        if key not in self._gradients:
            self._gradients[key] = self._backward_loss(microbatch, seed().to(loss.dtype))
        return self._gradients[key]

    def captured(self) -> Callable[[], None]:
        """Returns a function that notes what `finish` has noted in this step, for one whose passes are replayed into the same tensors."""
        names = ("_known", "_added", "requires_grad", "output_requires_grad")
        noted = {name: getattr(self, name) for name in names}
        return lambda: vars(self).update({name: copy(value) for name, value in noted.items()})

    def _share(self, microbatch: int, loss: Tensor) -> Tensor:
        if self._sums:
            return loss
        if self._weights_are_equal:
            return loss / len(self._loss_ranks)
        weight = self._weight_of(microbatch)
        return loss * (weight / self._whole_weight) if weight else torch.zeros_like(loss)

    def _backward_loss(self, microbatch: int, loss: Tensor) -> Tensor:
        """Returns the gradient with which backward begins: a share of `loss`, the gradient of the mean, or `divisor` times that."""
        if not self._scales_gradients:
            return self._share(microbatch, loss)
        factor = 1.0 if self._weights_are_equal else self._weight_of(microbatch) * self.divisor / self._whole_weight
        return loss if factor == 1 else loss * factor

    @property
    def _weights_are_equal(self) -> bool:
        """Whether every microbatch of the whole batch has the same weight, as far as that is known without those of replicas."""
        return self._weights is None and self._replicas is None

    def _weight_of(self, microbatch: int) -> float:
        return self._total_weight / len(self._loss_ranks) if self._weights is None else self._weights[microbatch]

    def _compares(self, loss_ranks: list[int], outputs: Outputs | None) -> bool:
        """Whether this rank compares its share of the batch with those of other replicas when a step begins."""
        return self._peers.rank in loss_ranks or (self._scales_gradients and outputs is None)

    def all_refuse(self, fault: str, loss_ranks: list[int], outputs: Outputs | None) -> bool:
        """Replaces `open` for a step that this replica refuses. Returns whether all others refuse it, as far as this rank knows."""
        if self._replicas is None or not self._compares(loss_ranks, outputs):
            return True
        with self._replicas.collective(_COMPARING):
            return all(isinstance(theirs, str) for theirs in self._replicas.gather_objects(fault))

    def _compare_replicas(self) -> tuple[float, int]:
        """Returns the weight of the whole batch and its number of microbatches. The share of this replica may weigh nothing."""
        count = len(self._loss_ranks)
        if self._replicas is None:
            return self._total_weight, count
        with self._replicas.collective(_COMPARING):
            from_all = self._replicas.gather_objects((None if self._targets is None else self._total_weight, count))
        refused = [f"another replica refuses its share of the batch: {theirs}" for theirs in from_all if isinstance(theirs, str)]
        if refused:
            raise InputError(refused[0])
        without = [rank for rank, (weight, _) in zip(self._replicas.members, from_all, strict=True) if weight is None]
        if without and len(without) < len(from_all):
            raise InputError(
                "targets are missing on rank {rank}", rank=without[0], remedy="give each replica those of its share of the batch"
            )
        return 0.0 if without else sum(weight for weight, _ in from_all), sum(theirs for _, theirs in from_all)

    def _send_result(self) -> None:
        total = self._mean()
        self._sum_added()
        if self._replicas is not None and total is not None:  # every replica has summed its own microbatches first, in their order
            total = self._sum_over_replicas(total)
        self._send_report(0.0 if total is None else total.item(), [rank for rank in range(self._peers.size) if rank != self._summing_rank])
        self._result = total
        self._has_summed = True

    def _mean(self) -> Tensor | None:
        """The sum of the shares in microbatch order, None without losses.

        Computed on the host, which reads the losses anyway: a GPU would run two kernels for each microbatch.
        """
        finished = [(microbatch, loss) for microbatch, loss in enumerate(self._known) if loss is not None]
        if not finished:
            return None
        losses = torch.stack([loss for _, loss in finished]).cpu()
        if self._weights_are_equal and not self._sums:
            shares = (losses / len(self._loss_ranks)).unbind()
        else:
            shares = tuple(self._share(microbatch, loss) for (microbatch, _), loss in zip(finished, losses, strict=True))
        return sum(shares[1:], shares[0]).to(finished[0][1].device)

    def _sum_over_replicas(self, total: Tensor) -> Tensor:
        """Returns the mean loss of the whole batch from this replica's part `total`; `added` and `requires_grad` become those of all."""
        assert self._replicas is not None
        parts = {name: part.item() for name, part in self.added.items()}
        with self._replicas.collective("summing the loss over replicas"):
            from_all = self._replicas.gather_objects((total.item(), parts, self.requires_grad, self.is_refused))
        means, added, requires_grad, is_refused = zip(*from_all, strict=True)
        names = dict.fromkeys(name for theirs in added for name in theirs)
        self.added = {name: total.new_tensor(sum(theirs.get(name, 0.0) for theirs in added)) for name in names}
        self.requires_grad, self.is_refused = any(requires_grad), any(is_refused)
        return total.new_tensor(sum(means))

    def _send_report(self, number: float, others: Sequence[int]) -> None:
        """Starts sending the losses that this rank knows to `others`, with this `number`, followed by the added losses by name."""
        if not others:
            return
        self.set_state |= SetState.MODEL * self._has_state() | SetState.LOSS * self.state.has_changed()
        self.set_state |= SetState.HOOKS * bool(self.reads.hooks.lacking())
        finished = [loss for loss in self._known if loss is not None]
        values = iter(torch.stack(finished).tolist() if finished else ())
        losses = tuple(0.0 if loss is None else next(values) for loss in self._known)
        following = AddedLossReport.from_parts(self.added) if self.added else None
        num_following = 0 if following is None else len(following.numbers())
        dtype, flags = finished[0].dtype if finished else None, (self.requires_grad, self.is_refused, self.set_state)
        report = LossReport(dtype, number, self._weights_hash, num_following, *flags, losses)
        self._sendings = [self._peers.send_control(report, rank) for rank in others]
        if following is not None:
            self._sendings += [self._peers.send_control(following, rank) for rank in others]

    def _sum_added(self) -> None:
        """Adds to `added` the losses that stages added to the microbatches on this rank, in their order."""
        for microbatch, losses in sorted(self._added.items()):
            for name, loss in losses.items():
                share = self._share(microbatch, loss)
                self._add_part(name, share.clone() if share is loss else share)  # users keep it, and a replayed step writes to `loss` again

    def _add_part(self, name: str, part: Tensor) -> None:
        before = self.added.get(name)
        self.added[name] = part if before is None else before + part

    def close(self) -> Tensor | None:
        """Ends the step and returns the mean loss as a scalar tensor; None without targets. Waits for the messages of other ranks."""
        rank = self._peers.rank
        if rank in self._loss_ranks and rank != self._summing_rank:
            self._sum_added()
            self._send_report(self._total_weight, [self._summing_rank])
            self.added = {}
        for source, expected in self._expected.items():
            self._merge_report(source, expected.wait("waiting for the loss"))
        if rank == self._summing_rank and not self._has_summed:
            self._send_result()
        for sending in self._sendings:
            sending.wait("sending the loss")
        finished = [loss for loss in self._known if loss is not None]
        self.losses = torch.stack(finished) if finished else None
        return self._result

    def _merge_report(self, source: int, report: LossReport) -> None:
        """Merges the losses that `source` knows. The rank that sums sends all of them, and the mean."""
        self.set_state |= report.set_state
        if report.dtype is None:
            self._result = None
            return
        self.requires_grad |= report.requires_grad
        self.is_refused |= report.is_refused
        if report.num_following:
            self._merge_added(source, report)
        device = self._peers.device
        values = torch.tensor(report.losses, dtype=report.dtype, device=device).unbind()
        if source == self._summing_rank:
            self._known = list(values)
            self._result = torch.tensor(report.number, dtype=report.dtype, device=device)
            return
        if (report.number, report.weights_hash) != (self._total_weight, self._weights_hash):
            summing, other = (self._peers.members[rank] for rank in (self._summing_rank, source))
            raise InputError(
                "the weights of the microbatches {difference} on ranks {rank} and {other}: {expected:g} and {got:g} in total",
                difference="are distributed differently" if report.number == self._total_weight else "differ",
                rank=summing,
                other=other,
                expected=self._total_weight,
                got=report.number,
                remedy="give every rank with a last stage the targets of the whole batch, and the same loss_weight",
            )
        for microbatch, value in enumerate(values):
            if source == self._loss_ranks[microbatch]:
                self._known[microbatch] = value

    def _merge_added(self, source: int, report: LossReport) -> None:
        """Merges the added losses from the message that follows a `report`."""
        following = self._peers.expect_control(AddedLossReport, report.num_following, source).wait(
            "waiting for the losses that stages added"
        )
        for name, part in following.parts.items():
            self._add_part(name, torch.tensor(part, dtype=report.dtype, device=self._peers.device))


def _scalar(loss: Any) -> Tensor:
    """Returns what `loss_fn` has returned, without dimensions. Raises `InputError` if it is no loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            "loss_fn must return {expected}, got {got}", expected="a tensor with one element, the mean loss of a microbatch", got=shape
        )
    if loss.dtype not in DTYPES:
        raise InputError("loss_fn must return one of {expected}, got {got}", expected=", ".join(map(str, DTYPES)), got=str(loss.dtype))
    return loss.reshape(()) if loss.dim() else loss


def _weights(targets: list[Any], sizes: Sequence[int], loss_weight: LossWeight | None) -> list[float]:
    """Returns the weight of each microbatch."""
    if loss_weight is None:
        weights = [float(size) for size in sizes]
    else:
        from_all = [_weight(loss_weight, target) for target in targets]
        if all(isinstance(weight, Tensor) for weight in from_all):
            weights = torch.stack([torch.as_tensor(weight).detach().reshape(()).double() for weight in from_all]).tolist()
        else:
            weights = [float(weight) for weight in from_all]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise _unusable(weights)
    return weights


def _weight(loss_weight: LossWeight, target: Any) -> float | Tensor:
    try:
        return loss_weight(target)
    except Exception as error:
        note_given(error, "loss_weight", target=target)
        raise


def _unusable(weights: list[float]) -> InputError:
    """Returns the error for weights without a mean. If all are 0, so are those of every other replica."""
    got = ", ".join(f"{weight:g}" for weight in weights)
    return InputError("the weights of the microbatches must be finite, none negative and not all 0, got {got}", got=got)


def _zero_loss(parts: Any, loss: Tensor) -> Tensor:
    """Returns a zero loss whose gradients for these tensors are 0, even if those of `loss` are NaN, as for a mean over no token."""
    zeros = [tensor.flatten()[:0].sum() for tensor in tensors_in(parts) if tensor.requires_grad]
    return sum(zeros, torch.zeros_like(loss))
