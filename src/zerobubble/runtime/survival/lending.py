"""Shares the batch of a replica with the other survivors, once ranks of that replica are gone.

With `survive=True` every rank is given the whole share of its replica. While all ranks are alive, each uses its own part of it. After a
loss, the survivors play one pipeline of all replicas: one rank of each replica sends its share to the ranks that need it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, near
from zerobubble.runtime.session import Session
from zerobubble.runtime.step.batch import StepInputs, split_batch
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.step.named_arguments import for_each_microbatch, names_taken, positional_names
from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endpoint import Line
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.payload import Structure, flatten_pytree, unflatten_pytree


class Share(NamedTuple):
    """The microbatches of one replica; or another value for each of these three parts."""

    inputs: Any
    targets: Any
    kwargs: Any


class Lending:
    """Exchanges the shares of all replicas, for a rank that holds the stages `modules`.

    `taken` are the names of arguments that stages of any rank take, None if one takes every name.
    """

    def __init__(self, modules: Mapping[int, nn.Module], taken: Iterable[str] | None) -> None:
        self._modules = modules
        self._taken = None if taken is None else frozenset(taken)

    def own(self, step_inputs: StepInputs) -> StepInputs:
        """Returns this rank's part of its replica's share: only the named arguments that its stages take."""
        self._refuse(step_inputs)
        return step_inputs._replace(kwargs=self._of_own_stages(step_inputs.kwargs))

    def whole_batch(self, step_inputs: StepInputs, num_microbatches: int, lenders: Sequence[int], session: Session) -> StepInputs:
        """Returns the microbatches of all replicas; the rank `lenders[replica]` sends those of its replica.

        Ranks that begin no route get no inputs, and ranks that end none get no targets.
        """
        self._refuse(step_inputs)
        mine = _share(step_inputs, num_microbatches, positional_names(self._modules, step_inputs.batch_dims))
        routes = session.setup.schedule.placement.routes
        ranks = session.peers.members
        wanted = Share({ranks[route[0]] for route in routes}, {ranks[route[-1]] for route in routes}, frozenset(ranks))
        whole = Share(*_all_lent(mine, wanted, lenders, session.transport))
        return step_inputs._replace(inputs=whole.inputs, targets=whole.targets, kwargs=self._of_own_stages(whole.kwargs))

    def _refuse(self, step_inputs: StepInputs) -> None:
        """Raises `InputError` for a batch that could not be sent to the survivors of a loss."""
        if step_inputs.inputs is None or step_inputs.targets is None:
            raise InputError("with survive=True every rank needs the inputs and targets of its replica", remedy="pass both on all ranks")
        tensors: list[Tensor] = []
        for what in ("inputs", "targets", "kwargs"):
            try:
                tensors += flatten_pytree(getattr(step_inputs, what), what)[0]
            except TypeError as error:
                raise InputError(
                    "with survive=True ranks send each other their batches, and {reason}", reason=str(error), remedy="keep it in the stages"
                ) from None
        if any(tensor.requires_grad for tensor in tensors):
            raise InputError("with survive=True inputs, targets and kwargs get no gradients", remedy="pass them .detach()ed")
        unknown = [name for name in _names_in(step_inputs.kwargs) if self._taken is not None and name not in self._taken]
        if unknown:
            taken = sorted(self._taken or ())
            named = ", ".join(map(repr, unknown))
            message = "no stage takes {named}: {hint}stages take {known}"
            raise InputError(message, named=named, hint=near(unknown[0], taken), known=", ".join(taken) or "no named arguments")

    def _of_own_stages(self, kwargs: Any) -> Any:
        """Returns the named arguments that the stages of this rank take; `kwargs` are given once or for each microbatch."""
        taken = {name for names in names_taken(self._modules, _names_in(kwargs)).values() for name in names}
        if isinstance(kwargs, list):
            return [{name: value for name, value in named.items() if name in taken} for named in kwargs]
        return kwargs and {name: value for name, value in kwargs.items() if name in taken}


def _names_in(kwargs: Any) -> list[str]:
    """Returns the names of arguments given once, or for each microbatch; raises `InputError` for anything else."""
    of_microbatches = kwargs if isinstance(kwargs, list) else [kwargs or {}]
    if not all(isinstance(named, dict) for named in of_microbatches):
        raise wrong("kwargs", kwargs, "a dict, or a list of dicts, one for each microbatch")
    return list(dict.fromkeys(name for named in of_microbatches for name in named))


def _share(step_inputs: StepInputs, num_microbatches: int, names: Sequence[str]) -> Share:
    gradients = InputGradients()
    cut = partial(split_batch, num_microbatches=num_microbatches, gradients=gradients, batch_dims=step_inputs.batch_dims)
    inputs = cut(step_inputs.inputs, what="inputs", names=names)
    kwargs = step_inputs.kwargs
    named = None if kwargs is None else for_each_microbatch(kwargs, num_microbatches, inputs.batch_size, gradients, step_inputs.batch_dims)
    return Share(inputs.microbatches, cut(step_inputs.targets, what="targets").microbatches, named)


def _all_lent(mine: Share, wanted: Share, lenders: Sequence[int], transport: Transport) -> list[list[Any] | None]:
    """Returns the inputs, targets and named arguments of all replicas; each is None on ranks not in `wanted`."""
    doing = "sharing out the batch"
    parcels = [Parcel.pack(part) for part in mine]
    with transport.collective(doing), exchanging():
        all_forms = transport.gather_objects([parcel.form for parcel in parcels] if transport.rank in lenders else None)
        forms = dict(zip(transport.ranks, all_forms, strict=True))
        # Start all exchanges before waiting for any: ranks both send and receive, and would wait for each other in a circle.
        moving = [
            [_move(parcel, form, lender, ranks, transport) for lender in lenders for form in [forms[lender][number]]]
            for number, (parcel, ranks) in enumerate(zip(parcels, wanted, strict=True))
        ]
        for work in (work for parts in moving for _, works in parts for work in works):
            work.wait()
    return [
        _joined([parcel.unpack(transport.device) for parcel, _ in parts]) if transport.rank in ranks else None
        for parts, ranks in zip(moving, wanted, strict=True)
    ]


def _joined(parts: list[Any]) -> list[Any] | None:
    """Returns the parts of all replicas in one list, None if they were given nothing."""
    return None if None in parts else [microbatch for part in parts for microbatch in part]


def _move(mine: Parcel, form: Form, lender: int, ranks: Collection[int], transport: Transport) -> tuple[Parcel, list[Work]]:
    """Starts sending `mine` from its `lender` to the other `ranks`, or receiving it; returns the parcel and the works to wait for."""
    here, num_bytes = transport.rank, form.num_bytes
    if here == lender:
        others = [rank for rank in sorted(ranks) if rank != here and num_bytes]
        return mine, [transport.sender(Line(here, rank, Topic.BATCH))(mine.data) for rank in others]
    if here not in ranks or not num_bytes:
        return Parcel(form, torch.empty(num_bytes, dtype=torch.uint8, device="cpu")), []
    theirs = Parcel(form, torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    return theirs, [transport.receiver(Line(lender, here, Topic.BATCH))(theirs.data)]


class Form(NamedTuple):
    """The layout of tensors in a parcel, and the structure in which they are nested."""

    structure: Structure
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensors take, with padding."""
        return sum(_padded(shape.numel() * dtype.itemsize) for shape, dtype in self.tensors)


class Parcel(NamedTuple):
    """A part of a share packed into one message: the bytes of its tensors, one after another, on the CPU."""

    form: Form
    data: Tensor

    @classmethod
    def pack(cls, part: Any) -> Parcel:
        """Packs a part of this rank's share."""
        tensors, structure = flatten_pytree(part)
        form = Form(structure, tuple((tensor.shape, tensor.dtype) for tensor in tensors))
        parcel = cls(form, torch.zeros(form.num_bytes, dtype=torch.uint8, device="cpu"))
        for packed, tensor in zip(parcel._tensors(), tensors, strict=True):
            packed.copy_(tensor.detach())
        return parcel

    def unpack(self, device: torch.device) -> Any:
        """Returns the part that was packed, its tensors on `device`."""
        return unflatten_pytree(self.form.structure, (tensor.to(device) for tensor in self._tensors()))

    def _tensors(self) -> list[Tensor]:
        """Returns the tensors as views of the packed bytes."""
        tensors, begin = [], 0
        for shape, dtype in self.form.tensors:
            end = begin + shape.numel() * dtype.itemsize
            tensors.append(self.data[begin:end].view(dtype).view(shape))
            begin += _padded(end - begin)
        return tensors


def _padded(num_bytes: int) -> int:
    """Rounds up to 16 bytes, an address at which a tensor of any dtype may begin."""
    return -(-num_bytes // 16) * 16
