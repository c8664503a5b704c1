"""The parts of a transformer that stages are made of, with what one GPU takes and holds for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from zerobubble.cost_model.held import embedding_saved, head_pending, head_saved, layer_pending, layer_saved
from zerobubble.cost_model.kernels import Kernels
from zerobubble.cost_model.layer import NOTHING, Times, embedding_times, head_times, layer_times
from zerobubble.cost_model.setting import Setting


class Part(NamedTuple):
    """A part of a model: seconds of its passes, and the bytes that F keeps for B (`saved`) and B for W (`pending`), for a microbatch."""

    times: Times
    saved: float
    pending: float

    def plus(self, other: Part, times: int = 1) -> Part:
        """This part and `times` the other."""
        return Part(self.times.plus(other.times, times), self.saved + times * other.saved, self.pending + times * other.pending)


NO_PART = Part(NOTHING, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole model as one GPU has it: its layers in their order between embedding and head.

    It is the same for any number of ranks, of stages and of replicas.
    """

    embedding: Part
    layers: tuple[Part, ...]
    head: Part

    @classmethod
    def of(cls, setting: Setting, kernels: Kernels) -> Parts:
        """The parts of the model of `setting`."""
        embedding = Part(embedding_times(setting, kernels), embedding_saved(setting), 0.0)
        layer = Part(layer_times(setting, kernels), layer_saved(setting), layer_pending(setting))
        head = Part(head_times(setting, kernels), head_saved(setting), head_pending(setting))
        return cls(embedding, (layer,) * setting.model.layers, head)

    def of_stages(self, counts: Sequence[int]) -> list[Part]:
        """What stages with so many layers are, the first of them with the embedding and the last with the head."""
        stages = [self._run(first, end) for first, end in pairwise(accumulate(counts, initial=0))]
        stages[0] = stages[0].plus(self.embedding)
        stages[-1] = stages[-1].plus(self.head)
        return stages

    def _run(self, first: int, end: int) -> Part:
        """The layers from `first` to before `end`; equal ones are multiplied, so that equal stages are equal to the bit."""
        total = NO_PART
        for layer, equal in groupby(self.layers[first:end]):
            total = total.plus(layer, len(list(equal)))
        return total
