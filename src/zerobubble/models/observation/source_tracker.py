"""Follows each tensor from the unit or parameter it comes from to where it is used."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.observation.dataflow import DirectParameter, RandomDraw, Sources, UnitCall

_aten = torch.ops.aten
_READS_NUMBERS = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.equal,
        _aten.is_nonzero,
        _aten.nonzero,
        _aten.masked_select,
        _aten.unique_consecutive,
        _aten.unique_dim,
        _aten._unique,
        _aten._unique2,
        _aten.bincount,
    }
)
"""Operations that give Python a number, or a tensor whose shape depends on numbers."""
_LEAVES_TORCH = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
"""Methods that read numbers past torch's dispatcher."""


_GOES_BACK = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions that run a backward pass."""


def is_mark(func: Any) -> bool:
    """Whether an operation is `pipe_split()` of torch.distributed.pipelining, by which a model says where it is to be cut."""
    return str(func) == "pippy._pipe_split.default"


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps where each tensor comes from, for as long as it lives: an operation that reads a tensor hands on where that came from.

    What was written into a storage holds for all its views. Raises `InputError` where the model's code looks at a number that comes from
    a unit or a parameter, and decides by it what it does: on stages that do not have that number it would decide otherwise. So, too, where
    it writes such numbers into a buffer, where it reads a tensor that a unit has changed in place, and where it reaches a tensor that a
    unit has: `held` has the names of those, and without `meta` tensors on the meta device are units', too. It may change in place, by
    constants, parameters that one unit alone holds, `sole_holders`: the stage with the unit does so, and no other stage needs it.
    """

    def __init__(
        self,
        buffers: Iterable[tuple[str, Tensor]] = (),
        held: Mapping[Tensor, str] | None = None,
        watched: Mapping[Tensor, tuple[str, str]] | None = None,
        sole_holders: Mapping[Tensor, str] | None = None,
        *,
        meta: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_tensors: Any = WeakTensorKeyDictionary()
        self._of_storages: dict[int, Sources] = {}
        self._changed_by: dict[int, str] = {}
        self._held = {} if held is None else held
        self._watched = {} if watched is None else watched
        self._sole_holders = {} if sole_holders is None else sole_holders
        self.used: set[tuple[str, str]] = set()
        """Which of the `watched` tensors, by what these have for them, operations and units were given."""
        self.changed_inside: dict[str | None, str] = {}
        """Units of which a parameter was changed from outside since their last call, and the parameter's name."""
        self._meta_is_inside = not meta
        self.written: set[int] = set()
        """The storages that code which was followed has written into, by their numbers."""
        self._noted: dict[int, object] = {}
        self._draws = 0
        self.marks = 0
        """How often the code has called `pipe_split()`."""
        self._buffers = {self.note(buffer): name for name, buffer in buffers}
        self._functions = _PastTheDispatcher(self)

    def __enter__(self) -> Following:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def come_from(self, tensor: Tensor, sources: Sources) -> None:
        """`tensor` comes from these `sources` and no others."""
        self._of_tensors[tensor] = sources

    def was_changed(self, tensor: Tensor, unit: str) -> None:
        """`unit` has changed `tensor` in place, which is seen by nobody who did not call it."""
        self._changed_by[self.note(tensor)] = unit

    def note(self, tensor: Tensor) -> int:
        """The number of this tensor's memory, as of `storage_of`, which from here on no other memory gets though it be freed."""
        storage = storage_of(tensor)
        if storage not in self._noted:  # what has no storage is kept itself
            self._noted[storage] = StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor  # type: ignore[no-untyped-call]
        return storage

    def has_written_to(self, storage: int) -> bool:
        """Whether code that was followed has changed what lies in this storage in place."""
        return storage in self._of_storages

    def sources_in(self, pytree_of_tensors: Any) -> Sources:
        """The sources of all tensors in a pytree."""
        leaves = pytree.tree_leaves(pytree_of_tensors)
        leaves += pytree.tree_leaves([dict(leaf) for leaf in leaves if isinstance(leaf, UserDict)])
        return frozenset().union(*(self._sources_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))

    def _sources_of(self, tensor: Tensor) -> Sources:
        if tensor.layout is torch.jagged:
            raise InputError(
                f"code of the model between its parts uses a jagged nested tensor of shape {list(tensor.shape)}, which stages cannot "
                "send: give parts padded tensors with a mask, or values and offsets, and nest them inside of each part"
            )
        if tensor in self._held or (self._meta_is_inside and tensor.is_meta):
            raise InputError(
                f"code of the model between its parts uses {self._told(tensor)}, which only the stage of that part has: let the part do "
                "that, or return what others need"
            )
        if tensor in self._watched:
            self.used.add(self._watched[tensor])
        storage = storage_of(tensor)
        if storage in self._changed_by:
            raise InputError(
                f"{self._changed_by[storage]!r} changes its input in place, and the model uses that input again; a stage without this part "
                "would not see the change: let the part work on x.clone()"
            )
        found: Sources = self._of_tensors.get(tensor, frozenset())
        return found | self._of_storages.get(storage, frozenset())

    def _told(self, tensor: Tensor) -> str:
        name = self._held.get(tensor)
        return (
            f"a tensor of shape {list(tensor.shape)} that is inside of a part" if name is None else f"{name!r}, a tensor inside of a part"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.marks += is_mark(func)
        if func._schema.is_mutable and self._stays_in_a_unit(func, pytree.tree_leaves((args, given))):
            return func(*args, **given)
        sources = self.sources_in((args, given))
        if func._overloadpacket in _READS_NUMBERS and (known := _without_draws(sources)):
            raise data_dependent(known, str(func._overloadpacket))
        written = list(_written(func, args)) if func._schema.is_mutable else []
        _refuse_changed_parameters(written, self._of_tensors)
        output = func(*args, **given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {self._draw(str(func._overloadpacket), sources)}
        if sources:
            self._hand_on(sources, output)
        self._write(written, sources)
        return output

    def _stays_in_a_unit(self, func: Any, leaves: list[Any]) -> bool:
        """Whether all tensors that an operation takes are parameters that one unit alone holds; that unit is noted as changed then."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        holders = {self._sole_holders.get(tensor) for tensor in tensors}
        if len(holders) != 1 or None in holders or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        self.changed_inside[holders.pop()] = self._held[tensors[0]]
        return True

    def _draw(self, operation: str, sources: Sources) -> RandomDraw:
        self._draws += 1
        return RandomDraw(self._draws, operation, tuple(sorted({source.unit for source in sources if isinstance(source, UnitCall)})))

    def _hand_on(self, sources: Sources, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._of_tensors[leaf] = self._sources_of(leaf) | sources

    def _write(self, written: Iterable[Tensor], sources: Sources) -> None:
        for tensor in written:
            storage = self.note(tensor)
            self.written.add(storage)
            if not sources:
                continue
            if storage in self._buffers and _without_draws(sources):
                raise InputError(
                    f"code of the model between its parts writes what it gets from {named(_without_draws(sources))} into buffer "
                    f"{self._buffers[storage]!r}, which other stages could not: keep the buffer in the part that writes it"
                )
            self._of_storages[storage] = self._sources_of(tensor) | sources


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors that an operation writes into."""
    for argument, schema in zip(args, func._schema.arguments, strict=False):
        if schema.alias_info is not None and schema.alias_info.is_write:
            yield from pytree.tree_leaves(argument)  # operations over lists of tensors write into each


def _refuse_changed_parameters(written: Iterable[Tensor], sources: Mapping[Tensor, Sources]) -> None:
    for tensor in written:
        if isinstance(tensor, nn.Parameter) and tensor in sources:
            raise InputError(
                f"code of the model between its parts changes parameter {named(sources[tensor])} in place, and stages that do not hold it "
                "could not: change it in a part that holds it, or behind optimizer.step()"
            )


class _PastTheDispatcher(TorchFunctionMode):
    """Refuses what `Following` sees no operation of: methods that read numbers, and backward passes through units."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVES_TORCH and not args[0].is_meta:  # which has no numbers, and says so itself
            sources = _without_draws(self._following.sources_in(args))
            if sources:
                raise data_dependent(sources, func.__name__)
        if func in _GOES_BACK and self._following in _get_current_dispatch_mode_stack():  # and not in a unit that runs
            sources = self._following.sources_in((args, kwargs))
            if sources:
                raise _goes_back(func, sources)
        return func(*args, **(kwargs or {}))


def data_dependent(sources: Sources, operation: str) -> InputError:
    """The model's code looks at numbers that not every stage has."""
    return InputError(
        f"code of the model between its parts looks at numbers that come from {named(sources)} (by {operation}) and decides by them; "
        "stages that do not have them could not: move that code into a part, or give it tensor operations such as torch.where"
    )


def _goes_back(func: Any, sources: Sources) -> InputError:
    return InputError(
        f"code of the model between its parts calls {func.__name__}() of autograd on what comes from {named(sources)}, and no stage has "
        "all parts that this goes back through: call it inside of a part, or in loss_fn"
    )


def _without_draws(sources: Sources) -> Sources:
    """Those that other stages do not have; random numbers they can draw, if others."""
    return frozenset(source for source in sources if not isinstance(source, RandomDraw))


def named(sources: Sources) -> str:
    """The sources in words."""
    return ", ".join(sorted(repr(source.name) if isinstance(source, DirectParameter) else str(source) for source in sources))


def storage_of(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common while they live."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)
