"""Shape-only units: find the form of a unit's output without memory for its parameters.

Tensors that a unit stores elsewhere than in its output are refused, with their location and a remedy.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from zerobubble.errors import InputError
from zerobubble.models.observation.copies import copy_of, other_tensors
from zerobubble.models.observation.dataflow import OutputForm, kind_of
from zerobubble.models.observation.equivalent_units import Place, ResultCache, equivalents_of
from zerobubble.models.observation.first_reads import recording_first_reads
from zerobubble.models.observation.following import contents_of, modules_inside
from zerobubble.models.observation.handed_mappings import Opened, mappings_in, taken_out
from zerobubble.models.observation.recording import recording_separately, recording_state
from zerobubble.models.observation.seen_tensors import observing_a_unit, show_on_device_of
from zerobubble.models.observation.source_tracker import is_mark, storage_of
from zerobubble.runtime.device import of_kind
from zerobubble.runtime.split.python_state.identity import Identity
from zerobubble.runtime.split.weight_flops import FlopCounter
from zerobubble.runtime.stage.slices import only_shapes
from zerobubble.runtime.values.added_losses import collecting_losses
from zerobubble.runtime.values.memory import like_parameter, local_part
from zerobubble.runtime.values.python_objects import is_of_library
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.runtime.values.random_state import forked
from zerobubble.runtime.values.stateful import state_of, tensors_inside

_WANTS_GRADIENTS = "does not require grad"
"""Torch's message if a forward calls `torch.autograd.grad` under `no_grad`."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REMEMBERED = 64
"""Maximum number of argument shapes in the cache of a unit."""


class Seen(NamedTuple):
    """The observed effect of a unit for arguments of given shapes: the `form` of its output, its FLOPs, and what it mutates.

    `mark` is "before" or "behind" if the unit begins or ends with `pipe_split()` of torch.distributed.pipelining, else empty.

    The form covers the output, recorded outputs (`Recorded`) and entries put into mappings (`Put`). The unit changes the arguments at the
    positions `changed` in place, changes its buffers named `written`, and reads the attributes `first_reads` before it sets them.
    """

    form: OutputForm
    flops: int
    changed: tuple[int, ...]
    written: tuple[str, ...]
    first_reads: frozenset[Place]
    mark: str = ""


class _Attempts(NamedTuple):
    """Runs of a unit: what each made, and the attributes that each read, None if these are not known."""

    made: list[_Made]
    read: list[Collection[Place] | None]

    def places(self) -> set[Place] | None:
        """Returns the attributes that any attempt read, None if these are not known."""
        observed = [read for read in self.read if read is not None]
        return set().union(*observed) if len(observed) == len(self.read) else None


class ShapeOnlyUnit:
    """Unit `name` of a model, with parameters on the meta device."""

    def __init__(self, name: str, unit: nn.Module, shared: ResultCache[Seen], memo: dict[int, Any]) -> None:
        self.name = name
        self.original = unit
        self.unit = copy_of(unit, memo)
        self._at_first = dict(unit.__dict__)
        self._contents: dict[str, list[Any]] = {}
        self._read: dict[str, Any] = {}
        self._shared = shared
        self._remembered: OrderedDict[tuple[Any, ...], Seen] = OrderedDict()
        self._initial: dict[tuple[str, str], list[Any]] = {}
        self.attributes_set: set[tuple[str, str]] = set()
        """The modules in the unit, by name, with the attributes that forwards of the unit have set."""
        self.forward_is_called = False
        """Whether the model's code has called the unit's `forward` directly instead of the module."""
        self._by_numbers: set[tuple[Any, ...]] = set()
        """Kinds of arguments whose values the unit reads."""

    def attribute(self, name: str) -> Any:
        """Returns an attribute for code around the units: the one of the shape-only unit, unless the user has changed it since."""
        self._read[name] = value = self._attribute(name)
        return value

    def _attribute(self, name: str) -> Any:
        now, before = self.original.__dict__.get(name), self._at_first.get(name)
        if now is before and contents_of(now) == self._contents.setdefault(name, contents_of(now)):
            return getattr(self.unit, name)
        return getattr(self.unit, name) if isinstance(now, (Tensor, nn.Module, MethodType)) or modules_inside(now) else now

    def read_around(self) -> Iterator[Place]:
        """Yields the attributes that code around the units has read, with all that are inside of a module among them."""
        for name, value in self._read.items():
            yield Place(self.name, name)
            for path, module in value.named_modules(prefix=f"{self.name}.{name}") if isinstance(value, nn.Module) else ():
                yield from (Place(path, attribute) for attribute in vars(module))

    def is_read_differently(self) -> bool:
        """Returns whether an attribute has changed since code around the units read it."""
        return any(self._attribute(name) is not value for name, value in self._read.items() if name in self.original.__dict__)

    def seen(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, restores: bool = False) -> Seen:
        """Returns the effect of the unit for arguments of these shapes. `restores` the Python state that its code changes elsewhere.

        Raises `InputError` for a unit that cannot run without its weights, and for one that stores tensors elsewhere than in its output.
        """
        arguments = Opened.from_call(args, kwargs)
        key = (training, repr(arguments.structure), recording_state(), *map(_shape_of, arguments.leaves))
        if key in self._by_numbers:
            key += tuple(map(_integers, arguments.leaves))
        if key not in self._remembered:
            with PythonState(self.original).restored() if restores else nullcontext():
                self._remembered[key] = self._found_or_shared(key, arguments, training=training)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return self._remembered[key]

    def _found_or_shared(self, key: tuple[Any, ...], arguments: Opened, *, training: bool) -> Seen:
        """Returns the effect of the unit or of an equivalent one. Recording hooks and values of arguments are not compared."""
        is_shared = not recording_state() and key not in self._by_numbers
        with self._shared.lock:
            seen = self._shared.find(self.name, key) if is_shared else None
            if seen is None:
                _set_mode(self.unit, training)
                attempts = _Attempts([], [])
                with _disable_current_modes(), torch.no_grad(), observing_a_unit(), _named_in_errors(self.name):
                    seen = self._find_out(key, arguments, attempts)
                if is_shared and key not in self._by_numbers:
                    self._shared.keep(self.name, key, seen, attempts.places())
        return seen

    def _find_out(self, key: tuple[Any, ...], arguments: Opened, attempts: _Attempts) -> Seen:
        """Observes the unit; restores its initial attributes if attributes of an earlier run, such as a hidden state, do not fit.

        Raises the error of its code if it cannot run, and `InputError` if its arguments are the reason.
        """
        try:
            try:
                return self._first_that_runs(key, arguments, attempts)
            except Exception:
                if not self.attributes_set:
                    raise
                self._begin_again()
                return self._first_that_runs(key, arguments, attempts)
        except Exception as error:
            error.__context__ = None  # attempts before it, which failed the same way
            refuse_left_in_arguments(self.name, [tensor for tried in attempts.made for tensor in tried.living()], *arguments.given)
            _refuse_packed(self.name, error)
            _refuse_flex_attention(self.name, error)
            raise

    def _begin_again(self) -> None:
        """Restores the initial values of the attributes that the unit's forwards have set, except what torch's modules manage."""
        for path, name in self.attributes_set:
            module = self.unit.get_submodule(path)
            if is_of_library(type(module).__module__):
                continue
            if (path, name) in self._initial:
                vars(module)[name] = self._initial[path, name][0].value
            else:
                vars(module).pop(name, None)

    def _first_that_runs(self, key: tuple[Any, ...], arguments: Opened, attempts: _Attempts) -> Seen:
        """Runs on meta tensors; if the code reads values, on zeros; if it needs lengths or the like, on the real integers.

        If that fails, too, as where it divides by one of its own buffers, those are 1.
        """
        try:
            return self._run(self.unit, [_meta(leaf) for leaf in arguments.leaves], arguments, attempts)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - code that reads values may fail in any way, such as NumPy's with a TypeError
            if _WANTS_GRADIENTS in str(error):
                return self._run_with_gradients(arguments, attempts)
            unit, place = _with_tensors(self.unit, untouched_zeros), _place_of(self.unit)
        with forked(), _AttentionOfZeros():
            try:
                return self._run(unit, [_zeros(leaf, place) for leaf in arguments.leaves], arguments, attempts)
            except InputError:
                raise
            except Exception:  # noqa: BLE001 - the same
                seen = self._with_known(unit, [_known(leaf, place) for leaf in arguments.leaves], arguments, attempts)
        self._by_numbers.add(key)
        return seen

    def _run_with_gradients(self, arguments: Opened, attempts: _Attempts) -> Seen:
        """Runs with gradients enabled, for a unit that calls `torch.autograd.grad` itself."""
        leaves = [_meta(leaf) for leaf in arguments.leaves]
        tensors = [*self.unit.parameters(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        with torch.enable_grad():
            try:
                for tensor in tensors:
                    tensor.requires_grad_(tensor.is_floating_point())
                return self._run(self.unit, leaves, arguments, attempts)
            finally:
                for parameter in self.unit.parameters():
                    parameter.requires_grad_(False)

    def _with_known(self, unit: nn.Module, leaves: list[Any], arguments: Opened, attempts: _Attempts) -> Seen:
        try:
            return self._run(unit, leaves, arguments, attempts)
        except InputError:
            raise
        except Exception:  # noqa: BLE001 - the same
            return self._run(_with_tensors(self.unit, _ones_or_zeros), leaves, arguments, attempts)

    def _run(self, unit: nn.Module, leaves: list[Any], arguments: Opened, attempts: _Attempts) -> Seen:
        """Runs `unit`, which is the shape-only unit or a copy of it, and notes which attributes it reads."""
        outcome, read = self._shared.run(unit, lambda: self._outcome(unit, leaves, arguments, attempts.made))
        attempts.read.append(read)
        try:
            if isinstance(outcome, Seen):
                return outcome
            raise outcome
        finally:
            del outcome  # the frames of an error hold tensors

    def _outcome(self, unit: nn.Module, leaves: list[Any], arguments: Opened, tried: list[_Made]) -> Seen | Exception:
        """Returns what a run shows, or the error after which another attempt may run: its reads count, too."""
        try:
            return self._observe(unit, leaves, arguments, tried)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return error

    def _observe(self, unit: nn.Module, leaves: list[Any], opened: Opened, tried: list[_Made]) -> Seen:
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        buffers = {name: (buffer, buffer._version) for name, buffer in unit.named_buffers()}
        args, kwargs = opened.closed(leaves)
        arguments, structure = pytree.tree_flatten((args, kwargs))
        mappings = mappings_in(args, kwargs)
        held = [dict(mapping) for mapping in mappings]
        before = _attributes_in(unit)
        self._initial = self._initial or dict(before)
        with (
            FlopCounter() as counter,
            _Made(self.name, unit, leaves) as created,
            collecting_losses(),
            recording_separately() as recorded,
            only_shapes(),
        ):
            tried.append(created)
            try:
                with recording_first_reads(dict(unit.named_modules())) as first_reads:
                    output = unit(*args, **kwargs)
            except Exception:
                _put_back(unit, before)  # the next attempt must not find what this one has kept
                raise
        _refuse_unfit(self.name, output, reads_numbers=created.reads_numbers)
        form = OutputForm.from_output(pytree.tree_map_only(Tensor, _meta, (output, recorded, taken_out(held, mappings))))
        del output
        recorded.clear()
        self.attributes_set.update(place for place, value in _attributes_in(unit).items() if before.get(place) != value)
        before.clear()
        refuse_left(self.name, created.left_outside_of(unit), args, kwargs, dict(named_tensors_in(unit)))
        _refuse_changed(self.name, arguments, structure, (args, kwargs))
        changed = tuple(
            place
            for place, (leaf, version) in enumerate(zip(leaves, versions, strict=True))
            if isinstance(leaf, Tensor) and leaf._version != version
        )
        after = dict(unit.named_buffers())
        written = tuple(name for name, (buffer, version) in buffers.items() if after.get(name) is not buffer or buffer._version != version)
        return Seen(form, counter.get_total_flops(), changed, written, frozenset(first_reads), created.mark())


def _attributes_in(unit: nn.Module) -> dict[tuple[str, str], list[Any]]:
    """Returns the attributes in a unit and their contents, by module and name. `ResultCache.run` does not count this as reads."""
    return {
        (path, name): [Identity(value), *contents_of(value)]
        for path, module in unit.named_modules()
        for name, value in dict.items(vars(module))
        if name not in _OF_EVERY_MODULE
    }


def _put_back(unit: nn.Module, before: Mapping[tuple[str, str], list[Any]]) -> None:
    """Gives the modules in a unit the attributes that `_attributes_in` returned `before`. It reads none either."""
    for path, module in unit.named_modules():
        attributes = vars(module)
        for name in [name for name in dict.keys(attributes) if name not in _OF_EVERY_MODULE]:
            if (path, name) in before:
                attributes[name] = before[path, name][0].value
            else:
                del attributes[name]


@contextmanager
def _named_in_errors(unit: str) -> Iterator[None]:
    """Adds the name of the part to errors of the unit's own code."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        error.add_note(f"in part {unit!r}")
        raise


def _set_mode(unit: nn.Module, training: bool) -> None:
    """Sets the mode of a unit without its `train`, which may compute with weights, such as to merge an adapter."""
    for module in unit.modules():
        module.training = training


def shape_only_units(units: Mapping[str, nn.Module]) -> dict[str, ShapeOnlyUnit]:
    """Returns the shape-only version of each unit. Objects shared by units, such as a configuration, stay shared."""
    equivalents = equivalents_of(units)
    shared = {group: ResultCache[Seen](group) for group in equivalents.values()}
    memo: dict[int, Any] = {}
    for unit in units.values():
        memo |= other_tensors(unit, lambda tensor: torch.empty_like(tensor, device="meta"))
        for tensor in itertools.chain(unit.parameters(), unit.buffers()):
            show_on_device_of(tensor, memo[id(tensor)])
    return {name: ShapeOnlyUnit(name, unit, shared[equivalents[name]], memo) for name, unit in units.items()}


def _refuse_packed(name: str, error: Exception) -> None:
    """Refuses a unit that takes or returns a PackedSequence, whose lengths must be on the CPU."""
    if "PackedSequence" in str(error):
        raise InputError(
            "part {name!r} takes or returns a PackedSequence, which cannot be sent to other stages",
            name=name,
            remedy="call pack_padded_sequence, the recurrent layer and pad_packed_sequence in the forward of one submodule",
        ) from None


def _refuse_flex_attention(name: str, error: Exception) -> None:
    """Refuses a unit that calls torch's flex attention, which runs neither on shapes nor under a dispatch mode."""
    if "flex_attention" in str(error) or "FlexAttention" in str(error):
        raise InputError(
            "part {name!r} calls flex_attention, which does not run without its values",
            name=name,
            remedy="let it call scaled_dot_product_attention (attn_implementation='sdpa' of Transformers), or cut the model by hand, as "
            "build(stage, num_stages)",
        ) from None


def _refuse_changed(name: str, leaves: list[Any], structure: pytree.TreeSpec, arguments: Any) -> None:
    """Refuses a unit that replaces a constant in its arguments, such as a counter in a dict."""
    after, structure_after = pytree.tree_flatten(arguments)
    if structure != structure_after or any(a is not b and not isinstance(a, Tensor) for a, b in zip(leaves, after, strict=True)):
        raise InputError(
            "part {name!r} changes a list or a dict among its arguments, which stages without this part would not see",
            name=name,
            remedy="let it return what others need",
        )


def _refuse_unfit(name: str, output: Any, *, reads_numbers: bool) -> None:
    """Refuses outputs that cannot be sent to another stage."""
    for leaf in pytree.tree_leaves(output):
        if reads_numbers and isinstance(leaf, (bool, int, float, complex)):
            raise InputError(
                "part {name!r} returns a Python number ({kind}) and reads values of tensors that other stages do not have",
                name=name,
                kind=type(leaf).__name__,
                remedy="let it return a tensor",
            )
        if isinstance(leaf, Iterator) or callable(leaf) or _holds_tensors(leaf):
            raise InputError(
                "part {name!r} returns a {kind}, which cannot be sent to other stages",
                name=name,
                kind=type(leaf).__name__,
                remedy="let it return tensors, or tuples, lists and dicts of them (or a dataclass registered with "
                "torch.export.register_dataclass)",
            )


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return False
    return any(isinstance(value, Tensor) for value in pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values())))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the live tensors created while a unit runs, and whether its code reads values.

    Raises `InputError` if the unit uses a parameter that it does not hold.
    """

    def __init__(self, name: str, unit: nn.Module, leaves: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_numbers = False
        self._operations = 0
        self._marks: list[int] = []
        self._name = name
        parameters = list(unit.parameters())
        self._held = (parameters, leaves)  # keeps ids unique
        self._own = {id(parameter) for parameter in parameters}
        self._memory = set(map(storage_of, parameters))
        self._given = {id(leaf) for leaf in leaves}  # in-place operations return their input
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_mark(func):
            self._marks.append(self._operations)
        else:
            self._operations += 1
        self._refuse_foreign(pytree.tree_leaves((args, kwargs)))
        self.reads_numbers = self.reads_numbers or func._overloadpacket is torch.ops.aten._local_scalar_dense
        output = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return output

    def _refuse_foreign(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.jagged:
                raise InputError(
                    "part {name!r} works on a jagged nested tensor, whose form zb.split cannot determine",
                    name=self._name,
                    remedy="let it work on padded tensors with a mask, or cut the model by hand, as build(stage, num_stages)",
                )
            if isinstance(leaf, nn.Parameter) and self._is_foreign(leaf):
                raise InputError(
                    "part {name!r} uses a parameter of shape {shape} that it does not hold, by a reference to another module; its "
                    "gradient would be lost in other stages",
                    name=self._name,
                    shape=list(leaf.shape),
                    remedy="pass it to the part as an argument, or let the part hold it",
                )

    def _is_foreign(self, parameter: nn.Parameter) -> bool:
        """Returns whether the unit does not hold `parameter`. A view of a parameter of a class of its own has that class."""
        return id(parameter) not in self._own and id(parameter) not in self._given and storage_of(parameter) not in self._memory

    def mark(self) -> str:
        """Returns where the unit calls `pipe_split()`; raises `InputError` for a call between its operations."""
        if any(0 < place < self._operations for place in self._marks):
            raise InputError(
                "part {name!r} calls pipe_split() between its operations, but a part cannot be cut",
                name=self._name,
                remedy="call it between parts, or leave it out and give zb.split(cuts=[...]) the first parts of stages, which "
                "may be parts of a block",
            )
        return "" if not self._marks else "before" if self._marks[0] == 0 else "behind"

    def left_outside_of(self, unit: nn.Module) -> list[Tensor]:
        """Returns the live tensors, except the arguments and the tensors that `unit` itself holds."""
        if not self._living(unit):
            return []
        gc.collect()
        return self._living(unit)

    def living(self) -> list[Tensor]:
        """Returns the live tensors, except the unit's arguments."""
        return [tensor for tensor in (ref() for ref in self._made) if tensor is not None and id(tensor) not in self._given]

    def _living(self, unit: nn.Module) -> list[Tensor]:
        living = self.living()
        if not living:
            return []
        leaves = [leaf for part in unit.modules() for leaf in pytree.tree_leaves(list(part.__dict__.values()))]
        leaves += [tensor for part in unit.modules() for _, tensor in state_of(part)]
        kept = {id(tensor) for leaf in leaves for tensor in (leaf, getattr(leaf, "_base", None))}  # a view keeps its base alive
        return [tensor for tensor in living if id(tensor) not in kept]


class _AttentionOfZeros(TorchFunctionMode):
    """Returns zeros for `scaled_dot_product_attention` of values that are zeros: its scores may take more memory than the machine has.

    The same call on the meta device gives the shape and counts the FLOPs.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        value = args[2] if len(args) > 2 else kwargs["value"]
        if is_traceable_wrapper_subclass(value) or value.any():
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, _meta, (args, dict(kwargs)))
        return untouched_zeros(func(*args, **kwargs))


def _with_tensors(unit: nn.Module, like: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of `unit` with replaced parameters and buffers that do not require grad. DTensors stay DTensors."""
    place = _place_of(unit)
    return copy_of(unit, other_tensors(unit, lambda tensor: like_parameter(tensor, like(local_part(tensor)).to(place))))


def _place_of(unit: nn.Module) -> torch.device:
    """Returns the device on which to run `unit` with values: the device of its DTensors, where torch moves operands, or else the CPU."""
    kinds = {tensor.device_mesh.device_type for tensor in (*unit.parameters(), *unit.buffers()) if isinstance(tensor, DTensor)}
    return of_kind(kinds.pop() if kinds else "cpu")


def _shape_of(leaf: Any) -> Any:
    return kind_of(leaf, lambda tensor: (tensor.shape, tensor.dtype))


def _meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _zeros(leaf: Any, place: torch.device) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=place) if isinstance(leaf, Tensor) else leaf


def _ones_or_zeros(tensor: Tensor) -> Tensor:
    """Returns ones for integers and buffers, such as the window of a Fourier transform, and zeros for masks and parameters."""
    is_zero = tensor.dtype == torch.bool or (isinstance(tensor, nn.Parameter) and tensor.is_floating_point())
    return untouched_zeros(tensor) if is_zero else torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")


def _known(leaf: Any, place: torch.device) -> Any:
    """Returns integer tensors unchanged, since every stage has the integers that come from no unit, and zeros for other tensors."""
    is_integer = isinstance(leaf, Tensor) and not leaf.is_floating_point()
    return leaf.detach().to(place, copy=True) if is_integer else _zeros(leaf, place)


def _integers(leaf: Any) -> Any:
    return None if not isinstance(leaf, Tensor) or leaf.is_floating_point() else leaf.numpy(force=True).tobytes()


def named_tensors_in(unit: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a unit with their names."""
    yield from unit.named_parameters(remove_duplicate=False)
    yield from unit.named_buffers(remove_duplicate=False)


def refuse_left(
    unit: str, left: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], held: Mapping[str, Tensor] | None = None
) -> None:
    """Raises `InputError` if a unit has `left` tensors elsewhere than in its output, such as in an argument or a `held` tensor."""
    if not left:
        return
    refuse_left_in_arguments(unit, left, args, kwargs)
    for name, tensor in (held or {}).items():
        for attribute, value in vars(tensor).items():
            if not {id(inner) for _, inner in tensors_inside(value)}.isdisjoint(map(id, left)):
                raise InputError(
                    f"{_LEAVES} in attribute {{attribute!r}} of its tensor {{name!r}}; {_WOULD_LACK}",
                    unit=unit,
                    attribute=attribute,
                    name=name,
                    remedy="assign it to an attribute of the module instead",
                )
    raise InputError(
        f"{_LEAVES} with a hook or a global variable that records them; {_WOULD_LACK}",
        unit=unit,
        remedy="switch that off (as output_router_logits, output_hidden_states and output_attentions of Transformers can be), or let the "
        "part return what others need",
    )


def refuse_left_in_arguments(unit: str, created: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `InputError` if an argument of a unit holds tensors that the unit has `created`."""
    wanted = set(map(id, created))
    for name, value in (*enumerate(args), *kwargs.items()):
        if any(id(tensor) in wanted for _, tensor in tensors_inside(value)):
            raise InputError(
                f"{_LEAVES} in its argument {{argument!r}}, which is of type {{kind}}; {_WOULD_LACK}",
                unit=unit,
                argument=name,
                kind=type(value).__name__,
                remedy="do not pass it to the part (use_cache=False of Transformers does so for most models), or let the part return what "
                "others need",
            )


_LEAVES = "part {unit!r} stores tensors elsewhere than in its output,"
_WOULD_LACK = "stages without this part would lack them"


_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Disables the memory reservation for the mapping (MAP_NORESERVE): a unit may be larger than this machine's memory."""


def untouched_zeros(like: Tensor) -> Tensor:
    """Returns zeros with real strides, as grouped products require. They take no memory while they are only read.

    `torch.zeros` may reuse freed memory, and would then write zeros to it.
    """
    size = like.numel() * like.element_size()
    if size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
