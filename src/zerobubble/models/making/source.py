"""Where the numbers of a model come from: it was given with them, or a function makes it and each rank has those of its stages alone.

Where the model has too few parts its operations may be parts instead: then what is given or made is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.making.tracing.traced import Trace
from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.fingerprint import kinds, values
from zerobubble.models.observation.unfit import refuse_unfit
from zerobubble.runtime.stage.whole_model import ModelFacts


class ModelSource:
    """A model with its parameters, or a function that makes one, perhaps `trace`d. Nothing in it changes."""

    def __init__(self, given: nn.Module | ModelFactory, trace: Trace | None = None) -> None:
        self._given = given
        self.trace = trace
        self.untraced = given if isinstance(given, nn.Module) else given.model
        """The model as it was given or made, in the latter case with its parameters on the meta device."""
        self.model = self.as_it_is_cut(self.untraced)
        """The model that is cut, with the same parameters."""

    @classmethod
    def of(cls, given: nn.Module | Callable[[], nn.Module] | ModelFactory) -> ModelSource:
        """Raises `InputError` for models that cannot be cut whatever their code is, and for one that lacks its numbers."""
        source = cls(given if isinstance(given, (nn.Module, ModelFactory)) else ModelFactory(given))
        refuse_unfit(source.model)
        if isinstance(given, nn.Module) and any(parameter.is_meta for parameter in given.parameters()):
            raise InputError(
                "zb.split was given a model on the meta device, which has no numbers: give it the function that makes the model with "
                "numbers, and each rank keeps those of its own stages alone"
            )
        return source

    @property
    def is_given(self) -> bool:
        """Whether the model was given with all of its parameters, and is not made."""
        return isinstance(self._given, nn.Module)

    def with_numbers(self, names: Collection[str]) -> nn.Module:
        """The model as it was given or is made, with the numbers of these parameters at least."""
        return self._given if isinstance(self._given, nn.Module) else self._given.make(names)

    def as_it_is_cut(self, model: nn.Module) -> nn.Module:
        """`model`, which this source gave, or its operations with the same parameters where it is traced."""
        return model if self.trace is None else self.trace.over(model)

    def traced(self, arguments: Arguments, num_stages: int) -> ModelSource:
        """The same model as its operations, of which `num_stages` stages can be made; raises `InputError` where they cannot."""
        return ModelSource(self._given, Trace.of(self.untraced, arguments, num_stages))

    def facts(self, about: dict[str, str]) -> ModelFacts:
        """What other ranks must have, too, beside what is said `about` the cut: the model, its parameters, and their values."""
        facts = {"model": type(self.untraced).__name__, **about}
        if isinstance(self._given, nn.Module):
            return ModelFacts(facts, kinds(self.untraced), values(self.untraced))
        drawn = {"random numbers of which the model is made": self._given.drawn}
        return ModelFacts(facts | drawn, kinds(self.untraced), None)
