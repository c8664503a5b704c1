"""The source of a model's weights: a given model, or a function with which each rank creates only the weights of its stages.

If the model has too few parts, it is traced, and its operations become the parts.

Ranks check for equal models with short digests of their parameters, without reading all values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.making.tracing.traced import ModelTrace
from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.unfit import refuse_unfit
from zerobubble.models.observation.units import join
from zerobubble.runtime.stage.whole_model import ModelFacts, digest, kinds
from zerobubble.runtime.values.buffers import renew_inference_buffers
from zerobubble.runtime.values.released import is_released
from zerobubble.runtime.values.stateful import state_of, stateful_tensors


class ModelSource:
    """A model, or a function that creates one, optionally with a `trace`. Immutable."""

    def __init__(self, model: nn.Module | ModelFactory, trace: ModelTrace | None = None) -> None:
        self._given = model
        self.trace = trace
        self.untraced = model if isinstance(model, nn.Module) else model.model
        """The model as given or created; in the latter case with its parameters on the meta device."""
        self.model = self.as_it_is_cut(self.untraced)
        """The model to cut, with the same parameters."""

    @classmethod
    def from_given(cls, model: nn.Module | Callable[[], nn.Module] | ModelFactory) -> ModelSource:
        """Raises `InputError` for models that cannot be cut regardless of their code, and for one without values."""
        source = cls(model if isinstance(model, (nn.Module, ModelFactory)) else ModelFactory(model))
        refuse_unfit(source.model)
        if source.is_given:
            renew_inference_buffers(source.untraced)
        named = (*model.named_parameters(), *model.named_buffers()) if isinstance(model, nn.Module) else ()
        without_values = [name for name, tensor in named if tensor.is_meta]
        if without_values:
            raise InputError(
                "zb.split was given a model with {missing!r} on the meta device, without values",
                missing=without_values[0],
                remedy="give it a function that creates the model with weights, and each rank keeps only those of its own stages",
            )
        return source

    @property
    def is_given(self) -> bool:
        """Whether the model was given, not created by a function."""
        return isinstance(self._given, nn.Module)

    def with_numbers(self, names: Collection[str]) -> nn.Module:
        """Returns the model as given or created, with the values of at least these parameters."""
        return self._given if isinstance(self._given, nn.Module) else self._given.make(names)

    def as_it_is_cut(self, model: nn.Module) -> nn.Module:
        """Returns `model`, or its operations with the same parameters if it is traced."""
        return model if self.trace is None else self.trace.over(model)

    def traced(self, arguments: Arguments, num_stages: int) -> ModelSource:
        """Returns the model traced into operations, for `num_stages` stages; raises `InputError` if that is impossible."""
        return ModelSource(self._given, ModelTrace.from_model(self.untraced, arguments, num_stages))

    def facts(self, about: dict[str, str]) -> ModelFacts:
        """Returns the facts that all ranks must share: `about` the cut, the model, its parameters, and their values."""
        facts = {"model": type(self.untraced).__name__, **about}
        if isinstance(self._given, nn.Module):
            return ModelFacts(facts, kinds(self.untraced), values(self.untraced))
        drawn = {"random numbers of which the model is made": self._given.drawn}
        return ModelFacts(facts | drawn, kinds(self.untraced), None)


def values(model: nn.Module) -> dict[str, str] | None:
    """Returns a digest of each parameter's values and state; empty if it is sharded, or its layout or dtype has no element access.

    Returns None if a pipeline has trained parts of the model and released the others.
    """
    if any(is_released(parameter) for parameter in model.parameters()):
        return None
    digests = {name: digest(parameter) for name, parameter in model.named_parameters()}
    for path, part in model.named_modules():
        state = "".join(digest(tensor) for _, tensor in state_of(part))
        digests |= {key: digests[key] + state for name in stateful_tensors(part) if (key := join(path, name)) in digests}
    return digests
