"""Converts a program of `torch.export` back to modules with the model's names.

An exported program records the module of each operation, so its graph can be divided into the original modules again. The operations
between them are the code around the parts, which every stage runs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.unflatten import unflatten
from torch.utils import _pytree as pytree

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError

EXPORTED = Wanted("a program of torch.export", lambda value: isinstance(value, ExportedProgram))


def module_of(program: Any) -> nn.Module:
    """Returns the model of `program`, with its original parameters, their names, and its call signature.

    Raises `InputError` for a program that changes buffers: export moves such changes out of their modules.
    """
    changed = sorted(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise InputError(
            "the exported program changes buffer {buffer!r}, as for running statistics, and export has moved that out of its parts",
            buffer=changed[0],
            remedy="give zb.split the model itself, or export it in evaluation mode",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec", FutureWarning)  # torch 2.13 triggers its own deprecation
        parts = unflatten(program)
    for name, _ in list(parts.named_parameters(remove_duplicate=False)):  # copies of the exported model's
        path, _, attribute = name.rpartition(".")
        parts.get_submodule(path)._parameters[attribute] = program.state_dict[name]
    graph = torch.fx.GraphModule(parts, parts.graph, "Exported")
    taken, returned = program.call_spec.in_spec, program.call_spec.out_spec
    assert taken is not None
    assert returned is not None
    names: list[str] = list(taken.children()[1].context) if hasattr(taken, "children") else list(taken.children_specs[1].context)
    run = type(graph).forward  # the code between the parts

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in names if name in kwargs}))
        if structure != taken or len(kwargs) != len(names):
            raise InputError(
                "the exported program is called with {structure}, but was exported with {taken}",
                structure=_described(structure),
                taken=_described(taken),
                remedy="use the same structure",
            )
        return pytree.tree_unflatten(run(self, *leaves), returned)

    model: nn.Module = type("Exported", (nn.Module,), {"forward": forward})()  # a plain class, which supports deepcopy
    for held in ("_modules", "_parameters", "_buffers"):
        model.__dict__[held].update(graph.__dict__[held])
    return model


def example_of(program: Any) -> Any:
    """Returns the example arguments of a program, None if unknown or if it has both positional and named ones."""
    args, kwargs = program.example_inputs or ((), {})
    return None if args and kwargs else kwargs or args or None


def _described(structure: Any) -> str:
    """Describes the call signature of a program."""
    return str(pytree.tree_unflatten(["*"] * structure.num_leaves, structure))
