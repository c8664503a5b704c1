"""A program of `torch.export` in the place of a model: its graph, put back into modules of the model's names.

Torch keeps of an exported model which module each operation came from, so its parts are there again, each with its part of the graph. What
is left between them is the code around the parts, which every stage runs.
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

EXPORTED = Wanted("a program of torch.export", lambda given: isinstance(given, ExportedProgram))


def module_of(program: Any) -> nn.Module:
    """The model of `program`, with its parameters under their names, called as it was when it was exported.

    Raises `InputError` for a program that changes buffers, which torch has taken out of its parts.
    """
    changed = sorted(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise InputError(
            f"the exported program changes buffer {changed[0]!r}, as for running statistics, and torch has taken that out of its parts: "
            "give zb.split the model itself, or export it in evaluation mode"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec", FutureWarning)  # torch 2.13 copies what it deprecates
        parts = unflatten(program)
    graph = torch.fx.GraphModule(parts, parts.graph, "Exported")
    taken, given = program.call_spec.in_spec, program.call_spec.out_spec
    assert taken is not None
    assert given is not None
    names: list[str] = list(taken.children()[1].context) if hasattr(taken, "children") else list(taken.children_specs[1].context)
    run = type(graph).forward  # the code of the graph between the parts, as a function

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, {name: kwargs[name] for name in names if name in kwargs}))
        if structure != taken or len(kwargs) != len(names):
            raise InputError(f"the exported program is called with {_told(structure)}, and was exported with {_told(taken)}: call it alike")
        return pytree.tree_unflatten(run(self, *leaves), given)

    model: nn.Module = type("Exported", (nn.Module,), {"forward": forward})()  # of a plain class, which can be copied
    for held in ("_modules", "_parameters", "_buffers"):
        model.__dict__[held].update(graph.__dict__[held])
    return model


def example_of(program: Any) -> Any:
    """The arguments with which a program was exported, None where it does not tell, or where both positional and named ones are given."""
    args, kwargs = program.example_inputs or ((), {})
    return None if args and kwargs else kwargs or args or None


def _told(structure: Any) -> str:
    """How a program is called, in words."""
    return str(pytree.tree_unflatten(["*"] * structure.num_leaves, structure))
