"""Where a model can be cut: its units, which belong to one stage each, and the modules around them, whose forward runs on every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from zerobubble.errors import InputError


class Units(NamedTuple):
    """The parts of a model by their names in it.

    `units` are run by the one stage that holds them: the items of lists of blocks, which are the `layers`, and every other module with
    parameters. `around` are the modules on the way to them, the model itself ("") among them, whose forward runs on every stage. What has
    no parameters is neither, and runs wherever it is called.
    """

    units: dict[str, nn.Module]
    around: frozenset[str]
    layers: frozenset[str]


def find_units(model: nn.Module) -> Units:
    """The units of `model`: it is cut between the items of its outermost lists of blocks (`ModuleList`, `Sequential`).

    Raises `InputError` for a module around them whose forward was replaced on the object.
    """
    around = frozenset({"", *_on_the_way("", model)})
    _refuse_replaced(model, around)
    units: dict[str, nn.Module] = {}
    known: set[nn.Module] = set()
    for name, unit in _units_in("", model, around):
        if unit not in known:  # one that has several names goes by the first
            known.add(unit)
            units[name] = unit
    lists = {name for name, module in model.named_modules() if name in around and _is_list_of_blocks(module)}
    return Units(units, around, frozenset(unit for unit in units if unit.rpartition(".")[0] in lists))


def _refuse_replaced(model: nn.Module, around: frozenset[str]) -> None:
    for name, module in model.named_modules():
        if name in around and "forward" in module.__dict__:
            raise InputError(
                f"the forward of {name or type(model).__name__!r} was replaced on the object (as hooks of accelerate do), and would run "
                "the whole model: give zb.split the model without that"
            )


def _on_the_way(name: str, module: nn.Module) -> set[str]:
    """The names of `module` and those in it that are lists of blocks, or have one in them; empty where there is none."""
    if name and _is_list_of_blocks(module):
        return {name}
    found: set[str] = set()
    for child_name, child in module.named_children():
        found |= _on_the_way(join(name, child_name), child)
    return found | {name} if found else found


def _is_list_of_blocks(module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    return is_list and sum(has_parameters(item) for item in module.children()) > 1


def _units_in(name: str, module: nn.Module, around: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = join(name, child_name)
        if full in around:
            yield from _units_in(full, child, around)
        elif has_parameters(child):
            yield full, child


def has_parameters(module: nn.Module) -> bool:
    """Whether `module` or anything in it has a parameter."""
    return next(module.parameters(), None) is not None


def join(name: str, child: str) -> str:
    """The name of `child` of the module of this name."""
    return f"{name}.{child}" if name else child
