"""Tracks each tensor from its source, a unit or a parameter, to its uses.

A dispatch mode sees every operation on tensors. It propagates the sources of the inputs to the outputs, and marks storages on writes, so
that views share them. Code that would run differently on different stages is refused: a stage that lacks a value cannot branch on it.
"""

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
from zerobubble.models.observation.gradient_code import hooked_module, line_of_call, parameter_code, uses_parameter_gradients
from zerobubble.models.observation.placeholders import IN_THE_LOOP, is_placeholder
from zerobubble.runtime.values.released import is_released

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
"""Operations that return a Python number, or a tensor with a data-dependent shape."""
_LEAVES_TORCH = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
"""Methods that read values and bypass torch's dispatcher."""


_NEEDS_GRADIENT = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""Methods that torch refuses for a tensor without a gradient, as a stage has in the place of one of another stage."""
_GOES_BACK = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions that run a backward pass."""


def is_mark(func: Any) -> bool:
    """Returns whether an operation is `pipe_split()` of torch.distributed.pipelining, which marks a cut."""
    return str(func) == "pippy._pipe_split.default"


class SourceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the sources of each tensor during its lifetime: the outputs of an operation have the sources of its inputs.

    A write into a storage affects all its views. Raises `InputError` if the model's code reads a value that comes from a unit or a
    parameter: stages without that value would branch differently. Also raises it if the code writes such values into a buffer, reads a
    tensor that a unit has changed in place, or uses a tensor inside a unit. `held` has the names of such tensors; without `meta`, tensors
    on the meta device are inside units too. The code may change in place, by constants, parameters that only one unit holds,
    `sole_holders`: the stage with the unit does so, and no other stage needs it.
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
        """The `watched` tensors that were passed to operations and units, by their labels."""
        self.changed_inside: dict[str | None, str] = {}
        """Units with a parameter that outside code has changed since their last call, and the parameter's name."""
        self._meta_is_inside = not meta
        self.written: set[int] = set()
        """The ids of the storages that tracked code has written to."""
        self._noted: dict[int, object] = {}
        self.draws = 0
        """Number of random numbers of torch, or tensors of them, that tracked code has drawn."""
        self.reads_draws = False
        """Whether tracked code has read random numbers."""
        self.marks = 0
        """Number of calls of `pipe_split()`."""
        self._buffers = {self.note(buffer): name for name, buffer in buffers}
        self._functions = _BypassesOfTheDispatcher(self)

    def __enter__(self) -> SourceTracker:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def come_from(self, tensor: Tensor, sources: Sources) -> None:
        """Sets the `sources` of `tensor`."""
        self._of_tensors[tensor] = sources

    def was_changed(self, tensor: Tensor, unit: str) -> None:
        """Records that `unit` has changed `tensor` in place, which stages without the unit do not see."""
        self._changed_by[self.note(tensor)] = unit

    def note(self, tensor: Tensor) -> int:
        """Returns the storage id of a tensor, and reserves it: no other storage gets this id, even after this one is freed."""
        storage = storage_of(tensor)
        if storage not in self._noted:  # a tensor without a storage is kept alive itself
            self._noted[storage] = StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor  # type: ignore[no-untyped-call]
        return storage

    def has_written_to(self, storage: int) -> bool:
        """Returns whether tracked code has written to this storage."""
        return storage in self._of_storages

    def sources_in(self, pytree_of_tensors: Any) -> Sources:
        """Returns the sources of all tensors in a pytree."""
        leaves = pytree.tree_leaves(pytree_of_tensors)
        leaves += pytree.tree_leaves([dict(leaf) for leaf in leaves if isinstance(leaf, UserDict)])
        return frozenset().union(*(self._sources_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))

    def _sources_of(self, tensor: Tensor) -> Sources:
        if tensor.layout is torch.jagged:
            raise InputError(
                "code of the model between its parts uses a jagged nested tensor of shape {shape}, which stages cannot send",
                shape=list(tensor.shape),
                remedy="pass padded tensors with a mask, or values and offsets, and create nested tensors inside of each part",
            )
        if tensor in self._held or (self._meta_is_inside and tensor.is_meta):
            raise InputError(
                "code of the model between its parts uses {value}, which only the stage of that part has",
                value=self._described(tensor),
                remedy="move that code into the part, or return what others need; for a loss, call zb.nn.add_loss in the part",
            )
        if tensor in self._watched:
            self.used.add(self._watched[tensor])
        storage = storage_of(tensor)
        if storage in self._changed_by:
            raise InputError(
                "{part!r} changes its input in place, and the model uses that input afterwards; a stage without this part would "
                "not see the change",
                part=self._changed_by[storage],
                remedy="let the part work on x.clone()",
            )
        sources: Sources = self._of_tensors.get(tensor, frozenset())
        return sources | self._of_storages.get(storage, frozenset())

    def _described(self, tensor: Tensor) -> str:
        name = self._held.get(tensor)
        return (
            f"a tensor of shape {list(tensor.shape)} that is inside of a part" if name is None else f"{name!r}, a tensor inside of a part"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self.marks += is_mark(func)
        if func._schema.is_mutable and self._stays_in_a_unit(func, pytree.tree_leaves((args, named))):
            return func(*args, **named)
        sources = self.sources_in((args, named))
        if func._overloadpacket in _READS_NUMBERS:
            self.refuse_reads(sources, str(func._overloadpacket))
        written = list(written_tensors(func, args)) if func._schema.is_mutable else []
        _refuse_changed_parameters(written, self._of_tensors)
        output = func(*args, **named)
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {self._draw(str(func._overloadpacket), sources)}
        if sources:
            self._hand_on(sources, output)
        self._write(written, sources)
        return output

    def refuse_reads(self, sources: Sources, operation: str) -> None:
        """Raises `InputError` if code reads values that other stages lack; notes that it reads random numbers."""
        if computed := _without_draws(sources):
            raise data_dependent(computed, operation)
        self.reads_draws |= bool(sources)

    def _stays_in_a_unit(self, func: Any, leaves: list[Any]) -> bool:
        """Returns whether all inputs of an operation are parameters that only one unit holds; then records that unit as changed."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        holders = {self._sole_holders.get(tensor) for tensor in tensors}
        if len(holders) != 1 or None in holders or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        self.changed_inside[holders.pop()] = self._held[tensors[0]]
        return True

    def _draw(self, operation: str, sources: Sources) -> RandomDraw:
        self.draws += 1
        return RandomDraw(self.draws, operation, tuple(sorted({source.unit for source in sources if isinstance(source, UnitCall)})))

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
                    "code of the model between its parts writes values from {sources} into buffer {buffer!r}, which other stages "
                    "cannot repeat",
                    sources=named(_without_draws(sources)),
                    buffer=self._buffers[storage],
                    remedy="move the buffer and the code that writes it into a part: a module with parameters "
                    "and without a list of blocks, such as the last layer before that code",
                )
            self._of_storages[storage] = self._sources_of(tensor) | sources


def written_tensors(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors that an operation writes to: each of a list for foreach operations."""
    for argument, schema in zip(args, func._schema.arguments, strict=False):
        if schema.alias_info is not None and schema.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor))


def _refuse_changed_parameters(written: Iterable[Tensor], sources: Mapping[Tensor, Sources]) -> None:
    for tensor in written:
        if isinstance(tensor, nn.Parameter) and (tensor in sources or is_placeholder(tensor)):
            raise InputError(
                "code of the model between its parts changes {parameter} in place in {line}, but stages without it cannot repeat that",
                parameter=f"parameter {named(sources[tensor])}" if tensor in sources else f"a parameter of shape {list(tensor.shape)}",
                line=line_of_call(),
                remedy=f"change it in a part that holds it, or {IN_THE_LOOP}",
            )


class _BypassesOfTheDispatcher(TorchFunctionMode):
    """Refuses calls that bypass the dispatcher, and so `SourceTracker`: methods that read values, backward passes through units, and uses
    of gradients of parameters.
    """

    def __init__(self, source_tracker: SourceTracker) -> None:
        super().__init__()
        self._tracker = source_tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call := parameter_code(func, args):
            raise uses_parameter_gradients([call])
        if func in _LEAVES_TORCH and not args[0].is_meta:  # a meta tensor has no values, and raises its own error
            self._tracker.refuse_reads(self._tracker.sources_in(args), func.__name__)
        if func in _GOES_BACK and self._tracker in _get_current_dispatch_mode_stack():  # not while a unit runs
            sources = self._tracker.sources_in((args, kwargs))
            if sources:
                raise _goes_back(func, sources)
        if func in _NEEDS_GRADIENT and not args[0].requires_grad and self._tracker.sources_in(args):
            raise InputError(
                "code of the model between its parts calls {function}() in {line}, where only some stages have a gradient",
                function=func.__name__,
                line=line_of_call(),
                remedy="move that line into a part, a module with parameters; or run it only if the tensor's requires_grad is True",
            )
        return func(*args, **(kwargs or {}))


def data_dependent(sources: Sources, operation: str) -> InputError:
    """Returns the error for code that reads values which not every stage has."""
    hooked = hooked_module()
    if hooked is not None:
        return InputError(
            "a forward hook on {module}, a module around parts, reads values that come from {sources} (by {operation}, in {line}); it runs "
            "on every stage, also on those without them",
            module=type(hooked).__name__,
            sources=named(sources),
            operation=operation,
            line=line_of_call(),
            remedy="register it on a part, such as the last one in the module, or on a module inside a part",
        )
    return InputError(
        "code of the model between its parts reads values that come from {sources} (by {operation}, in {line}); stages without them "
        "cannot branch on them",
        sources=named(sources),
        operation=operation,
        line=line_of_call(),
        remedy="move that code into a part, a module with parameters, or use tensor operations such as torch.where, and "
        "validate_args=False for torch.distributions",
    )


def _goes_back(func: Any, sources: Sources) -> InputError:
    return InputError(
        "code of the model between its parts calls {function}() of autograd in {line} on values from {sources}, but no stage has "
        "all parts of that backward pass",
        function=func.__name__,
        line=line_of_call(),
        sources=named(sources),
        remedy="call it in loss_fn, or write the stages yourself, for zb.Pipeline(build, ...)",
    )


def _without_draws(sources: Sources) -> Sources:
    """Returns the sources that other stages lack; random numbers can be drawn on any stage."""
    return frozenset(source for source in sources if not isinstance(source, RandomDraw))


def named(sources: Sources) -> str:
    """Describes the sources."""
    return ", ".join(sorted(repr(source.name) if isinstance(source, DirectParameter) else str(source) for source in sources))


def storage_of(tensor: Tensor) -> int:
    """Returns an id that tensors with the same storage share during their lifetime."""
    has_storage = tensor.layout is torch.strided and not is_released(tensor)
    return tensor.untyped_storage()._cdata if has_storage else -id(tensor)
