"""Runs code of the user on one rank of a pipeline, or more often than the user wrote it, without effects on the rest of the run.

Its collectives would wait for ranks that never call them: they are refused at once. Its changes of plain attributes are counted or undone.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.whole_model import replaced
from zerobubble.runtime.frameworks import Items, Place

CONTAINERS = (list, dict, set)
COLLECTIVES = tuple(
    name
    for name in (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
    )
    if hasattr(dist, name)
)


@contextmanager
def collectives_refused(name: str, ranks: set[int], num_processes: int, remedy: str) -> Iterator[None]:
    """A context in which collectives of this thread that other `ranks` would have to join raise `InputError`.

    Args:
        name: The function of the user that runs inside.
        ranks: The ranks of the pipeline.
        num_processes: The size of the world for this thread.
        remedy: What to call instead.
    """
    thread = threading.get_ident()
    module: ModuleType = dist.distributed_c10d
    originals = {collective: getattr(module, collective) for collective in COLLECTIVES}

    def refusing(collective: str) -> Callable[..., Any]:
        original = originals[collective]

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                group = inspect.signature(original).bind(*args, **kwargs).arguments.get("group")
                members = set(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
                if (members & ranks) - {dist.get_rank()}:
                    raise InputError(
                        "{name} calls torch.distributed.{collective} among ranks {got} at {place}, which only rank {rank} reaches, for one "
                        "microbatch: it would wait forever",
                        name=name,
                        collective=collective,
                        got=sorted(members),
                        place=_place_of_caller(),
                        rank=dist.get_rank(),
                        remedy=remedy,
                    )
            return original(*args, **kwargs)

        return call

    world_size = module.get_world_size

    def get_world_size(group: Any = None) -> int:
        is_of_user = threading.get_ident() == thread and group is None
        return num_processes if is_of_user else world_size(group)

    instead = {collective: refusing(collective) for collective in COLLECTIVES} | {"get_world_size": get_world_size}
    with replaced(dist, **instead), replaced(module, **instead):
        yield


def _place_of_caller() -> str:
    """Returns the file and line in the innermost code that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "/zerobubble/", "/accelerate/")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def numbers_of(owner: Any) -> dict[str, float]:
    """Returns the attributes of an object that are numbers."""
    return {name: value for name, value in vars(owner).items() if type(value) in (int, float)}


def name_of_change(name: str, place: Place) -> str:
    """Returns how an error names what has changed: of a list, the list."""
    return place.path if isinstance(place, Items) else name


@contextmanager
def unchanged(owner: Any, skipped: tuple[str, ...]) -> Iterator[list[str]]:
    """A context that undoes changes of the plain attributes of an object: numbers, strings, and lists, dicts and sets of anything.

    Yields a list, which at the end has the names of the attributes that have changed and are not numbers or strings. Attributes that are
    `skipped`, such as data sets, are not looked at.
    """
    before = {name: (value, _copied(value), getattr(value, "_version", 0)) for name, value in _plain_attributes(owner, skipped)}
    changed: list[str] = []
    try:
        yield changed
    finally:
        now = dict(_plain_attributes(owner, skipped))
        for name, value in now.items():
            old, copy, version = before.get(name, (None, None, 0))
            if isinstance(value, (Tensor, *CONTAINERS)) and not (_is_same(value, copy) and getattr(value, "_version", 0) == version):
                changed.append(name)
            if name not in before:
                del vars(owner)[name]
            elif isinstance(old, CONTAINERS) and not _is_same(old, copy):
                _restore(old, copy)
        vars(owner).update({name: old for name, (old, _, _) in before.items()})


def _plain_attributes(owner: Any, skipped: tuple[str, ...]) -> list[tuple[str, Any]]:
    kinds = (bool, int, float, str, Tensor, *CONTAINERS)
    return [(name, value) for name, value in vars(owner).items() if name not in skipped and (value is None or isinstance(value, kinds))]


def _copied(value: Any) -> Any:
    """Returns a copy of nested containers with the same leaves."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return set(value) if isinstance(value, set) else value


def _is_same(value: Any, copy: Any) -> bool:
    if isinstance(value, dict) and isinstance(copy, dict):
        return list(value) == list(copy) and all(_is_same(value[key], copy[key]) for key in value)
    if isinstance(value, list) and isinstance(copy, list):
        return len(value) == len(copy) and all(_is_same(item, other) for item, other in zip(value, copy, strict=True))
    return value == copy if isinstance(value, set) and isinstance(copy, set) else value is copy


def _restore(value: Any, copy: Any) -> None:
    """Gives a container the items of its copy, in place."""
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, set):
        value.clear()
        value.update(copy)
    else:
        for key in [key for key in value if key not in copy]:
            del value[key]
        for key, item in copy.items():
            if isinstance(value.get(key), CONTAINERS) and type(item) in CONTAINERS:
                _restore(value[key], item)
            else:
                value[key] = item
