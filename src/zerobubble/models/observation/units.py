"""Where a model can be cut: its units, which belong to one stage each, and the modules around them, whose forward runs on every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zerobubble.errors import InputError
from zerobubble.models.observation.operations import Operations


class Units(NamedTuple):
    """The parts of a model by their names in it.

    `units` are run by the one stage that holds them: the items of lists of blocks, which are the `layers`, and every other module with
    parameters or running statistics. `around` are the modules on the way to them, the model itself ("") among them, whose forward runs on
    every stage. What has neither is no unit, and runs wherever it is called. Where a block is open, its parts are units and it is around
    them: `block_of` has the block of each.
    """

    units: dict[str, nn.Module]
    around: frozenset[str]
    layers: frozenset[str]
    block_of: Mapping[str, str] = MappingProxyType({})


def find_units(model: nn.Module, opened: Collection[str] = ()) -> Units:
    """The units of `model`: it is cut between the items of its outermost lists of blocks (`ModuleList`, `Sequential`).

    Blocks that are `opened`, by their names, are cut between their own parts, too. Raises `InputError` for a module around units whose
    forward was replaced on the object, for hooks on the model itself or an open block, and for an open block that is checkpointed.
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
    known = {module for name, module in model.named_modules(remove_duplicate=False) if name in around}
    for name, unit in _units_in("", model, around):
        if unit not in known:  # one that has several names goes by the first
            known.add(unit)
            units[name] = unit
    lists = {name for name, module in model.named_modules() if name in around and _is_list_of_blocks(module)}
    layers = frozenset(unit for unit in units if unit.rpartition(".")[0] in lists and unit not in block_of)
    return Units(units, around, layers, block_of)


def _without_later_names(model: nn.Module, around: frozenset[str]) -> frozenset[str]:
    """`around` without what is inside of modules that are units under an earlier name, as where a block has a second name."""
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
    """The blocks that must be open for `names` to be units."""
    return [unit for unit in units.units if any(name.startswith(f"{unit}.") for name in names)]


def _refuse_checkpointed(name: str, block: nn.Module) -> None:
    if getattr(block, "gradient_checkpointing", False):
        raise InputError(
            f"block {name!r} is checkpointed, so all of it runs again in the backward pass, and no stage has all of it if it is cut: cut "
            "between blocks, or switch checkpointing off"
        )


def _refuse_replaced(model: nn.Module, around: frozenset[str]) -> None:
    for name, module in model.named_modules():
        if name in around and "forward" in module.__dict__:
            raise InputError(
                f"the forward of {name or type(model).__name__!r} was replaced on the object (as hooks of accelerate do), and would run "
                "the whole model: give zb.split the model without that"
            )


def _refuse_compiled(model: nn.Module, around: frozenset[str]) -> None:
    for name, module in model.named_modules():
        if name in around and module._compiled_call_impl is not None:
            raise InputError(
                f"{f'module {name!r}' if name else 'the model given to zb.split'} was compiled by its compile() and holds parts of several "
                "stages, none of which runs all of it: compile each of its blocks by block.compile(), or let "
                "zb.Pipeline(split='compiled') compile the stages"
            )


def _refuse_hooks(model: nn.Module) -> None:
    hooks = [name for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks") if getattr(model, name)]
    if hooks:
        raise InputError(
            f"the {type(model).__name__} given to zb.split has hooks of its own ({', '.join(name.strip('_') for name in hooks)}), which "
            "would run on every stage; put them on its parts, or do their work in loss_fn"
        )


def _on_the_way(name: str, module: nn.Module, *, is_open: bool = False) -> set[str]:
    """The names of `module` and those in it that are lists of blocks, or have one in them; empty where there is none."""
    if name and not is_open and _is_list_of_blocks(module):
        return {name}
    found: set[str] = set()
    for child_name, child in module.named_children():
        found |= _on_the_way(join(name, child_name), child)
    return found | {name} if found else found


def _opened(name: str, module: nn.Module, on_the_way: set[str]) -> Iterator[str]:
    """The names of what is `on_the_way`, and of what is met there that nobody can call: a list of lists, a list of parameters."""
    for child_name, child in module.named_children():
        full = join(name, child_name)
        if full in on_the_way or (_belongs_somewhere(child) and not _is_callable(child)):
            yield full
            yield from _opened(full, child, on_the_way)


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_list_of_blocks(module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    return is_list and sum(has_parameters(item) for item in module.children()) > 1


def _units_in(name: str, module: nn.Module, around: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = join(name, child_name)
        if full in around:
            yield from _units_in(full, child, around)
        elif _belongs_somewhere(child):
            yield full, child


def has_parameters(module: nn.Module) -> bool:
    """Whether `module` or anything in it has a parameter."""
    return next(module.parameters(), None) is not None


def _belongs_somewhere(module: nn.Module) -> bool:
    """Whether one stage alone may run `module`.

    It has parameters, is given them by a traced model, or changes buffers in training, as batch norms without parameters do.
    """
    return has_parameters(module) or any(
        isinstance(part, Operations) or (isinstance(part, _NormBase) and part.track_running_stats) for part in module.modules()
    )


def join(name: str, child: str) -> str:
    """The name of `child` of the module of this name."""
    return f"{name}.{child}" if name else child
