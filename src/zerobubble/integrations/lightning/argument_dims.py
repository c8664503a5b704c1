"""Which arguments of a network have a row for each sample, and which ones all samples share.

A table with as many rows as the batch has samples looks like samples. `training_step` of a LightningModule answers: for a microbatch, it
passes a table whole, and samples cut. Elsewhere the network answers: the output of a sample does not depend on the rows of other samples.
So the batch runs as one microbatch, and again for each argument, with other rows in its second half. If the outputs of the first half
change, all samples share the argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zerobubble as zb
from zerobubble.arguments import bound
from zerobubble.errors import InputError
from zerobubble.integrations.batches import Dims, cut, num_samples
from zerobubble.integrations.lightning.comparison import tolerance_of
from zerobubble.integrations.whole_model import replaced
from zerobubble.integrations.whole_outputs import WholeOutputs

Key = tuple[str, tuple[int, ...]]
"""The name of an argument, and the numbers of dimensions of its tensors."""
Found = dict[str, int | None]
"""The batch dimensions of arguments by name; None for an argument that all samples share."""


class Effect(StrEnum):
    """What changes with later rows of an argument: the outputs of earlier samples, or only those of later samples, or nothing."""

    ON_OTHERS = "others"
    ON_ITS_OWN = "its own"
    NONE = "none"


@dataclass(frozen=True)
class Call:
    """A call of a network.

    Attributes:
        arguments: The arguments, in a form that a pipeline takes: a tensor, a tuple or a dict.
        named: The same by name. Those of `*args` have the numbers of their places.
    """

    arguments: Any
    named: Mapping[str, Any]

    @classmethod
    def of(cls, network: nn.Module, arguments: Any) -> Call:
        """Returns the call of `network` with these arguments."""
        if isinstance(arguments, Mapping):
            return cls(arguments, arguments)
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        parameters = list(inspect.signature(type(network).forward).parameters.values())[1:]
        names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return cls(arguments, dict(zip((*names, *map(str, range(len(names), len(values)))), values, strict=False)))

    def microbatches(self, count: int, dims: Dims) -> list[Any]:
        """Returns the arguments of each of `count` microbatches."""
        return [self._in_form(part) for part in cut(dict(self.named), count, dims)[0]]

    def altered(self, names: Iterable[str], samples: int) -> Any:
        """Returns the arguments, where those with `names` have copies of earlier rows in place of later rows: values that may occur."""
        return self._in_form({name: _with_copied_rows(of, samples) if name in names else of for name, of in self.named.items()})

    def has_alike_rows(self, name: str, samples: int) -> bool:
        """Returns whether `altered` changes nothing in an argument, such as a mask of ones."""
        pairs = zip(_tensors(self.named[name]), _tensors(_with_copied_rows(self.named[name], samples)), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    def _in_form(self, named: Mapping[str, Any]) -> Any:
        return named if isinstance(self.arguments, Mapping) else tuple(named.values())


def call_arguments(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
    """Returns the arguments of a call of `network` in a form that a pipeline takes: a tuple, or a dict if any has a name.

    Raises `InputError` if the network cannot be called so, or takes some only by position and others only by name.
    """
    if not (args and kwargs):
        return kwargs or args
    signature = inspect.signature(MethodType(type(network).forward, network))
    call = inspect.BoundArguments(signature, bound(type(network).__name__, signature, args, kwargs))
    kinds = {name: signature.parameters[name].kind for name in call.arguments}
    unnamed = [name for name, kind in kinds.items() if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)]
    if unnamed and call.kwargs:
        raise InputError(
            "{module} is called with {got} by name, and its forward takes {unnamed} by position only",
            module=type(network).__name__,
            got=", ".join(call.kwargs),
            unnamed=", ".join(unnamed),
            remedy=f"let forward take {', '.join(unnamed)} by name, and pass all arguments by name",
        )
    if unnamed:
        return call.args
    further = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
    named = {name: value for name, value in call.arguments.items() if name not in further}
    return named | {key: value for name in further for key, value in call.arguments[name].items()}


class ArgumentDims:
    """The batch dimensions of the arguments of a network.

    Args:
        given: `batch_dims` of the user.
        share: Returns, on all ranks of the pipeline, what the rank of the last stage has found.
    """

    def __init__(self, given: Dims, share: Callable[[Any], Any]) -> None:
        self._given = given
        self._share = share
        self._known: dict[Key, int | None] = {}

    def learn(self, whole: Call, part: Call, samples: int, size: int) -> None:
        """Learns from the call for a batch of so many `samples`, and from the call for its microbatch of this `size`."""
        if size == samples:
            return
        for name in whole.named.keys() & part.named.keys():
            tensors, others = (_tensors(call.named[name]) for call in (whole, part))
            key = _key(name, whole.named[name])
            self._known.pop(key, None)
            if key == _key(name, part.named[name]):
                dims = {_dim_cut(a.shape, b.shape, samples, size) for a, b in zip(tensors, others, strict=True)}
                if len(dims) == 1 and dims != {-1}:
                    self._known[key] = dims.pop()

    def required(self, pipe: zb.Pipeline, call: Call, samples: int, *, again: bool) -> Found:
        """Returns the batch dimensions for a batch of so many `samples`. Every rank calls it.

        With `again`, what the network has shown is compared anew. Raises `InputError` if it does not show the dimensions, or others.
        """
        found = self._of(pipe, call, samples, again=again)
        if found is None:
            raise _unclear([name for name in self._open(call, {}) if samples in _sizes(call, [name], {})], samples)
        return found

    def evaluate(self, pipe: zb.Pipeline, outputs: WholeOutputs, call: Call, most: int) -> Any:
        """Returns the output of a batch, in at most so many microbatches; in one if it is not known which arguments are cut."""
        dims = self._of(pipe, call, None) if most > 1 else None
        samples = 1 if dims is None else num_samples(dict(call.named), dims)
        with with_batch_dims(pipe, dims or {}):
            return outputs.of(pipe, call.arguments, samples, min(samples, most))

    def _of(self, pipe: zb.Pipeline, call: Call, samples: int | None, *, again: bool = False) -> Found | None:
        """Returns the batch dimensions, or None if the network does not show them. `samples` is None if it is not known."""
        dims = self._declared(call, again=again)
        sizes = _sizes(call, dims, dims)
        samples = min(sizes) if samples is None and len(sizes) == 1 else samples
        names = self._open(call, dims)
        if samples is not None:
            dims |= dict.fromkeys(_of_other_sizes(call, names, samples))
        names = [name for name in names if name not in dims]
        is_alone = not sizes and len(_tensors([call.named[name] for name in names])) == 1  # then nothing else has the samples
        shown: Found | None = self._shown(pipe, call, names, samples) if names and not is_alone else dict.fromkeys(names, 0)
        if shown is None:
            return None
        self._keep(call, shown, samples or 0)
        return dims | shown

    def _declared(self, call: Call, *, again: bool) -> Found:
        """Returns the batch dimensions that are given and, unless they do not fit or are found out `again`, known from other calls."""
        given = {name: dim for name, dim in self._given.items() if name in call.named}
        keys = {} if again else {name: _key(name, value) for name, value in call.named.items()}
        known = {name: self._known[key] for name, key in keys.items() if key in self._known}
        return given if len(_sizes(call, known, known | given)) > 1 else known | given

    def _keep(self, call: Call, shown: Found, samples: int) -> None:
        """Keeps what the network has shown. Raises `InputError` if it has shown something else before."""
        dims = {name: (_key(name, call.named[name]), dim) for name, dim in shown.items()}
        if wrong := [name for name, (key, dim) in dims.items() if self._known.get(key, dim) != dim]:
            raise _unclear(wrong, samples)
        self._known |= dict(dims.values())

    def _open(self, call: Call, dims: Found) -> list[str]:
        """Returns the names of arguments whose batch dimensions are neither given nor known."""
        return [name for name in call.named if name not in dims and name not in self._given and _sizes(call, [name], {})]

    def _shown(self, pipe: zb.Pipeline, call: Call, names: list[str], samples: int | None) -> Found | None:
        """Returns the batch dimensions of the arguments with these `names`, which outputs show; None if they do not."""

        def output(altered: Iterable[str]) -> Any:
            return pipe.eval_step([call.altered(altered, samples or 0)], num_microbatches=1)[1]

        def effect(name: str) -> Effect:
            other = output([name])
            return Effect(self._share(None if other is None else _effect_on(base, other, samples or 0)))

        with torch.no_grad():
            base = output(())
            if samples is None:
                samples = self._share(None if base is None else _rows_of(base, _sizes(call, names, {})))
            if not samples:
                return None
            shared = _of_other_sizes(call, names, samples)
            alike = [name for name in names if name not in shared and call.has_alike_rows(name, samples)]
            effects = {name: effect(name) for name in names if name not in (*shared, *alike)}
        depends = [name for name, on in effects.items() if on is Effect.ON_OTHERS]
        is_clear = Effect.NONE not in effects.values() and (not depends or len(depends) < len(effects))
        has_one_each = len(_tensors([call.named[name] for name in depends])) <= len(depends)
        return {name: None if name in (*shared, *depends) else 0 for name in names} if is_clear and has_one_each else None


def with_batch_dims(pipe: zb.Pipeline, dims: Dims) -> AbstractContextManager[None]:
    """Returns a context in which a pipeline cuts the arguments with these names along these dimensions."""
    options = pipe._options
    others = {name: dim for name, dim in dims.items() if dim != 0}
    return replaced(pipe, _options=replace(options, batch_dims={**(options.batch_dims or {}), **others}))


def _unclear(names: list[str], samples: int) -> InputError:
    """Returns the error of arguments of which it is not clear whether all samples share them."""
    return InputError(
        "the network gets {places} with {got} rows, as many as the batch has samples, and its outputs do not show whether all samples "
        "share them",
        places=", ".join(names),
        got=samples,
        remedy=f"give PipelineStrategy(batch_dims={dict.fromkeys(names)}), with None for an argument that all samples share, and 0 for one "
        "with a row for each sample",
    )


def _with_copied_rows(value: Any, samples: int) -> Any:
    def rows(tensor: Tensor) -> Tensor:
        half = samples // 2
        return torch.cat((tensor[:half], tensor[: samples - half])) if tensor.ndim and len(tensor) == samples else tensor

    return pytree.tree_map_only(Tensor, rows, value)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim]


def _key(name: str, value: Any) -> Key:
    return name, tuple(tensor.ndim for tensor in _tensors(value))


def _sizes(call: Call, names: Iterable[str], dims: Dims) -> set[int]:
    """Returns the sizes, other than 1, of the tensors of these arguments in their batch dimensions, by default the first."""
    pairs = [(tensor, dims.get(name, 0)) for name in names for tensor in _tensors(call.named[name])]
    return {tensor.shape[dim] for tensor, dim in pairs if dim is not None and dim < tensor.ndim} - {1}


def _of_other_sizes(call: Call, names: Iterable[str], samples: int) -> list[str]:
    """Returns the names of the arguments of which no tensor has so many `samples`."""
    return [name for name in names if samples not in _sizes(call, [name], {})]


def _dim_cut(whole: torch.Size, part: torch.Size, samples: int, size: int) -> int | None:
    """Returns the dimension in which a tensor of a batch is cut for a microbatch; None if it is not cut, -1 if it differs otherwise."""
    is_cut = [a != b and a * size == b * samples for a, b in zip(whole, part, strict=True)]
    return None if whole == part else is_cut.index(True) if any(is_cut) else -1


def _effect_on(output: Any, other: Any, samples: int) -> str:
    """Returns the effect of other rows in the second half of an argument."""
    pairs = [pair for pair in zip(*map(pytree.tree_leaves, (output, other)), strict=True) if isinstance(pair[0], Tensor)]
    for one, two in pairs:
        dim = one.shape.index(samples) if samples in one.shape else None
        if dim is not None and not _are_near(*(tensor.narrow(dim, 0, samples // 2) for tensor in (one, two))):
            return Effect.ON_OTHERS
    return Effect.NONE if all(_are_near(one, two) for one, two in pairs) else Effect.ON_ITS_OWN


def _are_near(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=tolerance_of(one) * float(one.abs().max()), equal_nan=True)


def _rows_of(output: Any, sizes: set[int]) -> int:
    """Returns the size, one of `sizes`, that the first dimension of all outputs has; 0 if there is none."""
    found = {len(tensor) for tensor in _tensors(output)}
    return found.pop() if len(found) == 1 and found <= sizes else 0
