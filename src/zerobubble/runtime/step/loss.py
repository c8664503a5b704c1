"""The loss of a step: one value per microbatch on the last stage's rank, their weighted mean on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.step.loss_parameters import refuse_untaken
from zerobubble.runtime.step.loss_reports import DTYPES, AddedLossReport, LossReport
from zerobubble.runtime.transport.control import Expected, Sending
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.added_losses import losses_so_far
from zerobubble.runtime.values.payload import tensors_in

LossFunction = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], "float | Tensor"]
OnLoss = Callable[[int, Tensor], object]

_COMPARING = "comparing the weights of the replicas' shares of the batch"
_WEIGHINGS = 2**52
"""How many ways to weigh microbatches can be told apart by a float64, in which Python gives equal weights equal hashes on every machine."""


class StepLosses:
    """The losses of one step after another: computed on the ranks with a last stage, and their mean told to all others.

    Each loss counts by its share of the weights: of the samples, or of what `loss_weight(target)` says. Shares are summed in microbatch
    order, whatever order the schedule ran them in, which gives the numbers of one device that accumulates. The rank where the first
    microbatch ends sums them; with several routes the other ranks with a last stage send it theirs. On a CPU with one route the result is
    sent with the last forward, so that nobody waits for it at the end of the step; otherwise it is sent at the end, because reading a
    loss makes a GPU's host wait. `on_loss(microbatch, loss)` is called with each on the rank that computes it.

    With `replicas`, the ranks that end the microbatches of other shares of the batch, shares and the mean are those of the whole batch.

    With `scales_gradients`, backward passes begin with losses as they are (weighted, where weights differ), and not with their shares: the
    gradients of the step are then `divisor` times too large, which is the number of microbatches of the whole batch, and otherwise 1.

    `held` gives the parameters of this rank's stages. In each step one loss is searched for others.

    The loss of a microbatch has in it what stages added. After `close`, `losses` are those of all microbatches, and `added` is the part of
    the mean that was added under each name. `goes_back` then says whether the loss of any microbatch of the batch requires a gradient, and
    `output_goes_back` whether any output of the model did on this rank.
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
        held: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._peers = peers
        self._loss_fn = loss_fn
        self._loss_weight = loss_weight
        self._on_loss = on_loss
        self._replicas = replicas
        self._scales_gradients = scales_gradients
        self._held = held
        self.divisor = 1
        self.losses: Tensor | None = None
        self.added: dict[str, Tensor] = {}
        self.goes_back = self.output_goes_back = False
        self.clear()

    def clear(self) -> None:
        """Let go of everything in flight."""
        self._loss_ranks: list[int] = []
        self._targets: list[Any] | None = None
        self._outputs: list[Any] | None = None
        self._weights: list[float] | None = None
        self._known: list[Tensor | None] = []
        self._gradients: dict[tuple[torch.dtype, float], Tensor] = {}
        self._added: dict[int, dict[str, Tensor]] = {}
        self._sendings: list[Sending] = []
        self._result: Tensor | None = None
        self._expected: dict[int, Expected[LossReport]] = {}

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, nobody hears of losses; afterwards `losses` are what they were."""
        on_loss, losses, added = self._on_loss, self.losses, self.added
        self._on_loss = None
        try:
            yield
        finally:
            self._on_loss, self.losses, self.added = on_loss, losses, added

    def open(self, loss_ranks: list[int], targets: list[Any] | None, sizes: Sequence[int], outputs: list[Any] | None) -> None:
        """Start a step where microbatch j ends on rank `loss_ranks[j]` and has `sizes[j]` samples.

        `outputs`, in evaluation, is filled with what the model gives. Raises `InputError` for weights that no mean can be taken by.
        """
        rank = self._peers.rank
        self._loss_ranks = loss_ranks
        self._summing_rank = loss_ranks[0]
        self._targets = None if targets is None else [_without_tuple(target) for target in targets]
        weights = [] if self._targets is None else _weights(self._targets, sizes, self._loss_weight)
        self._total_weight = sum(weights)
        divides = self._scales_gradients and outputs is None
        self._whole_weight, num_in_batch = self._compare_replicas() if self._compares(loss_ranks, outputs) else (0.0, 0)
        self.divisor = num_in_batch if divides else 1
        if weights and not self._whole_weight:
            raise _unusable(weights)
        self._weights = weights if len(set(weights)) > 1 or not self._total_weight else None
        self._weighing = hash(tuple(weights)) % _WEIGHINGS if len(set(loss_ranks)) > 1 else 0
        self._outputs = outputs
        self._known = [None] * len(loss_ranks)
        self._gradients = {}
        self._num_unfinished = loss_ranks.count(rank)
        self._tells_early = len(set(loss_ranks)) == 1 and self._replicas is None and self._peers.device.type == "cpu"
        self._has_summed = False
        self._sendings = []
        self._result = self.losses = None
        self._added, self.added = {}, {}
        self.goes_back = self.output_goes_back = False
        others = [other for other in dict.fromkeys(loss_ranks) if other != rank]
        sources = others if rank == self._summing_rank else [self._summing_rank]
        self._expected = {
            source: self._peers.expect_control(LossReport, LossReport.num_numbers(len(loss_ranks)), source) for source in sources
        }

    def finish(self, microbatch: int, output: Any) -> Tensor:
        """The loss of one microbatch, from which backward starts with `gradient_of`; the output itself when evaluating without targets.

        When it is called again for a microbatch, whose forward is then computed again, nobody hears of the loss a second time.
        """
        if self._outputs is not None:
            self._outputs[microbatch] = output
        if self._known[microbatch] is not None and self._targets is not None:
            return self._loss(microbatch, output, self._targets[microbatch], tells=False)
        result: Tensor = output if self._targets is None else self._loss(microbatch, output, self._targets[microbatch], tells=True)
        self._count_finished()
        return result

    def keep(self, microbatch: int, output: Any) -> Any:
        """Keep what evaluation gives of one microbatch, whose loss ranks compute together afterwards where there are targets."""
        if not self.has_targets:
            return self.finish(microbatch, output)
        if self._outputs is not None:
            self._outputs[microbatch] = output
        return output

    @property
    def has_targets(self) -> bool:
        """Whether this rank was given the targets of the step."""
        return self._targets is not None

    def target_of(self, microbatch: int) -> Any:
        """The target of a microbatch, where the head that makes its loss is divided."""
        assert self._targets is not None
        return self._targets[microbatch]

    def factor_of(self, microbatch: int) -> float:
        """By what the loss of a microbatch is multiplied to go back from."""
        return self._to_go_back_from(microbatch, torch.ones((), dtype=torch.float64, device="cpu")).item()

    def note(self, microbatch: int, loss: Tensor, *, goes_back: bool) -> None:
        """Take over the loss of a microbatch that ranks have computed together, and whether any of them goes back from it."""
        self._known[microbatch] = loss
        self.goes_back |= goes_back
        if self._on_loss is not None:
            self._on_loss(microbatch, loss)
        self._count_finished()

    def _count_finished(self) -> None:
        """One more microbatch is over; the last one tells all where nobody else has to be heard."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and self._tells_early:
            self._tell_all()

    def _loss(self, microbatch: int, output: Any, target: Any, *, tells: bool) -> Tensor:
        loss = self._loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn must return a tensor with one element, the mean loss of a microbatch, got {shape}")
        if loss.dtype not in DTYPES:
            raise InputError(f"loss_fn must return one of {', '.join(map(str, DTYPES))}, got {loss.dtype}")
        if loss.dim():
            loss = loss.reshape(())
        added = losses_so_far()
        if added:
            loss = loss + sum(added.values())
        if tells:
            if added:
                self._added[microbatch] = {name: value.detach().to(loss.dtype) for name, value in added.items()}
            known = self._known[microbatch] = loss.detach()
            if self._on_loss is not None:
                self._on_loss(microbatch, known)
        counts = self._weights is None or self._weights[microbatch]
        result = loss if counts else _zero_loss((output, added), loss)
        if tells:
            if not self.goes_back:
                refuse_untaken(loss, tensors_in((output, added)), self._held())
            self.goes_back |= result.requires_grad
            if not self.output_goes_back:
                self.output_goes_back = any(tensor.requires_grad for tensor in tensors_in(output))
        return result

    def gradient_of(self, seed: Callable[[], Tensor], microbatch: int) -> Tensor:
        """Returns the gradient from which backward of a microbatch starts at its loss; `seed()` is that of the mean loss.

        A share in this gradient instead of the loss itself gives the same bits, without two kernels for each microbatch.
        """
        loss = self._known[microbatch]
        assert loss is not None
        key = loss.dtype, 0.0 if self._counts_alike else self._weight_of(microbatch)
        if key not in self._gradients:
            self._gradients[key] = self._to_go_back_from(microbatch, seed().to(loss.dtype))
        return self._gradients[key]

    def _share(self, microbatch: int, loss: Tensor) -> Tensor:
        if self._counts_alike:
            return loss / len(self._loss_ranks)
        weight = self._weight_of(microbatch)
        return loss * (weight / self._whole_weight) if weight else torch.zeros_like(loss)

    def _to_go_back_from(self, microbatch: int, loss: Tensor) -> Tensor:
        """What a backward pass begins with, by the gradient `loss` of the mean: its share, or `divisor` times that."""
        if not self._scales_gradients:
            return self._share(microbatch, loss)
        factor = 1.0 if self._counts_alike else self._weight_of(microbatch) * self.divisor / self._whole_weight
        return loss if factor == 1 else loss * factor

    @property
    def _counts_alike(self) -> bool:
        """Whether every microbatch of the whole batch counts the same, as far as that is known without the replicas' weights."""
        return self._weights is None and self._replicas is None

    def _weight_of(self, microbatch: int) -> float:
        return self._total_weight / len(self._loss_ranks) if self._weights is None else self._weights[microbatch]

    def _compares(self, loss_ranks: list[int], outputs: list[Any] | None) -> bool:
        """Whether this rank compares its share of the batch with the other replicas' when a step begins."""
        return self._peers.rank in loss_ranks or (self._scales_gradients and outputs is None)

    def all_refuse(self, fault: str, loss_ranks: list[int], outputs: list[Any] | None) -> bool:
        """In the place of `open`, for a step that this replica refuses: whether all others do, as far as this rank hears of it."""
        if self._replicas is None or not self._compares(loss_ranks, outputs):
            return True
        with self._replicas.collective(_COMPARING):
            return all(isinstance(theirs, str) for theirs in self._replicas.gather_objects(fault))

    def _compare_replicas(self) -> tuple[float, int]:
        """The weight of the whole batch, of which this replica may have a share that weighs nothing, and its number of microbatches."""
        count = len(self._loss_ranks)
        if self._replicas is None:
            return self._total_weight, count
        with self._replicas.collective(_COMPARING):
            told = self._replicas.gather_objects((None if self._targets is None else self._total_weight, count))
        refused = [f"another replica refuses its share of the batch: {theirs}" for theirs in told if isinstance(theirs, str)]
        if refused:
            raise InputError(refused[0])
        without = [rank for rank, (weight, _) in zip(self._replicas.members, told, strict=True) if weight is None]
        if without and len(without) < len(told):
            raise InputError(f"targets are missing on rank {without[0]}: each replica needs those of its share of the batch")
        return 0.0 if without else sum(weight for weight, _ in told), sum(theirs for _, theirs in told)

    def _tell_all(self) -> None:
        total = self._mean()
        self._sum_added()
        if self._replicas is not None and total is not None:
            total = self._sum_over_replicas(total)
        self._tell(0.0 if total is None else total.item(), [rank for rank in range(self._peers.size) if rank != self._summing_rank])
        self._result = total
        self._has_summed = True

    def _mean(self) -> Tensor | None:
        """The sum of the shares in microbatch order, None without losses.

        Computed on the host, which reads the losses anyway: a GPU would run two kernels for each microbatch.
        """
        known = [(microbatch, loss) for microbatch, loss in enumerate(self._known) if loss is not None]
        if not known:
            return None
        losses = torch.stack([loss for _, loss in known]).cpu()
        if self._counts_alike:
            shares = (losses / len(self._loss_ranks)).unbind()
        else:
            shares = tuple(self._share(microbatch, loss) for (microbatch, _), loss in zip(known, losses, strict=True))
        return sum(shares[1:], shares[0]).to(known[0][1].device)

    def _sum_over_replicas(self, total: Tensor) -> Tensor:
        """The mean loss of the whole batch, of which `total` is this replica's part; `added` and `goes_back` become those of it, too."""
        assert self._replicas is not None
        parts = {name: part.item() for name, part in self.added.items()}
        with self._replicas.collective("summing the loss over replicas"):
            told = self._replicas.gather_objects((total.item(), parts, self.goes_back))
        names = dict.fromkeys(name for _, theirs, _ in told for name in theirs)
        self.added = {name: total.new_tensor(sum(theirs.get(name, 0.0) for _, theirs, _ in told)) for name in names}
        self.goes_back = any(goes_back for _, _, goes_back in told)
        return total.new_tensor(sum(mean for mean, _, _ in told))

    def _tell(self, number: float, others: Sequence[int]) -> None:
        """Start telling `others` the losses that this rank knows, with this `number`, and behind them what was added by name."""
        if not others:
            return
        known = [loss for loss in self._known if loss is not None]
        values = iter(torch.stack(known).tolist() if known else ())
        losses = tuple(0.0 if loss is None else next(values) for loss in self._known)
        behind = AddedLossReport.of(self.added) if self.added else None
        num_behind = 0 if behind is None else len(behind.numbers())
        report = LossReport(known[0].dtype if known else None, number, self._weighing, num_behind, self.goes_back, losses)
        self._sendings = [self._peers.send_control(report, rank) for rank in others]
        if behind is not None:
            self._sendings += [self._peers.send_control(behind, rank) for rank in others]

    def _sum_added(self) -> None:
        """Add to `added` what stages added to the microbatches whose loss is on this rank, in their order."""
        for microbatch, losses in sorted(self._added.items()):
            for name, loss in losses.items():
                self._add_part(name, self._share(microbatch, loss))

    def _add_part(self, name: str, part: Tensor) -> None:
        before = self.added.get(name)
        self.added[name] = part if before is None else before + part

    def close(self) -> Tensor | None:
        """End the step: the mean loss as a scalar tensor, None when there were no targets. Waits for the messages of other ranks."""
        rank = self._peers.rank
        if rank in self._loss_ranks and rank != self._summing_rank:
            self._sum_added()
            self._tell(self._total_weight, [self._summing_rank])
            self.added = {}
        for source, expected in self._expected.items():
            self._take_over(source, expected.wait("waiting for the loss"))
        if rank == self._summing_rank and not self._has_summed:
            self._tell_all()
        for sending in self._sendings:
            sending.wait("sending the loss")
        known = [loss for loss in self._known if loss is not None]
        self.losses = torch.stack(known) if known else None
        return self._result

    def _take_over(self, source: int, report: LossReport) -> None:
        """Take over the losses that `source` knows: from the rank that sums them all of them, and the mean."""
        if report.dtype is None:
            self._result = None
            return
        self.goes_back |= report.goes_back
        if report.num_behind:
            self._take_over_added(source, report)
        device = self._peers.device
        values = torch.tensor(report.losses, dtype=report.dtype, device=device).unbind()
        if source == self._summing_rank:
            self._known = list(values)
            self._result = torch.tensor(report.number, dtype=report.dtype, device=device)
            return
        if (report.number, report.weighing) != (self._total_weight, self._weighing):
            summing, other = (self._peers.members[rank] for rank in (self._summing_rank, source))
            raise InputError(
                f"ranks {summing} and {other} weigh the microbatches by {self._total_weight:g} and {report.number:g} in all"
                f"{', and one by one otherwise' * (report.number == self._total_weight)}: "
                "every rank with a last stage needs the targets of the whole batch, and the same loss_weight"
            )
        for microbatch, value in enumerate(values):
            if source == self._loss_ranks[microbatch]:
                self._known[microbatch] = value

    def _take_over_added(self, source: int, report: LossReport) -> None:
        """Take over what was added by name, as the message behind a `report` tells it."""
        behind = self._peers.expect_control(AddedLossReport, report.num_behind, source).wait("waiting for the losses that stages added")
        for name, part in behind.parts.items():
            self._add_part(name, torch.tensor(part, dtype=report.dtype, device=self._peers.device))


def _without_tuple(target: Any) -> Any:
    """A target as `loss_fn` takes it: a tuple of one is that one."""
    return target[0] if isinstance(target, tuple) and len(target) == 1 else target


def _weights(targets: list[Any], sizes: Sequence[int], loss_weight: LossWeight | None) -> list[float]:
    """The weight of each microbatch."""
    if loss_weight is None:
        weights = [float(size) for size in sizes]
    else:
        told = [loss_weight(target) for target in targets]
        if all(isinstance(weight, Tensor) for weight in told):
            weights = torch.stack([torch.as_tensor(weight).detach().reshape(()).double() for weight in told]).tolist()
        else:
            weights = [float(weight) for weight in told]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise _unusable(weights)
    return weights


def _unusable(weights: list[float]) -> InputError:
    """The error for weights by which no mean can be taken; where all are 0, so are those of every other replica."""
    got = ", ".join(f"{weight:g}" for weight in weights)
    return InputError(f"the weights of the microbatches must be finite, none negative and not all 0, got {got}")


def _zero_loss(parts: Any, loss: Tensor) -> Tensor:
    """A loss of 0 whose gradient for the tensors it is made of is 0, though that of `loss` may be NaN: the mean over no token, say."""
    zeros = [tensor.flatten()[:0].sum() for tensor in tensors_in(parts) if tensor.requires_grad]
    return sum(zeros, torch.zeros_like(loss))
