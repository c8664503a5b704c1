"""Evaluates batches in a pipeline for frameworks, whose users expect what the model returns for a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

import zerobubble as zb


class WholeOutputs:
    """The outputs of a model for whole batches.

    Rows of samples are joined. How a number of the batch, such as the model's own loss, follows from those of microbatches is not known: it
    may be a mean over tokens. So a batch with such outputs runs once more, as one microbatch, and later batches of its form run only so.

    Args:
        share: Returns, on all ranks of the pipeline, what the rank of the last stage has found.
    """

    def __init__(self, share: Callable[[Any], Any]) -> None:
        self._share = share
        self._is_cut: dict[Any, bool] = {}

    def of(self, pipe: zb.Pipeline, arguments: Any, samples: int, count: int) -> Any:
        """Returns the output of the model for a batch on every rank, which all call it.

        Args:
            pipe: The pipeline.
            arguments: The arguments of the model, a tensor, a tuple or a dict.
            samples: Their number of samples.
            count: The number of microbatches of a batch whose outputs are rows.
        """
        form = tuple(arguments) if isinstance(arguments, dict) else len(arguments) if isinstance(arguments, tuple) else 1

        def run(count: int) -> Any:
            _, output = pipe.eval_step([arguments] if count == 1 else arguments, num_microbatches=count)
            return self._share(output)

        return self.of_runs(run, form, samples, count)

    def of_runs(self, run: Callable[[int], Any], form: Any, samples: int, count: int) -> Any:
        """Returns what `run`, a collective of all ranks, gives for a batch of this `form` in one or `count` microbatches."""
        is_cut = self._is_cut.get(form)
        if is_cut is False or count == 1:
            return run(1)
        output = run(count)
        if is_cut or not any(_may_be_numbers(leaf, samples) for leaf in pytree.tree_leaves(output)):
            return output
        whole = run(1)
        self._is_cut[form] = _shapes(whole) == _shapes(output)
        return whole


def _may_be_numbers(leaf: Any, samples: int) -> bool:
    """Returns whether a joined output may have something other than a row for each sample, such as numbers of each microbatch."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and (leaf.ndim == 1 or len(leaf) != samples)


def _shapes(output: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(output)]
