"""The cache of keys and values through which decoders of Transformers run over slices of a sequence.

A decoder puts its keys and values into a cache, gets the whole sequence's back, and makes positions and masks of this length. This cache
joins the keys and values of slices, and so carries their gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.stage.slices import is_in_slices, join, tokens_before

CACHE, MASK = "past_key_values", "attention_mask"
"""The arguments of a decoder with its cache, and with the mask of the whole sequence so far."""


class SliceArguments:
    """Adds to the arguments of a model what its code needs to run over slices; one for each stage."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._takes_cache = hasattr(kind, "config_class") and CACHE in inspect.signature(kind.forward).parameters
        self._cache: Any = None
        self._mask = nn.Module()

    def completed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with a cache of earlier slices, and a mask that covers these; unchanged outside of slices."""
        if not self._takes_cache or not is_in_slices():
            return args, kwargs
        if kwargs.get(CACHE) is not None:
            message = "{argument} has keys of earlier tokens, which slices of a sequence keep themselves"
            raise InputError(message, argument=CACHE, remedy="leave it out")
        if model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            message = "gradient checkpointing of Transformers gives layers no cache, which slices of a sequence need"
            raise InputError(message, remedy="call gradient_checkpointing_disable(), and let a schedule with R passes recompute")
        if self._cache is None:
            self._cache = _kind()()
        self._cache.begin(_length(args, kwargs))
        mask = kwargs.get(MASK)
        joined = {MASK: join(self._mask, mask, 1)} if isinstance(mask, Tensor) and mask.dim() == 2 else {}
        return args, {**kwargs, **joined, CACHE: self._cache}

    def without_cache(self, output: Any) -> Any:
        """Returns the output of the model without the cache that `completed` has added."""
        if self._cache is None or not isinstance(output, Mapping) or output.get(CACHE) is not self._cache:
            return output
        return type(output)(**{name: value for name, value in output.items() if name != CACHE})


def _length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = (*args, *(kwargs.get(name) for name in ("input_ids", "inputs_embeds")))
    return next(int(tensor.shape[1]) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim() > 1)


@cache
def _kind() -> type[Any]:
    """Returns the class of the cache. Transformers is loaded already, since a model of it is cut."""
    from transformers import Cache

    class SliceCache(Cache):  # type: ignore[misc]
        is_compileable = False
        is_sliding = ()
        is_initialized = True

        def __init__(self) -> None:
            super().__init__(layers=[])
            self._start = 0
            self._counter = nn.Module()
            self._joined: dict[tuple[int, int], nn.Module] = {}

        def begin(self, length: int) -> None:
            """Begins a slice of `length` tokens."""
            self._start = tokens_before(self._counter, length)

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            keys, values = (self._joined.setdefault((layer_idx, which), nn.Module()) for which in (0, 1))
            return join(keys, key_states, -2), join(values, value_states, -2)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self._start

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return self._start

        def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
            tokens = query_length if isinstance(query_length, int) else int(query_length.shape[0])
            return self._start + tokens, 0

    return SliceCache
