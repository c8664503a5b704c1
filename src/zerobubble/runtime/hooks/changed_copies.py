"""Refuses forwards that change a tensor with copies on other ranks or stages, such as an embedding with `max_norm`.

Parameters that are tied, replicated, or held by several stages of a rank have copies, and so have the parameters and buffers of stages on
each route. Each copy sees other inputs, or other microbatches, so no copy would hold what one device holds after all of them.

A change is detected by the version and the address of the tensor. Some kernels, and writes to `.data`, count no version. So contents are
compared, too, in the first training step and the first evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.replicas import Replicas
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.values.buffers import buffers_of
from zerobubble.runtime.values.memory import local_part, version_of


class _Seen(NamedTuple):
    """A tensor before a step; `content` is a digest of its values, None after the first step."""

    tensor: Tensor | None
    version: int
    address: int
    content: Tensor | None


_NOTHING = _Seen(None, 0, 0, None)


class ChangedCopies(StepHook):
    """Watches `parameters`, by why each has copies, and the persistent buffers of the `copied` stages.

    Other buffers, such as lazily built tables, are not state of the model. `modules` are the stages of this rank.
    """

    def __init__(self, modules: Mapping[int, nn.Module], copied: Iterable[int], parameters: Mapping[nn.Parameter, str]) -> None:
        self._modules = modules
        self._parameters = {parameter: why for parameter, why in parameters.items() if local_part(parameter) is parameter}
        self._buffers: list[tuple[str, nn.Module, str]] = []
        for stage in copied:
            for path, part in modules[stage].named_modules():
                names = [name for name in buffers_of(part) if name not in part._non_persistent_buffers_set]
                self._buffers += [(f"{f'{path}.{name}'.lstrip('.')} of stage {stage}", part, name) for name in names]
        self._before: list[_Seen] = []
        self._compared: set[str] = set()

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self._parameters or self._buffers)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Records the tensors."""
        self.look("step")

    def on_start_over(self, step: TrainingStep) -> None:
        """Records them again: the hook that lets the step start over may have changed weights."""
        self.look("step")

    def on_step_end(self, step: TrainingStep) -> None:
        """Raises `InputError` if the passes have changed any."""
        self.refuse_changed()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context for the forwards of an evaluation: raises `InputError` if they have changed any."""
        self.look("evaluation")
        yield
        self.refuse_changed()

    def look(self, what: str) -> None:
        """Records the tensors before a step or an evaluation."""
        reads = what not in self._compared
        self._compared.add(what)
        self._before = [_see(tensor, reads=reads) for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor | None]:
        return [*self._parameters, *(buffers_of(part).get(name) for _, part, name in self._buffers)]

    def refuse_changed(self) -> None:
        """Raises `InputError` if a tensor has changed. Call it after the passes."""
        before, self._before = self._before, []
        changed = [_has_changed(tensor, seen) for tensor, seen in zip(self._tensors(), before, strict=True)]
        for parameter, has_changed in zip(self._parameters, changed, strict=False):
            if has_changed:
                self._refuse_parameter(parameter)
        for (where, _, _), has_changed in zip(self._buffers, changed[len(self._parameters) :], strict=True):
            if has_changed:
                _refuse_buffer(where)

    def _refuse_parameter(self, parameter: nn.Parameter) -> NoReturn:
        names = (
            f"{name!r} of stage {stage}"
            for stage, module in self._modules.items()
            for name, p in module.named_parameters()
            if p is parameter
        )
        raise InputError(
            "parameter {where} changes in a forward, but {why}, so that forwards with other inputs would change each copy apart; {remedy}",
            where=next(names),
            why=self._parameters[parameter],
            remedy="change it after optimizer.step(), on every copy alike (an embedding: leave max_norm out), or give it no copies",
        )


def _refuse_buffer(where: str) -> NoReturn:
    raise InputError(
        (
            "buffer {where} changes in a training forward, and of a bidirectional schedule's copies of the stage "
            "each sees some of the microbatches only, so none would hold what one device holds; {remedy}"
        ),
        where=where,
        remedy=(
            "put its module in evaluation mode, take one without such statistics (track_running_stats=False), or "
            "choose a schedule with one route"
        ),
    )


def watched_copies(modules: Mapping[int, nn.Module], shared: SharedGradients, replicas: Replicas | None) -> ChangedCopies:
    """Returns the hook that watches what of these stages has copies."""
    times = Counter(parameter for module in modules.values() for parameter in set(module.parameters()))
    parameters = {parameter: "several stages of this rank hold it" for parameter, count in times.items() if count > 1}
    parameters |= {} if replicas is None else replicas.why_shared()
    return ChangedCopies(modules, shared.copied_stages, parameters | shared.why_shared())


def _see(tensor: Tensor | None, *, reads: bool) -> _Seen:
    return _NOTHING if tensor is None else _Seen(tensor, version_of(tensor), tensor.data_ptr(), _content(tensor) if reads else None)


def _has_changed(tensor: Tensor | None, before: _Seen) -> bool:
    if tensor is not before.tensor:
        return True
    if tensor is None:
        return False
    if (version_of(tensor), tensor.data_ptr()) != (before.version, before.address):
        return True
    return before.content is not None and not torch.equal(_content(tensor).nan_to_num(), before.content.nan_to_num())


def _content(tensor: Tensor) -> Tensor:
    """Returns the sum and the norm of a tensor; nothing if its dtype or device cannot compute them."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_floating_point() else values.double()
    try:
        return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)])
    except (NotImplementedError, RuntimeError, TypeError):
        return torch.empty(0)
