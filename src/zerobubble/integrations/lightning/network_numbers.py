"""Numbers without dimensions that a network returns in training, such as its own loss: their values for the whole batch.

The pipeline has computed these numbers for microbatches only. So in steps 1, 2, 4, 8 and so on, forward also runs in evaluation mode, for
each microbatch and for the whole batch. If the numbers of microbatches are those of the training step, so is that of the whole batch. If
not, as with dropout, it shows how the number of a batch follows from those of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import zerobubble as zb
from zerobubble.errors import InputError
from zerobubble.integrations.lightning.comparison import tolerance_of
from zerobubble.integrations.lightning.extras import joined, learn_rules
from zerobubble.integrations.lightning.logs import Parts
from zerobubble.integrations.loss_rules import are_near

Numbers = dict[str, Tensor]
"""The numbers of an output by their places among its leaves."""
ROUNDING = 2e-5
"""The relative difference that rounding in a network explains: networks of other dtypes also compute in float32."""


class Number:
    """A number of the whole batch, which is joined and sent with the rest of the output: one object for all microbatches.

    Attributes:
        value: The number; None if it is not known.
        fault: Why it is not known.
    """

    def __init__(self, value: Tensor | None, fault: str = "") -> None:
        self.value, self.fault = value, fault


class NetworkNumbers:
    """The numbers that a network returns in training.

    Args:
        share: Returns, on all ranks of the pipeline, what the rank of the last stage has found.
    """

    def __init__(self, share: Callable[[Any], Any]) -> None:
        self._share = share
        self._rules: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self._known: Numbers = {}

    def begin(self) -> None:
        """Begins a training step."""
        self._known = {}

    def learn(self, pipe: zb.Pipeline, microbatches: Sequence[Any], batch: Any, outputs: Sequence[Any], parts: Callable[[], Parts]) -> None:
        """Finds out the numbers of a batch, and how they follow from those of microbatches. Every rank calls it.

        Args:
            pipe: The pipeline.
            microbatches: The arguments of the network for each microbatch.
            batch: Those for the whole batch.
            outputs: The outputs of the training step for each microbatch, on the rank of the last stage.
            parts: Returns the weights of the microbatches, on this rank.
        """
        is_last = bool(outputs) and outputs[0] is not None
        if not self._share(bool(_numbers_of(outputs[0])) if is_last else None) or len(microbatches) == 1:
            return
        with torch.no_grad():
            *alone, whole = [pipe.eval_step([each], num_microbatches=1)[1] for each in (*microbatches, batch)]
        if is_last:
            trained, evaluated = ([_numbers_of(output) for output in each] for each in (outputs, alone))
            self._compare(trained, evaluated, _numbers_of(whole), parts(), max(tolerance_of(outputs), ROUNDING))

    def _compare(self, trained: Sequence[Numbers], evaluated: Sequence[Numbers], whole: Numbers, parts: Parts, tolerance: float) -> None:
        for place in trained[0]:
            if not all(place in numbers for numbers in (*trained, *evaluated, whole)):
                self._faults[place] = "are other outputs in evaluation mode"
                continue
            ours, theirs = ([float(numbers[place]) for numbers in each] for each in (trained, evaluated))
            is_same = all(are_near(one, other, tolerance, [one]) for one, other in zip(ours, theirs, strict=True))
            rules = {f"[{place!r}]": self._rules.get(f"[{place!r}]", "weights")}  # the likeliest of those that fit
            numbers = {place: whole[place]}
            fault = learn_rules([{place: of_one[place]} for of_one in evaluated], (numbers, numbers), parts, rules, tolerance)
            self._faults.pop(place, None)
            if fault is None and (is_same or any(theirs)):
                self._rules |= rules
                continue
            self._rules.pop(f"[{place!r}]", None)
            of_parts = ", ".join(f"{number:.6g}" for number in theirs)
            self._faults[place] = f"are, in evaluation mode, {of_parts} for microbatches and {float(whole[place]):.6g} for the batch"
            if is_same:
                self._known[place] = whole[place]

    def marked(self, outputs: Sequence[Any], parts: Parts) -> list[Any]:
        """Returns the outputs of microbatches with the numbers of the batch, as `Number`, in place of their own."""
        numbers = [_numbers_of(output) for output in outputs]
        if not numbers[0]:
            return list(outputs)
        found = joined(numbers, parts, self._rules) | self._known
        marks = {place: self._mark(place, found[place], len(outputs)) for place in numbers[0]}
        return [_replaced(output, marks) for output in outputs]

    def _mark(self, place: str, value: Any, count: int) -> Number:
        if count == 1 or place in self._known or f"[{place!r}]" in self._rules:
            return Number(value.detach())
        return Number(None, self._faults.get(place, "are not yet compared with those of the batch"))

    def placed(self, output: Any, network: str, device: torch.device) -> Any:
        """Returns a joined output with tensors in place of `Number`. Any use of an unknown one raises `InputError`."""

        def tensor(number: Number) -> Tensor:
            if number.value is None:
                return _unknown(network, number.fault)
            value = number.value.to(device)
            return value.requires_grad_() if value.is_floating_point() else value

        return pytree.tree_map_only(Number, tensor, output)


def _numbers_of(output: Any) -> Numbers:
    leaves = enumerate(pytree.tree_leaves(output))
    return {str(place): leaf.detach() for place, leaf in leaves if isinstance(leaf, Tensor) and not leaf.ndim}


def _replaced(output: Any, marks: dict[str, Number]) -> Any:
    leaves, form = pytree.tree_flatten(output)
    return pytree.tree_unflatten([marks.get(str(place), leaf) for place, leaf in enumerate(leaves)], form)


class _UnknownNumber(Tensor):
    """A number whose value is not known: any use raises `InputError`."""

    error: Callable[[], InputError]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unknown = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if type(leaf) is cls]
        raise unknown[0].error()


def _unknown(network: str, fault: str) -> Tensor:
    def error() -> InputError:
        return InputError(
            "{name} returns numbers without dimensions that {fault}: they are neither the mean with the weights of loss_weight nor a sum",
            name=network,
            fault=fault,
            remedy="compute the number from other outputs, such as logits, or give PipelineStrategy(loss_weight=...) a function that "
            "returns what it divides by for a microbatch, such as lambda batch: (batch['labels'][:, 1:] != -100).sum()",
        )

    unknown = torch.zeros(()).as_subclass(_UnknownNumber)
    vars(unknown)["error"] = error
    return unknown
