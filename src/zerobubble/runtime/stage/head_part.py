"""A rank's part of a head that is divided by its vocabulary: some rows of the weight, and what passes compute with them.

The loss is the cross entropy of `output @ weight.T + bias`. No rank has all logits of a token. Each knows the largest of its own, the sum
of their exponentials beside that, and the logit of the target where it has it (with label smoothing, its own logits as far as the loss asks
for them); from these three numbers of every part each can tell by how much its own softmax has to be corrected (Vocabulary Parallelism,
arXiv 2411.05288, sections 4.2 to 4.4):

    S    softmax over its own rows, times these rows: a part of the gradient for the output, to be corrected; the row of the target apart
    T    the corrected softmax gives the gradients of the rows
    SL   the softmax over its own rows alone
    TX   corrects it, and computes both gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.head_rows import HeadRows, mark_head_rows
from zerobubble.runtime.values.payload import Tensors

BuildRows = Callable[[int, int], nn.Linear]
"""A function `(first_row, end_row) -> nn.Linear` that makes these rows of the head."""


class GivenToHead(NamedTuple):
    """What every part of the head is given of a microbatch of n tokens.

    `output`: what the last stage gave, (n, width). `target`: the row that each token asks for, (n). `weight`: the derivative of the step's
    loss by that of each token, (n); it is 0 for a token that does not count, whose target is then that of no row or of any.
    """

    output: Tensor
    target: Tensor
    weight: Tensor


@dataclass(slots=True)
class Softmax:
    """What the first pass of a part leaves for the second: the `softmax` of each token over the rows of the part, (n, rows).

    `has_target` says for which tokens the part has the row that they ask for, and `row` which one of its own it is, 0 where it has none.
    `sums` are those that the part gives to the others, `dtype` is the type of the logits, and `held` counts the memory.
    """

    given: GivenToHead
    softmax: Tensor
    row: Tensor
    has_target: Tensor
    sums: Tensor
    dtype: torch.dtype
    held: list[Held]

    @property
    def in_layers_type(self) -> Tensor:
        """The softmax in the type of the logits, in which products are computed."""
        return self.softmax.to(self.dtype)


class Correction(NamedTuple):
    """What follows from the sums of all parts.

    `factors` are those by which the softmax of each part has to be multiplied, (parts, n), and `losses` the loss of each token, (n).
    """

    factors: Tensor
    losses: Tensor

    @classmethod
    def of(cls, sums: Sequence[Tensor]) -> Correction:
        """What the sums of all parts say, in the order of the parts; each is (3, n): maximum, sum of exponentials, logit of the target."""
        largest, totals, targets = torch.stack(tuple(sums), 1).unbind()
        maximum = largest.amax(0)
        parts = totals * (largest - maximum).exp()
        total = parts.sum(0)
        return cls(parts / total, maximum + total.log() - targets.sum(0))


class HeadName(NamedTuple):
    """The whole head: its name in checkpoints, and its rows."""

    name: str
    num_rows: int


class HeadPart:
    """The rows of the head from `first_row` to `end_row` that one rank has, as parameters of the `module` of the stage it goes by.

    So they are trained, summed over replicas and clipped like all that this module has. They have names that no other part has, and are
    marked as rows of the `whole`, which is what a checkpoint has. A module that has them already goes on with them; otherwise `build` makes
    them. Gradients are added where `gradients` are.

    The target of a token counts `of_target` and each row of the whole vocabulary `of_each`, as label smoothing wants it.
    """

    def __init__(
        self,
        module: nn.Module,
        build: BuildRows,
        first_row: int,
        end_row: int,
        whole: HeadName,
        gradients: Gradients,
        of_target: float = 1.0,
        of_each: float = 0.0,
    ) -> None:
        self.first_row = first_row
        self._of_target = of_target
        self._of_each = of_each
        self._module = module
        self._name = f"head_rows_{first_row}_to_{end_row}"
        self._gradients = gradients
        if self._name not in dict(module.named_parameters(recurse=False)):
            made = build(first_row, end_row)
            module.register_parameter(self._name, made.get_parameter("weight"))
            module.register_parameter(f"{self._name}_bias", made.get_parameter("bias") if made.bias is not None else None)
        for own, name in zip(self.names, ("weight", "bias"), strict=True):
            mark_head_rows(module, own, HeadRows(f"{whole.name}.{name}", first_row, whole.num_rows))

    @property
    def names(self) -> tuple[str, str]:
        """The names of weight and bias in the module."""
        return self._name, f"{self._name}_bias"

    @property
    def trains(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    @property
    def weight(self) -> nn.Parameter:
        """The rows, (rows, width)."""
        weight: nn.Parameter = getattr(self._module, self._name)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """What is added to the logits of the rows, (rows), None for nothing."""
        bias: nn.Parameter | None = getattr(self._module, f"{self._name}_bias")
        return bias

    def softmax(self, given: GivenToHead, meter: Meter | None) -> Softmax:
        """The softmax over the rows of this part alone; it runs under the caller's autocast."""
        with torch.no_grad():
            logits = functional.linear(given.output, self.weight, self.bias)
            exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
            place = given.target - self.first_row
            has_target = (place >= 0) & (place < len(self.weight))
            row = place.where(has_target, 0)
            largest = exact.amax(1)
            exponentials = (exact - largest[:, None]).exp_()
            total = exponentials.sum(1)
            target = exact.gather(1, row[:, None])[:, 0].where(has_target, 0)
            if self._of_each:
                target = self._of_target * target + self._of_each * exact.sum(1)
            softmax = exponentials.div_(total[:, None])
            held = [] if meter is None else [meter.hold(softmax), meter.hold(given.output)]
            return Softmax(given, softmax, row, has_target, torch.stack((largest, total, target)), logits.dtype, held)

    def gradient_to_correct(self, found: Softmax) -> Tensors:
        """What S gives to the gradient for the output, as `gradient_of_output` takes it: its sums, its product, and what is added apart.

        The row of the target counts by its probability less 1, which is small for a token that the model predicts well. In a product of the
        layer's type the probability would be rounded first, and the difference would be mostly rounding.
        """
        with torch.no_grad():
            weight = self.weight.to(found.dtype)
            row = found.row[:, None]
            own = found.softmax.gather(1, row)
            found.softmax.scatter_(1, row, own.masked_fill(found.has_target[:, None], 0))
            others = found.in_layers_type @ weight
            found.softmax.scatter_(1, row, own)
            has_target = found.has_target.to(own.dtype)
            counts = torch.stack((own[:, 0] * has_target, -self._of_target * has_target))
            every = (self.weight.sum(0, dtype=own.dtype).mul_(-self._of_each),) if self._of_each else ()
            return found.sums, others, weight[found.row], counts, *every

    def correct(self, found: Softmax, correction: Correction, part: int) -> None:
        """Make of the softmax over the rows of this part, the number `part`, the derivative of the loss of each token by its logits."""
        with torch.no_grad():
            found.softmax.mul_(correction.factors[part][:, None])
            of_target = found.has_target[:, None].to(found.softmax.dtype).mul_(-self._of_target)
            found.softmax.scatter_add_(1, found.row[:, None], of_target)
            if self._of_each:
                found.softmax.sub_(self._of_each)

    def gradient(self, found: Softmax) -> Tensors:
        """What TX gives to the gradient for the output, once the softmax is corrected: its sums, and what needs no correction."""
        with torch.no_grad():
            return found.sums, found.in_layers_type @ self.weight.to(found.dtype)

    def add_weight_gradients(self, found: Softmax) -> None:
        """Add the gradients of the rows, once the softmax is corrected; what was found is used up."""
        with torch.no_grad():
            by_logits = found.softmax.mul_(found.given.weight[:, None].to(found.softmax.dtype)).to(found.dtype)
            if self.weight.requires_grad:
                self._gradients.add(self.weight, (by_logits.T @ found.given.output.to(by_logits.dtype)).to(self.weight.dtype))
            if self.bias is not None and self.bias.requires_grad:
                self._gradients.add(self.bias, by_logits.sum(0).to(self.bias.dtype))


def gradient_of_output(parts: Sequence[Tensors], weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient for the last stage's output, (n, width), and the loss of each token, (n), from what all parts gave, in their order.

    `weight` is that of `GivenToHead`. Parts are added one after another, so that the numbers are the same in every run.
    """
    with torch.no_grad():
        correction = Correction.of([sums for sums, *_ in parts])
        total = torch.zeros_like(parts[0][1], dtype=correction.factors.dtype)
        for factor, (_, product, *apart) in zip(correction.factors, parts, strict=True):
            if apart:
                rows, (probability, of_target), *every = apart
                total.addcmul_(product.to(total.dtype), factor[:, None])
                total.addcmul_(rows.to(total.dtype), (probability * factor + of_target)[:, None])
                for added in every:
                    total += added
            else:
                total += product
        return total.mul_(weight[:, None].to(total.dtype)), correction.losses
