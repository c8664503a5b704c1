"""What is saved or loaded: the stages of a pipeline, by all of its ranks together, or a whole model, by this process alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zerobubble.arguments import instance, require
from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.background import BackgroundSaves
from zerobubble.runtime.checkpoint.names import Names, are_of_one_model, names_of, refuse_taken
from zerobubble.runtime.checkpoint.together import Together
from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.optimizers import left_by, living_with_state, refuse_left_out
from zerobubble.runtime.values.experts import expert_marks
from zerobubble.runtime.values.head_rows import names_of_heads

R = TypeVar("R")


class Trained(Together, Protocol):
    """What `save` and `load` ask of what they are given: modules by stage, the whole model being the only one."""

    modules: Mapping[int, nn.Module]
    device: torch.device

    @property
    def saves(self) -> BackgroundSaves:
        """What writes checkpoints of it in the background."""

    @property
    def hooks(self) -> Sequence[StepHook]:
        """The hooks whose states are kept."""

    def refuse_partial(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise `InputError` if other optimizers have stepped parameters that these do not hold."""

    def names(self) -> Names:
        """The names under which the stages of all ranks are kept; all ranks call it."""

    def settle(self) -> int | None:
        """Make final what is pending, and give the number of training steps, None where nobody counts."""

    def draws_seed(self) -> int | None:
        """By which the random numbers of stages are drawn, None without a pipeline."""

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Count steps from here on, and draw by this seed; None keeps the own one."""

    def layout(self) -> dict[str, Any]:
        """How the ranks divide the model, as JSON has it."""

    def schedule(self) -> dict[str, Any] | None:
        """The plan that is followed, or else the schedule that is played, in its form for files."""


def trained_by(given: Pipeline | nn.Module) -> Trained:
    """What the user gave; raises `InputError` for anything else."""
    require("the second argument", given, instance(Pipeline, nn.Module))
    return PipelineTrained(given) if isinstance(given, Pipeline) else _alone(given)


def surviving(given: Pipeline | nn.Module, call: Callable[[], R]) -> R:
    """What `call` gives, which ranks that are left make again where their pipeline is to survive that others go."""
    return given.surviving(call) if isinstance(given, Pipeline) else call()


class PipelineTrained:
    """The stages of a pipeline, on this rank."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._steps = pipe._steps
        self._session = pipe._session
        self.modules: Mapping[int, nn.Module] = self._steps.modules
        self.device = self._steps.device
        self.rank = self._session.transport.rank
        self.num_ranks = self._session.transport.size

    @property
    def saves(self) -> BackgroundSaves:
        """The hook of the pipeline that writes its checkpoints, attached when it is first asked for."""
        for hook in self._steps.hooks:
            if isinstance(hook, BackgroundSaves):
                return hook
        made = BackgroundSaves()
        self._steps.attach(made)
        return made

    @property
    def hooks(self) -> Sequence[StepHook]:
        """A `PostValidation` is the optimizer."""
        return [hook for hook in self._steps.hooks if not isinstance(hook, (PostValidation, BackgroundSaves))]

    def activity(self, when: str) -> AbstractContextManager[None]:
        """See `Trained`."""
        return self._steps.activity(when)

    def alike(self) -> AbstractContextManager[None]:
        """See `Trained`."""
        return self._steps.alike()

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Everyone's `value`, of all ranks that train together."""
        with self._session.transport.collective(doing):
            return self._session.transport.gather_objects(value)

    def refuse_partial(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Trained`."""
        self._steps.optimizers.refuse_partial(optimizers, self._steps.parameters())

    def names(self) -> Names:
        """See `Trained`."""
        mine = names_of(self.modules), names_of_heads(self.modules.values())
        told = self.gather(mine, "comparing the names of parameters")
        setup = self._session.setup
        is_whole_model = setup.is_cut_model or are_of_one_model([names for names, _ in told], setup.tied)
        if is_whole_model:
            with self.alike():
                refuse_taken([names for names, _ in told], {name for _, heads in told for name in heads})
        return Names(self._pipe.schedule.num_stages, is_whole_model)

    def settle(self) -> int:
        """See `Trained`."""
        return self._steps.num_steps()

    def draws_seed(self) -> int:
        """See `Trained`."""
        return self._steps.draws.seed

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """See `Trained`."""
        self._steps.take_over(num_steps, draws_seed)

    def layout(self) -> dict[str, Any]:
        """See `Trained`."""
        return {"pipeline_ranks": self._session.peers.size, "placement": self._pipe.schedule.placement.to_dict()}

    def schedule(self) -> dict[str, Any]:
        """See `Trained`."""
        return self._pipe.schedule.to_dict() if self._pipe.plan is None else self._pipe.plan.to_dict()


@dataclass
class ModelAlone:
    """A whole model in this process, which is the only one."""

    modules: Mapping[int, nn.Module]
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    hooks: Sequence[StepHook] = ()
    saves: BackgroundSaves = field(default_factory=BackgroundSaves)

    def activity(self, when: str) -> AbstractContextManager[None]:
        """Nobody else has to hear of it."""
        return nullcontext()

    def alike(self) -> AbstractContextManager[None]:
        """See `activity`."""
        return nullcontext()

    def gather(self, value: Any, doing: str) -> list[Any]:
        """See `Trained`."""
        return [value]

    def refuse_partial(self, optimizers: Sequence[Optimizer]) -> None:
        """Nobody watches what steps a model outside of a pipeline, so this looks for other optimizers where some parameters are left."""
        left = left_by(optimizers, self.modules[0].parameters())
        if left:
            refuse_left_out(living_with_state(), optimizers, left, "this model")

    def names(self) -> Names:
        """Those of the whole model."""
        return Names(1, is_whole_model=True)

    def settle(self) -> None:
        """Nothing is pending."""

    def draws_seed(self) -> None:
        """The model draws from the user's generators."""

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Nobody counts."""

    def layout(self) -> dict[str, Any]:
        """See `Trained`."""
        return {}

    def schedule(self) -> None:
        """None is played."""


_SAVES_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, BackgroundSaves] = weakref.WeakKeyDictionary()
"""What writes in the background for models that no pipeline has."""


def _alone(model: nn.Module) -> ModelAlone:
    parameters = list(model.parameters())
    divided = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
    divided += list(expert_marks(model))
    if divided:
        raise InputError(f"{divided[0]} is divided over ranks, which save and load it together: give the Pipeline that has the model")
    device = parameters[0].device if parameters else torch.device("cpu")
    saves = _SAVES_OF_MODELS.setdefault(model, BackgroundSaves())
    return ModelAlone({0: model}, device, saves=saves)
