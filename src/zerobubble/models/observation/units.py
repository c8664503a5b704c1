"""Divides a model into units, which belong to one stage each, and the modules around them, whose forward runs on every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zerobubble.errors import InputError
from zerobubble.models.observation.operations import Operations


class Units(NamedTuple):
    """The units of a model, by name.

    `units` run on the one stage that holds them: the items of lists of blocks, which are the `layers`, and every other module with
    parameters or running statistics. `around` are their ancestors, including the model itself (""), whose forward runs on every stage.
    Modules without parameters or running statistics are not units, and run wherever they are called. The parts of an opened block are
    units, and the block is around them: `block_of` has the block of each.
    """

    units: dict[str, nn.Module]
    around: frozenset[str]
    layers: frozenset[str]
    block_of: Mapping[str, str] = MappingProxyType({})


def find_units(model: nn.Module, opened: Collection[str] = ()) -> Units:
    """Finds the units of `model`: it can be cut between the items of its outermost lists of blocks (`ModuleList`, `Sequential`).

    Blocks in `opened`, by name, can also be cut between their own parts. Raises `InputError` if a module around units has a `forward` that
    was replaced on the instance, if the model itself or an opened block has hooks, or if an opened block is checkpointed.
    """
    around = frozenset({"", *_opened("", model, _on_the_way("", model))})
    block_of: dict[str, str] = {}
    for name in opened:
        block = model.get_submodule(name)
        inside = around | {name, *_opened(name, block, _on_the_way(name, block, is_open=True))}
        parts = [part for part, _ in _units_in(name, block, inside)]
        if len(parts) > 1:
            _refuse_checkpointed(name, block)
            _refuse_hooks(block)
            around = inside
            block_of |= dict.fromkeys(parts, name)
    around = _without_later_names(model, around)
    _refuse_replaced(model, around)
    _refuse_compiled(model, around)
    _refuse_hooks(model)
    units: dict[str, nn.Module] = {}
    seen = {module for name, module in model.named_modules(remove_duplicate=False) if name in around}
    for name, unit in _units_in("", model, around):
        if unit not in seen:  # a unit with several names uses the first
            seen.add(unit)
            units[name] = unit
    lists = {name for name, module in model.named_modules() if name in around and _is_list_of_blocks(module)}
    layers = frozenset(unit for unit in units if unit.rpartition(".")[0] in lists and unit not in block_of)
    return Units(units, around, layers, block_of)


def _without_later_names(model: nn.Module, around: frozenset[str]) -> frozenset[str]:
    """Removes from `around` the descendants of modules that are units under an earlier name, such as a block with two names."""
    unit_names: dict[nn.Module, str] = {}
    for name, unit in _units_in("", model, around):
        unit_names.setdefault(unit, name)
    closed: set[str] = set()
    names_before: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name in around and unit_names.get(module) in names_before:
            closed.add(name)
        names_before.add(name)
    inside = tuple(f"{name}." for name in closed)
    return frozenset(name for name in around if name not in closed and not name.startswith(inside))


def blocks_around(names: Collection[str], units: Units) -> list[str]:
    """Returns the blocks that must be opened for `names` to be units."""
    return [unit for unit in units.units if any(name.startswith(f"{unit}.") for name in names)]


def _refuse_checkpointed(name: str, block: nn.Module) -> None:
    if getattr(block, "gradient_checkpointing", False):
        raise InputError(
            "block {name!r} is checkpointed, so the backward pass recomputes all of it, but no stage has all of a cut block",
            name=name,
            remedy="cut between blocks, or switch checkpointing off",
        )


def _refuse_replaced(model: nn.Module, around: frozenset[str]) -> None:
    for name, module in model.named_modules():
        if name in around and "forward" in module.__dict__:
            raise InputError(
                "the forward of {model!r} was replaced on the instance (as by hooks of accelerate), and would run the whole model",
                model=name or type(model).__name__,
                remedy="give zb.split the model without that",
            )


def _refuse_compiled(model: nn.Module, around: frozenset[str]) -> None:
    for name, module in model.named_modules():
        if name in around and module._compiled_call_impl is not None:
            raise InputError(
                "{module} was compiled by its compile() and holds parts of several stages, none of which runs all of it",
                module=f"module {name!r}" if name else "the model given to zb.split",
                remedy="compile each of its blocks by block.compile(), or let zb.Pipeline(split='compiled') compile the stages",
            )


def _refuse_hooks(model: nn.Module) -> None:
    hooks = [name for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks") if getattr(model, name)]
    if hooks:
        raise InputError(
            "the {model} given to zb.split has hooks ({hooks}), which would run on every stage",
            model=type(model).__name__,
            hooks=", ".join(name.strip("_") for name in hooks),
            remedy="register them on its parts, or do their work in loss_fn",
        )


def _on_the_way(name: str, module: nn.Module, *, is_open: bool = False) -> set[str]:
    """Returns the names of `module` and its descendants that are or contain lists of blocks."""
    if name and not is_open and _is_list_of_blocks(module):
        return {name}
    names: set[str] = set()
    for child_name, child in module.named_children():
        names |= _on_the_way(join(name, child_name), child)
    return names | {name} if names else names


def _opened(name: str, module: nn.Module, on_the_way: set[str]) -> Iterator[str]:
    """Yields the names in `on_the_way`, and of containers there that cannot be called, such as a list of lists or of parameters."""
    for child_name, child in module.named_children():
        full = join(name, child_name)
        if full in on_the_way or (belongs_somewhere(child) and type(child).forward is nn.Module.forward):
            yield full
            yield from _opened(full, child, on_the_way)


def _is_list_of_blocks(module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    return is_list and sum(has_parameters(item) for item in module.children()) > 1


def _units_in(name: str, module: nn.Module, around: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = join(name, child_name)
        if full in around:
            yield from _units_in(full, child, around)
        elif belongs_somewhere(child):
            yield full, child


def modules_outside(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    """Returns the modules that are neither units nor inside of one, by their first names."""
    inside = {part for unit in units.units.values() for part in unit.modules()}
    return {name: module for name, module in model.named_modules() if name in units.around or module not in inside}


def has_parameters(module: nn.Module) -> bool:
    """Returns whether `module` or a descendant has a parameter."""
    return next(module.parameters(), None) is not None


def belongs_somewhere(module: nn.Module) -> bool:
    """Returns whether only one stage may run `module`.

    True if it has parameters, receives them from a traced model, or changes buffers in training, as a batch norm does.
    """
    return has_parameters(module) or any(
        isinstance(part, Operations) or (isinstance(part, _NormBase) and part.track_running_stats) for part in module.modules()
    )


def join(name: str, child: str) -> str:
    """Returns the qualified name of `child` in the module `name`."""
    return f"{name}.{child}" if name else child
