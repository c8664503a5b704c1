"""Objects that can be saved or loaded: the stages of a pipeline, by all of its ranks, or a whole model, by this process alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zerobubble.arguments import instance, require
from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.background import BackgroundSaves
from zerobubble.runtime.checkpoint.contents import state_of
from zerobubble.runtime.checkpoint.names import Names, are_of_one_model, refuse_taken
from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.stage.head_part import names_of_heads
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.optimizers import optimizers_with_state, parameters_left_by, refuse_left_out
from zerobubble.runtime.values.experts import expert_marks

R = TypeVar("R")


_KINDS = instance(Pipeline, nn.Module)
_PIPELINE = _KINDS._replace(remedy=lambda value: _KINDS.remedy(value) or "the order is zb.save(path, pipe, optimizer)")


def checkpointed(trained: Pipeline | nn.Module) -> Checkpointed:
    """Returns the training state of what the user gave. Raises `InputError` for anything else."""
    require("the second argument", trained, _PIPELINE)
    return CheckpointedPipeline(trained) if isinstance(trained, Pipeline) else _alone(trained)


def with_recovery(trained: Pipeline | nn.Module, call: Callable[[], R]) -> R:
    """Returns what `call` returns, repeated by the survivors if a rank is lost and their pipeline survives that."""
    return trained._with_recovery(call) if isinstance(trained, Pipeline) else call()


class CheckpointedPipeline:
    """The stages of a pipeline on this rank."""

    owner = "this pipeline"

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._steps = pipe._steps
        self._session = pipe._session
        self.modules: Mapping[int, nn.Module] = self._steps.modules
        self.device = self._steps.device
        group = self._session.transport.group
        self.rank, self.num_ranks, self.numbers = group.place(group.rank), group.size, group.ranks

    @property
    def saves(self) -> BackgroundSaves:
        """The hook of the pipeline that writes its checkpoints, attached at first use."""
        for hook in self._steps.hooks:
            if isinstance(hook, BackgroundSaves):
                return hook
        saves = BackgroundSaves()
        self._steps.attach(saves)
        return saves

    @property
    def hooks(self) -> Sequence[StepHook]:
        """All hooks but those saved otherwise: a `PostValidation` is the optimizer."""
        return [hook for hook in self._steps.hooks if not isinstance(hook, (PostValidation, BackgroundSaves))]

    def activity(self, when: str) -> AbstractContextManager[None]:
        return self._steps.activity(when)

    def agreed_errors(self) -> AbstractContextManager[None]:
        return self._steps.agreed_errors()

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Returns the `value` of all ranks that train together."""
        with self._session.transport.collective(doing):
            return self._session.transport.gather_objects(value)

    def refuse_partial(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises `InputError` if other optimizers have stepped parameters that these do not hold."""
        self._steps.optimizers.refuse_partial(optimizers, self._steps.parameters())

    def names(self) -> Names:
        """Returns the names under which the stages of all ranks are saved; all ranks call it."""
        mine = {stage: list(state_of(module)) for stage, module in self.modules.items()}, names_of_heads(self.modules.values())
        of_ranks = self.gather(mine, "comparing the names of parameters")
        setup = self._session.setup
        is_whole_model = setup.is_cut_model or are_of_one_model([names for names, _ in of_ranks], setup.tied)
        if is_whole_model:
            with self.agreed_errors():
                refuse_taken([names for names, _ in of_ranks], {name for _, heads in of_ranks for name in heads})
        return Names(self._pipe.schedule.num_stages, is_whole_model)

    def settle(self) -> int:
        """Makes pending changes final, and returns the number of training steps; None if they are not counted."""
        self._steps.settle()
        return self._steps.num_steps

    def rng_seed(self) -> int:
        """Returns the seed of the stages' random numbers; None without a pipeline."""
        return self._steps.rng.seed

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Continues at this step with this seed; None keeps the current seed."""
        self._steps.take_over(num_steps, draws_seed)

    def layout(self) -> dict[str, Any]:
        """Returns how the ranks divide the model, in JSON form."""
        return {"pipeline_ranks": self._session.peers.size, "placement": self._pipe.schedule.placement.to_dict()}

    def schedule(self) -> dict[str, Any]:
        """Returns the current plan, or else the schedule, in its form for files."""
        return self._pipe.schedule.to_dict() if self._pipe.plan is None else self._pipe.plan.to_dict()


@dataclass
class CheckpointedModel:
    """A whole model in this process, which is the only one."""

    modules: Mapping[int, nn.Module]
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    numbers: tuple[int, ...] = (0,)
    hooks: Sequence[StepHook] = ()
    saves: BackgroundSaves = field(default_factory=BackgroundSaves)
    owner: str = "this model"

    def activity(self, when: str) -> AbstractContextManager[None]:
        """There are no other ranks to report to."""
        return nullcontext()

    def agreed_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: Any, doing: str) -> list[Any]:
        return [value]

    def refuse_partial(self, optimizers: Sequence[Optimizer]) -> None:
        """Looks for optimizers of the process that hold the missing parameters: nothing watches a model outside of a pipeline."""
        left = parameters_left_by(optimizers, self.modules[0].parameters())
        if left:
            refuse_left_out(optimizers_with_state(), optimizers, left, self.owner)

    def names(self) -> Names:
        """Returns those of the whole model."""
        return Names(1, is_whole_model=True)

    def settle(self) -> None:
        """Nothing is pending."""

    def rng_seed(self) -> None:
        """The model uses the user's generators."""

    def take_over(self, num_steps: int, draws_seed: int | None) -> None:
        """Steps are not counted."""

    def layout(self) -> dict[str, Any]:
        return {}

    def schedule(self) -> None:
        """There is no schedule."""


Checkpointed = CheckpointedPipeline | CheckpointedModel
"""An object that `save` and `load` accept: modules by stage, with their optimizers and hooks, on the ranks that share the checkpoint."""
_SAVES_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, BackgroundSaves] = weakref.WeakKeyDictionary()
"""The background writers of models outside of pipelines."""


def _alone(model: nn.Module) -> CheckpointedModel:
    parameters = list(model.parameters())
    divided = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
    divided += list(expert_marks(model))
    if divided:
        message = "{name} is sharded over ranks, which must save and load it together"
        raise InputError(message, name=divided[0], remedy="give the Pipeline that has the model")
    device = parameters[0].device if parameters else torch.device("cpu")
    saves = _SAVES_OF_MODELS.setdefault(model, BackgroundSaves())
    return CheckpointedModel({0: model}, device, saves=saves)
