"""A rank's part of a head divided by vocabulary: some rows of the weight, and the passes that compute with them.

The loss is the cross entropy of `output @ weight.T + bias`. No rank has all logits of a token. Each part knows the maximum of its own
logits, the sum of their exponentials relative to it, and the logit of the target if it has that row (with label smoothing, its share of the
smoothed target logit). From these three numbers of every part, each part can compute the factor that corrects its own softmax (Vocabulary
Parallelism, arXiv 2411.05288, sections 4.2 to 4.4):

    S    softmax over its own rows, times these rows: a part of the output gradient, to be corrected; the target row is separate
    T    the corrected softmax gives the gradients of the rows
    SL   only the softmax over its own rows
    TX   corrects it, and computes both gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Tensors

BuildRows = Callable[[int, int], nn.Linear]
"""A function `(first_row, end_row) -> nn.Linear` that creates these rows of the head."""


class GivenToHead(NamedTuple):
    """The inputs of every part of the head for a microbatch of n tokens.

    `output`: the output of the last stage, (n, width). `target`: the target row of each token, (n). `weight`: the derivative of the step's
    loss by the loss of each token, (n). The weight is 0 for an ignored token, whose target is then arbitrary.
    """

    output: Tensor
    target: Tensor
    weight: Tensor


@dataclass(slots=True)
class Softmax:
    """The result of the first pass of a part, kept for the second: the `softmax` of each token over the part's rows, (n, rows).

    `has_target` marks the tokens whose target row is in this part, and `row` is its index in the part, 0 otherwise. `sums` are sent to the
    other parts, `dtype` is the dtype of the logits, and `held` counts the memory.
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
        """The softmax in the dtype of the logits, used in products."""
        return self.softmax.to(self.dtype)


class Correction(NamedTuple):
    """The correction computed from the sums of all parts.

    `factors` multiply the softmax of each part, (parts, n), and `losses` are the losses of the tokens, (n).
    """

    factors: Tensor
    losses: Tensor

    @classmethod
    def from_sums(cls, sums: Sequence[Tensor]) -> Correction:
        """Computes the correction from the sums of all parts, in order; each is (3, n): maximum, sum of exponentials, target logit."""
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
    """The rows of the head from `first_row` to `end_row`, registered as parameters of the `module` of their stage.

    So they are trained, reduced over replicas and clipped like all parameters of that module. Their names are unique among the parts, and
    they are marked as rows of the `whole`, which checkpoints store. If the module has them already, they are reused; otherwise `build`
    creates them. Gradients are added to `gradients`.

    For label smoothing, the target row of a token has weight `of_target`, and each row of the whole vocabulary has weight `of_each`.
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
            rows = build(first_row, end_row)
            module.register_parameter(self._name, rows.get_parameter("weight"))
            module.register_parameter(f"{self._name}_bias", rows.get_parameter("bias") if rows.bias is not None else None)
        for own_name, name in zip(self.names, ("weight", "bias"), strict=True):
            mark_head_rows(module, own_name, HeadRows(f"{whole.name}.{name}", first_row, whole.num_rows))

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
        """The bias of the rows, (rows), None without one."""
        bias: nn.Parameter | None = getattr(self._module, f"{self._name}_bias")
        return bias

    def softmax(self, inputs: GivenToHead, meter: Meter | None) -> Softmax:
        """Computes the softmax over only the rows of this part, under the caller's autocast."""
        with torch.no_grad():
            logits = functional.linear(inputs.output, self.weight, self.bias)
            exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
            place = inputs.target - self.first_row
            has_target = (place >= 0) & (place < len(self.weight))
            row = place.where(has_target, 0)
            largest = exact.amax(1)
            exponentials = (exact - largest[:, None]).exp_()
            total = exponentials.sum(1)
            target = exact.gather(1, row[:, None])[:, 0].where(has_target, 0)
            if self._of_each:
                target = self._of_target * target + self._of_each * exact.sum(1)
            softmax = exponentials.div_(total[:, None])
            held = [] if meter is None else [meter.hold(softmax), meter.hold(inputs.output)]
            return Softmax(inputs, softmax, row, has_target, torch.stack((largest, total, target)), logits.dtype, held)

    def gradient_to_correct(self, state: Softmax) -> Tensors:
        """Returns the contribution of S to the output gradient, for `gradient_of_output`: its sums, its product, and separate terms.

        The target row has the weight probability - 1, which is small for a well-predicted token. In a low-precision product, the
        probability would be rounded first, and the difference would be mostly rounding error. So this row is separate.
        """
        with torch.no_grad():
            weight = self.weight.to(state.dtype)
            row = state.row[:, None]
            target = state.softmax.gather(1, row)
            state.softmax.scatter_(1, row, target.masked_fill(state.has_target[:, None], 0))
            others = state.in_layers_type @ weight
            state.softmax.scatter_(1, row, target)
            has_target = state.has_target.to(target.dtype)
            counts = torch.stack((target[:, 0] * has_target, -self._of_target * has_target))
            every = (self.weight.sum(0, dtype=target.dtype).mul_(-self._of_each),) if self._of_each else ()
            return state.sums, others, weight[state.row], counts, *every

    def correct(self, state: Softmax, correction: Correction, part: int) -> None:
        """Converts the softmax of this part, with index `part`, into the derivative of each token's loss by its logits, in place."""
        with torch.no_grad():
            state.softmax.mul_(correction.factors[part][:, None])
            of_target = state.has_target[:, None].to(state.softmax.dtype).mul_(-self._of_target)
            state.softmax.scatter_add_(1, state.row[:, None], of_target)
            if self._of_each:
                state.softmax.sub_(self._of_each)

    def gradient(self, state: Softmax) -> Tensors:
        """Returns the contribution of TX to the output gradient, after `correct`: its sums, and a product that needs no correction."""
        with torch.no_grad():
            return state.sums, state.in_layers_type @ self.weight.to(state.dtype)

    def add_weight_gradients(self, state: Softmax) -> None:
        """Adds the gradients of the rows, after `correct`; overwrites its softmax."""
        with torch.no_grad():
            by_logits = state.softmax.mul_(state.given.weight[:, None].to(state.softmax.dtype)).to(state.dtype)
            if self.weight.requires_grad:
                self._gradients.add(self.weight, (by_logits.T @ state.given.output.to(by_logits.dtype)).to(self.weight.dtype))
            if self.bias is not None and self.bias.requires_grad:
                self._gradients.add(self.bias, by_logits.sum(0).to(self.bias.dtype))


def gradient_of_output(parts: Sequence[Tensors], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Combines the contributions of all parts, in order, into the gradient of the last stage's output, (n, width), and the losses, (n).

    `weight` is that of `GivenToHead`. Parts are added in a fixed order, so that results are reproducible.
    """
    with torch.no_grad():
        correction = Correction.from_sums([sums for sums, *_ in parts])
        total = torch.zeros_like(parts[0][1], dtype=correction.factors.dtype)
        for factor, (_, product, *separate) in zip(correction.factors, parts, strict=True):
            if separate:
                rows, (probability, of_target), *every = separate
                total.addcmul_(product.to(total.dtype), factor[:, None])
                total.addcmul_(rows.to(total.dtype), (probability * factor + of_target)[:, None])
                for added in every:
                    total += added
            else:
                total += product
        return total.mul_(weight[:, None].to(total.dtype)), correction.losses


_MARK = "_zerobubble_head_rows"


@dataclass(frozen=True)
class HeadRows:
    """Marks a parameter as the rows from `first_row` on of a matrix with `num_rows` rows, called `name` in a checkpoint."""

    name: str
    first_row: int
    num_rows: int


def mark_head_rows(module: nn.Module, parameter: str, rows: HeadRows) -> None:
    """Marks a parameter of `module` itself, by its name there."""
    module.__dict__.setdefault(_MARK, {})[parameter] = rows


def head_rows(module: nn.Module) -> dict[str, HeadRows]:
    """Returns the marks in `module`, by the names of its parameters."""
    return dict(module.__dict__.get(_MARK, {}))


def names_of_heads(modules: Iterable[nn.Module]) -> list[str]:
    """Returns the checkpoint names of the heads of which these `modules` hold rows."""
    return [rows.name for module in modules for rows in head_rows(module).values()]
