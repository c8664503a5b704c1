"""The model from which the stages of a rank were cut: whole on every rank at first, while each rank trains only its own stages.

Once an optimizer has stepped, the other ranks' parameters in this model have old values. They are then released (see
`runtime.values.released`), which also frees their memory, until `zb.gathered` brings the trained values.

Code that trains without an optimizer of torch changes parameters of this rank's stages. Each call of the pipeline looks for such a change.
Once a pipeline of this process has trained, each use of other ranks' tensors looks, too. A look compares some values, in about 0.3 ms.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerobubble.errors import InputError
from zerobubble.program import Channel
from zerobubble.runtime.split.stage_with_loss import NAME as LOSS
from zerobubble.runtime.split.stage_with_loss import loss_module, stage_alone
from zerobubble.runtime.stage.absent_attributes import DERIVED_FROM, AbsentAttributes
from zerobubble.runtime.values.memory import as_memory, local_part
from zerobubble.runtime.values.released import guard, is_released, refill, release, unguard
from zerobubble.runtime.values.stateful import is_wrapper, state_of, stateful_tensors, tensors_inside_wrapper
from zerobubble.units import named

_SAMPLED = 32
"""The largest number of parameters, and of values of each, that are compared to find a change."""
_open: weakref.WeakSet[CutModel] = weakref.WeakSet()
"""The models of open pipelines."""
_CUT_FROM: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], ...]] = weakref.WeakKeyDictionary()
"""For each stage, the modules that together have all tensors of the model, under the names that these have in stages."""


def models_of(stage: nn.Module) -> list[nn.Module]:
    """Returns the modules from which `stage` was cut."""
    return [model for reference in _CUT_FROM.get(stage_alone(stage), ()) if (model := reference()) is not None]


def note_model(stage: nn.Module, models: Sequence[nn.Module]) -> None:
    """Records the `models` from which `stage` was cut: together they have all tensors, under the names that these have in stages."""
    _CUT_FROM[stage] = tuple(map(weakref.ref, models))


class StageTensor(NamedTuple):
    """A parameter or buffer of a stage."""

    stage: int
    tensor: Tensor


class _Twin(NamedTuple):
    """A `tensor` in an attribute that has the memory of the parameter `weight`, and its `name`."""

    name: str
    tensor: Tensor
    weight: Tensor


class CutModel:
    """The model of which this rank, number `rank` of a pipeline, trains the stages `modules`.

    It includes `loss_fn` if that is a module, and has no other tensors if the stages were not cut from a model.

    Attributes:
        remedy: How a training framework saves the model, for errors.
        instead: What to do instead of using values, for errors. By default, to gather the model.
        pipe, loss_name: How the user's code names the pipeline and the function of the loss, for errors.
        opened: The channels through which weights were gathered before.
    """

    def __init__(self, modules: Mapping[int, nn.Module], rank: int, loss_fn: object = None) -> None:
        self.remedy = self.instead = ""
        self.pipe, self.loss_name = "pipe", "loss_fn"
        self.opened: set[Channel] = set()
        self._modules = modules
        self._rank = rank
        self._loss = loss_module(loss_fn)
        self._references = {ref for module in modules.values() for ref in _CUT_FROM.get(stage_alone(module), ())}
        self.is_released = False
        """Whether the tensors that only other ranks train are released."""
        self._released_twins: list[_Twin] = []
        self._is_guarded = self._was_guarded = False
        self._watched: _Watched | None = None
        self._hooks: list[RemovableHandle] = []
        self._refuse_read: Callable[[str], InputError] | None = None
        self._attributes = AbsentAttributes(modules, self._attribute_error)

    @property
    def models(self) -> list[nn.Module]:
        """The modules from which the stages were cut."""
        return [model for reference in self._references if (model := reference()) is not None]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and buffers of the whole model, under all of their names."""
        for model in self.models:
            yield from named_tensors(model)
        if self._loss is not None:
            yield from named_tensors(self._loss, f"{LOSS}.")

    def of_stages(self) -> dict[str, StageTensor]:
        """Returns the parameters and buffers of this rank's stages by name. Of two stages with one name, the later one counts."""
        stages = sorted(self._modules.items())
        return {name: StageTensor(stage, tensor) for stage, module in stages for name, tensor in named_tensors(module)}

    def copies_of(self, tensor: Tensor) -> list[Tensor]:
        """Returns the buffers of this rank's stages that have the name of a buffer of the model, and are other objects."""
        names = {name for name, other in self.tensors() if other is tensor}
        of_stages = (item for module in self._modules.values() for item in module.named_buffers(remove_duplicate=False))
        return [buffer for name, buffer in of_stages if name in names and buffer is not tensor]

    def release(self) -> None:
        """Releases the tensors that only other ranks train, and their gradients."""
        if self.is_released:
            return
        self.is_released = True
        twins = [twin for model in self.models for twin in _twins(model)]
        for name, tensor in self._of_others():
            if not is_released(tensor):
                tensor.grad = None
                release(tensor, partial(self._error, name))
        for twin in [twin for twin in twins if is_released(twin.weight)]:
            self._released_twins.append(twin)
            release(twin.tensor, partial(self._error, twin.name))
        parts = [part for model in self.models for part in model.modules()]
        self._hooks += [part.register_load_state_dict_pre_hook(_refuse_released) for part in parts]  # type: ignore[no-untyped-call]
        for model in self.models:
            model.__dict__["_apply"] = partial(_refuse_or_apply, model)
        self._attributes.refuse()

    def refuse_attributes(self) -> None:
        """Refuses reads of attributes that forwards have set on other ranks, if the tensors are released."""
        if self.is_released:
            self._attributes.refuse()

    def _of_others(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that only other ranks train, under all of their names."""
        here = self.of_stages()
        kept = {id(of_stage.tensor) for of_stage in here.values()}
        if self._loss is not None:
            kept |= {id(tensor) for _, tensor in named_tensors(self._loss) if not tensor.requires_grad}
        for name, tensor in self.tensors():
            if id(tensor) not in kept and (isinstance(tensor, nn.Parameter) or name not in here):
                yield name, tensor

    def release_before(self, stepped: Iterable[Tensor]) -> None:
        """Releases the tensors if an optimizer is about to step parameters of the model, on this rank or on another."""
        if self.is_whole and not {id(tensor) for _, tensor in self.tensors()}.isdisjoint(map(id, stepped)):
            self.release()

    @property
    def is_whole(self) -> bool:
        """Whether there is a model, and nothing of it is released."""
        return bool(self._references or self._loss is not None) and not self.is_released

    def watch(self, trained: Sequence[Tensor] | None = None) -> None:
        """Remembers some values of parameters: after a training step, of those `trained` on this rank; otherwise, of the whole model."""
        if trained is None:
            _open.add(self)
            trained_here = [of_stage.tensor for of_stage in self.of_stages().values() if isinstance(of_stage.tensor, nn.Parameter)]
            others = [tensor for _, tensor in self._of_others() if isinstance(tensor, nn.Parameter) and not is_released(tensor)]
            self._watched = _Watched(_Sample.of(trained_here), _Sample.of(others))
        else:
            self._watched = _Watched(_Sample.of(trained), None)
            for model in list(_open):
                model.guard()

    def guard(self) -> None:
        """Makes every use of other ranks' tensors look for changes first."""
        if self.is_whole and not self._is_guarded:
            self._is_guarded = True
            reference = weakref.ref(self)

            def look(name: str) -> None:
                if (model := reference()) is not None:
                    model._before_use(name)

            for name, tensor in self._of_others():
                guard(tensor, partial(look, name), explain=partial(self._error, name))

    def _before_use(self, name: str) -> None:
        if self._refuse_read is not None:
            raise self._refuse_read(name)
        self.release_if_changed()

    @contextmanager
    def refusing_reads(self, refuse: Callable[[str], InputError]) -> Iterator[None]:
        """A context in which a use of another rank's tensor raises `refuse(name)`."""
        self.guard()
        self._refuse_read = refuse
        try:
            yield
        finally:
            self._refuse_read = None

    def close(self) -> None:
        """Looks for the last time, before the model may train elsewhere."""
        self.release_if_changed()
        self._watched, self._is_guarded = None, False
        _open.discard(self)
        for _, tensor in self.tensors():
            unguard(tensor)

    def release_if_changed(self) -> None:
        """Releases the tensors if parameters of this rank have changed since `watch`, without an optimizer of torch.

        A rank that trains nothing has no optimizer, and releases them at once. Before the first training step, a change of the whole model,
        such as loaded values, is one of all ranks.
        """
        if self._watched is None or not self.is_whole:
            return
        sample, others = self._watched
        if others is None:
            if not sample.tensors or sample.has_changed():
                self.release()
        elif sample.has_changed():
            if others.has_changed():
                self.watch()
            else:
                self.release()

    def was_gathered(self) -> bool:
        """Notes that the model has trained values until `release` is called again. Returns whether it was released."""
        was_released, self.is_released = self.is_released, False
        self._was_guarded, self._is_guarded = self._is_guarded, False
        for _, tensor in self.tensors():  # a change of this rank's parameters comes before the same change of others
            unguard(tensor)
        for twin in [twin for twin in self._released_twins if not is_released(twin.weight)]:
            refill(twin.tensor, as_memory(twin.weight))
            self._released_twins.remove(twin)
        self.watch()
        self._attributes.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in self.models:
            model.__dict__.pop("_apply", None)
        return was_released

    def end_gathered(self, *, releases: bool) -> None:
        """Ends what `was_gathered` began: releases the tensors again, or watches the values that they have now."""
        if releases:
            self.release()
            return
        self.watch()
        if self._was_guarded:
            self.guard()

    def _attribute_error(self, module: str, name: str) -> InputError:
        return InputError(
            "rank {rank} does not have {name!r} of {module!r}, which a forward sets: it trains {stages}, and {module!r} is of another "
            "rank's stage",
            rank=self._rank,
            name=name,
            module=module,
            stages=named("stage", sorted(self._modules)),
            remedy="read it on the rank of the part, keep it in a buffer and read that inside `with zb.gathered(model):`, or return it "
            "from the model's forward",
        )

    def _error(self, name: str, what: str) -> InputError:
        if self._refuse_read is not None:
            return self._refuse_read(name)
        gathers = f"{self.remedy}use the model inside `with zb.gathered(model):`, which all ranks enter, before the pipeline is closed"
        if _is_in_optimizer():
            gathers = f"make the optimizer of {self.pipe}.parameters(), the parameters of this rank"
        if _is_of_other_pipeline(self, name):
            gathers = "another pipeline trains it on this rank: cut both models by cuts= of zb.split, so that it is on one rank"
        remedy = self.instead or gathers
        if what == "gradient":
            remedy = (
                f"loop over {self.pipe}.parameters(), the parameters of this rank, for what changes each gradient alone, and call "
                f"{self.pipe}.clip_grad_norm_(math.inf) on all ranks for the norm of all gradients"
            )
        return InputError(
            "rank {rank} does not have the {what} of {name!r}: it trains {stages}, and {name!r} is of another rank's stage",
            rank=self._rank,
            what="trained values" if what == "values" else what,
            name=name,
            stages=named("stage", sorted(self._modules)),
            remedy=remedy,
        )


def _is_of_other_pipeline(model: CutModel, name: str) -> bool:
    """Returns whether a stage of another open pipeline has this tensor on this rank, as for an encoder of two models."""
    tensor = next((tensor for own, tensor in model.tensors() if own == name), None)
    others = (held.tensor for other in list(_open) if other is not model for held in other.of_stages().values())
    return tensor is not None and any(held is tensor for held in others)


def _is_in_optimizer() -> bool:
    """Returns whether the current call comes from a `step` of an optimizer, which has parameters of the whole model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(next(iter(frame.f_locals.values()), None), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


def named_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of `module`, under all of their names with a `prefix`, and then its `attached_tensors`."""
    kept = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in chain(kept, attached_tensors(module)):
        yield f"{prefix}{name}", tensor


def attached_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that hold the values of parameters and buffers: those of `derived_tensors`, and those inside wrappers."""
    yield from derived_tensors(module)
    for path, part in module.named_modules(remove_duplicate=False):
        for tensor_name, tensor in stateful_tensors(part).items():
            for name, inner in tensors_inside_wrapper(tensor, tensor_name):
                yield f"{path}.{name}" if path else name, inner


def _twins(module: nn.Module) -> Iterator[_Twin]:
    """Yields the tensors in attributes that share the memory of a quantized weight, as the 8-bit layers of bitsandbytes keep it twice."""
    for path, part in module.named_modules():
        weights = {
            tensor.data_ptr(): tensor for tensor in stateful_tensors(part).values() if not (is_wrapper(tensor) or is_released(tensor))
        }
        for name, tensor in state_of(part) if weights else ():
            if not is_released(tensor) and tensor.data_ptr() in weights and tensor.data_ptr():
                yield _Twin(f"{path}.{name}" if path else name, tensor, weights[tensor.data_ptr()])


def derived_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the attributes that torch computes from a parameter before each forward, such as pruned weights, with their names."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, _ in part.named_parameters(recurse=False, remove_duplicate=False):  # TorchScript has no `_parameters` to iterate
            derived, _, ending = name.rpartition("_")
            tensor = part.__dict__.get(derived)
            if f"_{ending}" in DERIVED_FROM and isinstance(tensor, Tensor):
                yield f"{path}.{derived}" if path else derived, tensor


class _Sample(NamedTuple):
    """What changes with the values of `tensors`: their versions, and the first values of some tensors spread over all of them.

    Writes to `.data` count no version.
    """

    tensors: Sequence[Tensor]
    versions: list[int]
    values: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Sample:
        """Returns a sample of the current values."""
        plain = [tensor for tensor in tensors if local_part(tensor) is tensor and not tensor.is_inference()]
        with torch._C.DisableTorchFunctionSubclass():
            with_values = [tensor for tensor in tensors if not is_wrapper(tensor)]
            return cls(tensors, [tensor._version for tensor in plain], list(map(_first_values, _spread(with_values))))

    def has_changed(self) -> bool:
        """Returns whether any tensor has changed."""
        now = _Sample.of(self.tensors)
        return now.versions != self.versions or not all(map(_are_equal, now.values, self.values))


class _Watched(NamedTuple):
    """The parameters of this rank, and before the first training step those of other ranks, when they were watched."""

    own: _Sample
    others: _Sample | None


def _spread(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[:: len(tensors) // _SAMPLED + 1]


def _first_values(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().reshape(-1)[:_SAMPLED].clone()


def _are_equal(ours: Tensor, before: Tensor) -> bool:
    """Compares values in the current dtype and on the current device, which the whole model may have changed."""
    return torch.equal(ours, before.to(ours))


def _refuse_released(module: nn.Module, *_: Any) -> None:
    """Raises `InputError` if a tensor of `module` is released.

    `load_state_dict` itself would hide this error among its own, or with `assign=True` replace the tensor.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if is_released(tensor):
            tensor.detach()


def _refuse_or_apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """Lets released tensors refuse other dtypes, and the like, before the tensors of this rank are changed."""
    for tensor in (*module.parameters(), *module.buffers()):
        if is_released(tensor):
            fn(tensor)
    applied: nn.Module = type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
    return applied
