"""`split`: a model that was not written for pipelining, as what `Pipeline` builds its stages from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.cut import ModelCut, cut_evenly
from zerobubble.models.dataflow import Dataflow, follow
from zerobubble.models.stage_model import stage_model
from zerobubble.models.units import find_units


class ModelSplit:
    """What `split` gives: called with a stage and the number of stages, it gives the module of that stage."""

    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        self._model = model
        self._units = find_units(model)
        self._flow = flow
        self._cuts: dict[int, ModelCut] = {}

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """The module of `stage`; raises `InputError` where the model cannot be cut into so many."""
        return stage_model(self._model, self._units, self.cut(num_stages), stage)

    def cut(self, num_stages: int) -> ModelCut:
        """Where the model is cut into `num_stages`."""
        if num_stages not in self._cuts:
            self._cuts[num_stages] = cut_evenly(self._flow, num_stages)
        return self._cuts[num_stages]

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """The parameters of the model that several stages hold, as groups for `Pipeline(tied=...)`."""
        stage_of = self.cut(num_stages).stage_of
        places: dict[int, list[tuple[int, str]]] = {}
        for unit, module in self._units.units.items():
            for name, parameter in module.named_parameters(prefix=unit, remove_duplicate=True):
                places.setdefault(id(parameter), []).append((stage_of[unit], name))
        groups = [list({stage: (stage, name) for stage, name in reversed(group)}.values()) for group in places.values()]
        return [sorted(group) for group in groups if len(group) > 1]


def split(model: nn.Module, example: Any = None) -> ModelSplit:
    """`model` cut into stages, for `zb.Pipeline(zb.split(model), schedule, num_microbatches, loss_fn)`.

    The model is run once on `example`, a small batch as `Pipeline.step` is given it, to see what its parts get from each other; models of
    Transformers bring one. Raises `InputError` for a model that has none.
    """
    if example is None:
        example = getattr(model, "dummy_inputs", None)
    if example is None:
        raise InputError(f"{type(model).__name__} brings no example of its inputs: give split(model, example=...) a small batch, as for step")
    device = next((parameter.device for parameter in model.parameters()), None)
    moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    arguments = ((), dict(moved)) if isinstance(moved, Mapping) else (tuple(moved) if isinstance(moved, (tuple, list)) else (moved,), {})
    return ModelSplit(model, follow(model, find_units(model), arguments))
