"""`gathered`: a context in which a model has the trained weights of all ranks' stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.arguments import NUMBERED, instance, optional, takes
from zerobubble.errors import InputError, raise_faults
from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.hooks.optimizer_watch import watched_runners
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.stage.cut_model import StageTensor, attached_tensors, named_tensors
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.values.buffers import changing_weights, making_tensors
from zerobubble.runtime.values.memory import local_part
from zerobubble.runtime.values.released import is_released, local_shape, refill
from zerobubble.runtime.values.sparse import TensorForm, is_sparse, parts_of
from zerobubble.runtime.values.stateful import forms_kept, is_wrapper

_DOING = "gathering the weights of a model"


@takes(model=nn.Module, pipe=optional(instance(Pipeline)), rank=optional(NUMBERED))
def gathered(model: nn.Module, pipe: Pipeline | None = None, *, rank: int | None = None) -> AbstractContextManager[None]:
    """A context in which `model` has the trained weights of all stages. All ranks of the pipeline enter it.

        with zb.gathered(model, rank=0):
            if pipe.rank == 0:
                model.save_pretrained("trained")

    Each rank trains only its own stages of a model that `zb.split` has cut. From the first step of an optimizer on, every use of other
    ranks' parameters raises `InputError`, and their memory is free. At the end of the context they are released again. If the pipeline is
    closed inside of it, the model stays whole.

    Args:
        model: The model given to `zb.split`, a part of it, or a module that holds it, such as a LightningModule. With `pipe`, also another
            model with the same names, such as one that was made after training.
        pipe: The pipeline. By default, the open pipeline that trains `model`. While no pipeline is open, such as before the first step of
            Lightning's `fit`, the context changes nothing: the model is whole.
        rank: The rank of the pipeline that gets the weights. By default, all get them, which takes the memory of the whole model on each.

    Changes of weights inside the context count if all ranks with these weights make them.

    Raises `InputError` on every rank if ranks give different models, if a rank has changed weights that it does not train, and for stages
    sharded by `fully_shard`; `PipelineError` on every rank if one of them fails.

    """
    runner = _runner_of(model) if pipe is None else pipe._steps
    if runner is None:
        return _unchanged()
    if rank is not None and rank >= runner.num_ranks:
        raise InputError(
            "rank must be one of the {expected} ranks of the pipeline, got {got}", argument="rank", got=rank, expected=runner.num_ranks
        )
    return gathering(runner, model, wanted=rank is None or rank == runner.rank)


def _runner_of(model: nn.Module) -> StepRunner | None:
    """Returns the runner of the open pipeline that trains `model`; None if no pipeline does, and the model is whole."""
    tensors = {id(tensor): tensor for _, tensor in named_tensors(model)}
    runners = watched_runners()
    having = [runner for runner in runners if not tensors.keys().isdisjoint(id(tensor) for _, tensor in runner.cut_model.tensors())]
    is_open = [runner for runner in having if runner.guard.closed is None]
    if len(is_open) == 1:
        return is_open[0]
    if is_open:
        raise InputError("{got} open pipelines train parts of this model", got=len(is_open), remedy="give one: zb.gathered(model, pipe)")
    if any(is_released(tensor) for tensor in tensors.values()):
        raise InputError(
            "the pipeline that has trained this model is closed, and the weights of other ranks' stages are gone",
            remedy="enter zb.gathered(model) before the pipeline closes, or load a checkpoint",
        )
    if having or all(runner.guard.closed is not None for runner in runners):
        return None
    raise InputError(
        "no pipeline trains {got}", got=type(model).__name__, remedy="give the model that zb.split has cut, or zb.gathered(model, pipe)"
    )


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def gathering(runner: StepRunner, model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Like `gathered`, for this `runner`, on the ranks where it is `wanted`."""
    exchanged = gather(runner, model, wanted=wanted)
    releases = wanted and runner.cut_model.was_gathered()
    fault, ends_process = None, False
    try:
        with forms_kept(model.modules() if wanted else ()):
            yield
    except BaseException as error:
        ends_process = not isinstance(error, Exception)
        raise
    finally:
        if runner.guard.closed is None:
            with making_tensors():
                fault = None if ends_process else exchanged.lost_changes(runner)
            if wanted:
                runner.cut_model.end_gathered(releases=releases)
    if fault is not None:
        with runner.guard.during("at the end of gathered"), runner.agreed_errors():
            raise fault


def make_whole(pipe: Pipeline, model: nn.Module, *, wanted: bool = True) -> None:
    """Gives `model` the trained weights of all stages, until an optimizer steps. All ranks call it, some with `wanted=False`."""
    gather(pipe._steps, model, wanted=wanted)
    if wanted:
        pipe._steps.cut_model.was_gathered()


class _Held(NamedTuple):
    """A tensor that a rank trains: the last of its stages that has it, the form of its local part, None if that cannot be sent."""

    stage: int
    form: TensorForm | None
    kind: str

    @classmethod
    def of(cls, held: StageTensor) -> _Held:
        local = local_part(held.tensor)
        if local.is_nested:
            return cls(held.stage, None, "nested")
        if local.is_quantized or (local.layout is not torch.strided and not is_sparse(local)):
            return cls(held.stage, None, str(local.dtype if local.is_quantized else local.layout))
        return cls(held.stage, TensorForm.of(local), "")


class Gathering:
    """The tensors of a model that were gathered: `tensors` by name, `holders` with the ranks that train each."""

    def __init__(self, tensors: Mapping[str, Tensor], holders: Mapping[str, Sequence[int]]) -> None:
        self._holders = holders
        self._tensors = {name: tensor for name, tensor in tensors.items() if holders[name]}
        self._before = self._versions()

    def _versions(self) -> dict[str, list[int]]:
        """Returns what changes with the values of each tensor on this rank."""
        return {name: _versions_of(tensor) for name, tensor in self._tensors.items() if not is_released(tensor)}

    def lost_changes(self, runner: StepRunner) -> InputError | None:
        """Gives changed buffers to the stages, and returns the fault, the same on all ranks, if a change is lost: a rank has made it, and
        a rank that trains the tensor has not."""
        changed = [name for name, version in self._versions().items() if version != self._before[name]]
        for tensor in (self._tensors[name] for name in changed if not isinstance(self._tensors[name], nn.Parameter)):
            for copy in runner.cut_model.copies_of(tensor):
                _overwrite(copy, tensor)
        of_ranks = [set(names) for names in runner.gather(changed, "comparing changes of gathered weights")]
        for rank, names in enumerate(of_ranks):
            for name in sorted(names):
                if missing := [holder for holder in self._holders[name] if name not in of_ranks[holder]]:
                    return InputError(
                        "rank {rank} has changed {name!r} inside zb.gathered, and rank {holder}, which trains it, has not",
                        rank=runner.peers.members[rank],
                        name=name,
                        holder=runner.peers.members[missing[0]],
                        remedy="make the change on all ranks, inside zb.gathered(model) without rank=",
                    )
        return None


@changing_weights()
@making_tensors()
@torch.no_grad()
def gather(runner: StepRunner, model: nn.Module, *, wanted: bool) -> Gathering:
    """Copies the values of the ranks that train them into the tensors of `model`, where `wanted`. All ranks call it."""
    with runner.guard.during("in gathered"):
        runner.settle()
        every = dict(chain(model.named_parameters(), model.named_buffers(), attached_tensors(model)))
        tensors = {name: tensor for name, tensor in every.items() if not is_wrapper(tensor)}
        names = _names_in_stages(runner, tensors)
        held = _held_by(runner, tensors, names)
        mine = {name: _Held.of(of_stage) for name, of_stage in held.items()}
        shapes = {name: tuple(tensor.shape) if isinstance(tensor, nn.Parameter) else None for name, tensor in tensors.items()}
        from_all = runner.gather(({name: (names[name], shapes[name]) for name in tensors}, mine, wanted), _DOING)
        forms, of_ranks, wants = zip(*from_all, strict=True)
        with runner.agreed_errors():
            _refuse_different(forms, runner.peers.members)
            _refuse_other_shapes(tensors, of_ranks, runner.peers.members)
        receivers = [rank for rank, is_wanted in enumerate(wants) if is_wanted]
        plan = {name: _Exchange.of(name, of_ranks, receivers, is_buffer=not isinstance(tensors[name], nn.Parameter)) for name in tensors}
        with runner.agreed_errors():
            _refuse_unsent(plan, runner.peers.members)
        _open(runner, plan.values())
        for name, tensor in tensors.items():
            _exchange(runner, tensor, held.get(name), plan[name], wanted=wanted)
        wrappers = filter(is_wrapper, every.values()) if wanted else ()
        for wrapper in filter(is_released, wrappers):
            refill(wrapper, wrapper)
    return Gathering(tensors, {name: exchange.holders for name, exchange in plan.items()})


def _held_by(runner: StepRunner, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, StageTensor]:
    """Returns the stage tensors of this rank whose values belong into `tensors`, by the names of these."""
    of_stages = runner.cut_model.of_stages()
    of_ids = {id(of_stage.tensor): of_stage for of_stage in of_stages.values()}
    wanted = {name: of_ids.get(id(tensor)) or of_stages.get(names[name]) for name, tensor in tensors.items()}
    return {name: of_stage for name, of_stage in wanted.items() if of_stage is not None}


def _names_in_stages(runner: StepRunner, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the name in stages of each tensor; empty if it is not of the model that was cut. Another model has the names of stages."""
    names = {id(tensor): name for name, tensor in reversed(list(runner.cut_model.tensors()))}
    is_cut = any(id(tensor) in names for tensor in tensors.values())
    return {name: names.get(id(tensor), "") if is_cut else name for name, tensor in tensors.items()}


def _refuse_different(forms: Sequence[Mapping[str, tuple[str, tuple[int, ...] | None]]], ranks: Sequence[int]) -> None:
    for rank, theirs in zip(ranks, forms, strict=True):
        if theirs != forms[0]:
            name = next(iter(dict(theirs.items() ^ forms[0].items())))
            raise InputError(
                "zb.gathered got different models on ranks {first} and {rank}: they differ in {name!r}",
                first=ranks[0],
                rank=rank,
                name=name,
                remedy="give the same model, or the same part of it, on all ranks",
            )


def _refuse_other_shapes(tensors: Mapping[str, Tensor], of_ranks: Sequence[Mapping[str, _Held]], ranks: Sequence[int]) -> None:
    if not any(of_ranks):
        raise InputError("no rank of the pipeline trains a parameter of this model", remedy="give the model that zb.split has cut")
    for rank, theirs in zip(ranks, of_ranks, strict=True):
        for name, held in theirs.items():
            if not isinstance(tensors[name], nn.Parameter) or held.form is None:  # a forward may give a buffer another shape
                continue
            shape = tuple(local_shape(tensors[name]))
            if held.form.shape != shape:
                raise InputError(
                    "{name!r} has the shape {expected} in the model and {got} on rank {rank} of the pipeline",
                    name=name,
                    got=held.form.shape,
                    expected=shape,
                    rank=rank,
                    remedy="for stages that fully_shard divides, call zb.save, then zb.io.export_weights",
                )


def _refuse_unsent(exchanges: Mapping[str, _Exchange], ranks: Sequence[int]) -> None:
    """Raises `InputError` for tensors that ranks exchange, and that consist of more than numbers, indices and a shape."""
    faults = [
        InputError(
            "{name!r} is {kind}, and rank {rank} cannot send it to other ranks",
            name=name,
            kind=exchange.held.kind,
            rank=ranks[exchange.holders[0]],
            remedy="keep it in a plain attribute of its module instead of a buffer, or as the plain tensors that it is made of",
        )
        for name, exchange in exchanges.items()
        if exchange.receivers and exchange.held is not None and exchange.held.form is None
    ]
    raise_faults(faults)


class _Exchange(NamedTuple):
    """The ranks that train a tensor, the last stage first, the ranks without its values that get it, and its form.

    A buffer around the parts is in all stages. Its values are those of the last one, which alone runs all of the model's code.
    """

    holders: Sequence[int]
    receivers: Sequence[int]
    held: _Held | None

    @classmethod
    def of(cls, name: str, of_ranks: Sequence[Mapping[str, _Held]], wanting: Sequence[int], *, is_buffer: bool) -> _Exchange:
        """Returns the exchange of the tensor `name`, which the ranks `wanting` are to have."""
        holders = sorted((rank for rank, theirs in enumerate(of_ranks) if name in theirs), key=lambda rank: -of_ranks[rank][name].stage)
        if not holders:
            return cls((), (), None)
        sources = holders[:1] if is_buffer else holders
        return cls(holders, [rank for rank in wanting if rank not in sources], of_ranks[holders[0]][name])


def _open(runner: StepRunner, exchanges: Iterable[_Exchange]) -> None:
    """Connects the channels that these exchanges use for the first time, the same on all ranks."""
    used = {Channel(exchange.holders[0], rank, ValueKind.WEIGHT_WORK) for exchange in exchanges for rank in exchange.receivers}
    opened = runner.cut_model.opened
    runner.peers.open_channels(sorted(used - opened))
    opened |= used


def _exchange(runner: StepRunner, tensor: Tensor, held: StageTensor | None, exchange: _Exchange, *, wanted: bool) -> None:
    value = None if held is None else local_part(held.tensor)
    if exchange.receivers and runner.rank in (exchange.holders[0], *exchange.receivers):
        received = _replicated(runner, value, exchange)
        if held is not None and received is not value:
            _overwrite(local_part(held.tensor), received)
        value = received
    if value is None or not wanted:
        return
    if is_released(tensor):
        refill(tensor, value.to(tensor.device))
    elif held is None or held.tensor is not tensor:
        _overwrite(local_part(tensor), value)


def _replicated(runner: StepRunner, value: Tensor | None, exchange: _Exchange) -> Tensor:
    """Returns the value of the first holder: on its rank `value` itself, elsewhere a copy."""
    assert exchange.held is not None
    assert exchange.held.form is not None
    first, form = exchange.holders[0], exchange.held.form
    sent = value if runner.rank == first else None
    parts = form.empty_parts(runner.device) if sent is None else parts_of(sent)
    for part in parts:
        runner.peers.replicate(part, first, _DOING, [first, *exchange.receivers])
    return form.join(parts) if sent is None else sent


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Writes `value` into `tensor`, or gives it new memory if its own has another form or several elements in one place."""
    if tensor.shape == value.shape and not is_sparse(tensor) and not _has_overlap(tensor):
        tensor.copy_(value)
    elif is_sparse(tensor) or not torch.equal(tensor, value.to(tensor)):
        tensor.data = value.to(device=tensor.device, dtype=tensor.dtype, copy=True)


def _has_overlap(tensor: Tensor) -> bool:
    """Returns whether elements of `tensor` share a place, as `expand` makes them."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _versions_of(tensor: Tensor) -> list[int]:
    """Returns the version of `tensor`, if it has one, and the places of its parts."""
    versions = []
    with suppress(RuntimeError):  # made in torch.inference_mode
        versions.append(tensor._version)
    return versions + [part.data_ptr() for part in parts_of(local_part(tensor))]
