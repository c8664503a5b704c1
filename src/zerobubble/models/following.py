"""Follows each tensor from the unit or parameter it comes from to where it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.dataflow import Sources

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


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps where each tensor comes from, for as long as it lives: an operation that reads a tensor hands on where that came from.

    What was written into a storage holds for all its views. Raises `InputError` where the model's code looks at a number that comes from
    a unit or a parameter, and decides by it what it does: on stages that do not have that number it would decide otherwise. So, too, where
    it writes such numbers into a buffer, and where it reads a tensor that a unit has changed in place.
    """

    def __init__(self, buffers: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_tensors: Any = WeakTensorKeyDictionary()
        self._of_storages: dict[int, Sources] = {}
        self._changed_by: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other storage gets the address of one that is noted
        self._buffers = {storage_of(buffer): name for name, buffer in buffers}
        self._numbers = _NumbersOutsideOfTorch(self)

    def __enter__(self) -> Following:
        self._numbers.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._numbers.__exit__(*error)  # type: ignore[no-untyped-call]

    def come_from(self, tensor: Tensor, sources: Sources) -> None:
        """`tensor` comes from these `sources` and no others."""
        self._of_tensors[tensor] = sources

    def was_changed(self, tensor: Tensor, unit: str) -> None:
        """`unit` has changed `tensor` in place, which is seen by nobody who did not call it."""
        self._changed_by[storage_of(tensor)] = unit
        self._kept.append(tensor)

    def has_written_to(self, storage: int) -> bool:
        """Whether code that was followed has changed what lies in this storage in place."""
        return storage in self._of_storages

    def sources_in(self, pytree_of_tensors: Any) -> Sources:
        """The sources of all tensors in a pytree."""
        leaves = pytree.tree_leaves(pytree_of_tensors)
        return frozenset().union(*(self._sources_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))

    def _sources_of(self, tensor: Tensor) -> Sources:
        storage = storage_of(tensor)
        if storage in self._changed_by:
            raise InputError(
                f"{self._changed_by[storage]!r} changes its input in place, and the model uses that input again; a stage without this part "
                "would not see the change: let the part work on x.clone()"
            )
        found: Sources = self._of_tensors.get(tensor, frozenset())
        return found | self._of_storages.get(storage, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        sources = self.sources_in((args, given))
        if sources and func._overloadpacket in _READS_NUMBERS:
            raise data_dependent(sources, str(func._overloadpacket))
        output = func(*args, **given)
        if sources:
            self._hand_on(sources, output)
            self._write(func, args, sources)
        return output

    def _hand_on(self, sources: Sources, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._of_tensors[leaf] = self._sources_of(leaf) | sources

    def _write(self, func: Any, args: Any, sources: Sources) -> None:
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            if schema.alias_info is None or not schema.alias_info.is_write:
                continue
            for tensor in pytree.tree_leaves(argument):  # operations over lists of tensors write into each
                storage = storage_of(tensor)
                if storage in self._buffers:
                    raise InputError(
                        f"code of the model between its parts writes what it gets from {_named(sources)} into buffer "
                        f"{self._buffers[storage]!r}, which other stages could not: keep the buffer in the part that writes it"
                    )
                self._of_storages[storage] = self._sources_of(tensor) | sources
                self._kept.append(tensor)


class _NumbersOutsideOfTorch(TorchFunctionMode):
    """Refuses the methods that read numbers without an operation that `Following` sees."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVES_TORCH:
            sources = self._following.sources_in(args)
            if sources:
                raise data_dependent(sources, func.__name__)
        return func(*args, **(kwargs or {}))


def data_dependent(sources: Sources, operation: str) -> InputError:
    """The model's code looks at numbers that not every stage has."""
    return InputError(
        f"code of the model between its parts looks at numbers that come from {_named(sources)} (by {operation}) and decides by them; "
        "stages that do not have them could not: move that code into a part, or give it tensor operations such as torch.where"
    )


def _named(sources: Sources) -> str:
    return ", ".join(sorted(str(source) if len(source) == 2 else repr(source.name) for source in sources))


def storage_of(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common while they live."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)
