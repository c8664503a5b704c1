"""A model without parts, traced by torch.export: segments of operations are its parts, and parameters keep their names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from zerobubble.error_reports.text import describe
from zerobubble.errors import InputError
from zerobubble.models.making.tracing.calls import Calls
from zerobubble.models.making.tracing.segments import GraphSegment, cut_graph, graph_of
from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.operations import Operations
from zerobubble.models.observation.shape_only import untouched_zeros
from zerobubble.runtime.values.buffers import in_mode

_OPERATIONS, _BEFORE, _CONSTANTS = "operations", "without_parameters", "constants"
"""Attribute names in a traced model."""


class TracedModel(nn.Module):
    """A model as a list of operations. Created by `ModelTrace.over`."""

    def __init__(
        self, calls: Calls, plan: Sequence[tuple[str, GraphSegment]], before: GraphSegment, named: dict[int, str], args: list[int]
    ) -> None:
        super().__init__()
        self._calls = calls
        self._plan = tuple(plan)
        self._before = before
        self._named = named
        self._args = tuple(args)
        self._results: Sequence[tuple[bool, Any]] = ()
        """The model's output as a list: a value's place and True, or an object that is not computed and False."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values: dict[int, Any] = dict(zip(self._args, self._calls.leaves(args, kwargs), strict=True))
        values |= {place: reduce(getattr, name.split("."), self) for place, name in self._named.items()}
        for run, segment in ((_BEFORE, self._before), *self._plan):
            outputs = self.get_submodule(run)(*(values[place] for place in (*segment.parameters, *segment.inputs)))
            values.update(zip(segment.outputs, outputs, strict=True))
        return self._calls.result([values[leaf] if is_made else leaf for is_made, leaf in self._results])


class ModelTrace:
    """The result of torch.export: operations in segments, which can become the parts of any model with the same code."""

    def __init__(self, calls: Calls, programs: tuple[ExportedProgram, ExportedProgram], num_stages: int) -> None:
        self._calls = calls
        self._programs = programs
        self._nodes = [list(program.graph.nodes) for program in programs]
        self._names, self._constants = _named(programs[0])
        parameters = {node for node, spec in _placeholders(programs[0]) if spec.kind is InputKind.PARAMETER}
        self._before, segments = cut_graph(programs[0].graph, parameters, num_stages)
        self._plan = [(f"{_OPERATIONS}.{self._nodes[0][segment.nodes[0]].name}", segment) for segment in segments]

    @classmethod
    def from_model(cls, model: nn.Module, arguments: Arguments, num_stages: int) -> ModelTrace:
        """Traces the operations of `model` into segments for `num_stages` stages. Parameters may be on the meta device.

        Raises `InputError` if torch cannot trace it, and if its operations in training and in evaluation differ in more than constants.
        """
        name = type(model).__name__
        taken = [name_taken for name_taken in (_OPERATIONS, _BEFORE, _CONSTANTS) if hasattr(model, name_taken)]
        if taken:
            raise InputError(
                "it has an attribute {attribute!r}, a name reserved in traced models", attribute=taken[0], remedy="rename that attribute"
            )
        traced = _with_zeros(model)
        calls = Calls(name, traced.forward, *_at_least_two(arguments))
        try:
            training, evaluation = (_exported(traced, calls, training=mode) for mode in (model.training, False))
        except Exception as error:
            raise InputError(
                "torch.export, which might find places between its operations, cannot trace it: {reason}", reason=describe(error)[:300]
            ) from error
        _refuse_unlike(name, training, evaluation)
        _set_sizes(calls, training)
        return cls(calls, (training, evaluation), num_stages)

    def over(self, model: nn.Module) -> TracedModel:
        """Returns `model` as its operations, with its own parameters under their names."""
        nodes = self._nodes[0]
        place = {node: number for number, node in enumerate(nodes)}
        places = {place[node]: name for node, name in self._names.items()}
        traced = TracedModel(self._calls, self._plan, self._before, places, [place[node] for node in _user_inputs(self._programs[0])])
        _register_tensors(traced, model, self._constants)
        operations = {name.partition(".")[2]: self._operations(segment, model, places) for name, segment in self._plan}
        traced.add_module(_OPERATIONS, nn.ModuleDict(operations))
        traced.add_module(_BEFORE, graph_of(self._before, nodes, self._programs[0].graph_module))
        (results,) = nodes[-1].args
        traced._results = tuple((isinstance(result, Node), place[result] if isinstance(result, Node) else result) for result in results)
        traced.train(model.training)
        if hasattr(model, "config"):
            traced.config = model.config  # used to complete arguments
        return traced

    def _operations(self, segment: GraphSegment, model: nn.Module, places: dict[int, str]) -> Operations:
        of_modes = zip(self._nodes, self._programs, strict=True)
        training, evaluation = (graph_of(segment, nodes, program.graph_module) for nodes, program in of_modes)
        return Operations(training, evaluation, [model.get_parameter(places[number]) for number in segment.parameters])


def _with_zeros(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` with zeros without memory for meta parameters; `model` itself if it has none.

    Tracing reads no values, but records the device of new tensors.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    others: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        others[id(parameter)] = nn.Parameter(untouched_zeros(parameter), requires_grad=parameter.requires_grad)
    return copy_of(model, others)


def _at_least_two(arguments: Arguments) -> Arguments:
    """Doubles a batch of one: torch specializes sizes of 1."""
    leaves, structure = pytree.tree_flatten(arguments)
    if not all(leaf.dim() and leaf.shape[0] == 1 for leaf in leaves if isinstance(leaf, Tensor)):
        return arguments
    twice = [torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    doubled: Arguments = pytree.tree_unflatten(twice, structure)
    return doubled


def _exported(model: nn.Module, calls: Calls, *, training: bool) -> ExportedProgram:
    with in_mode(model.modules(), training), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch triggers its own warnings
        return torch.export.export(model, calls.args, calls.kwargs, dynamic_shapes=calls.any_sizes(), strict=False)


def _refuse_unlike(name: str, training: ExportedProgram, evaluation: ExportedProgram) -> None:
    ours, others = (
        [(node.op, None if node.op == "placeholder" else node.target) for node in program.graph.nodes] for program in (training, evaluation)
    )
    if ours != others:
        raise InputError(
            "the operations of {name} differ between training and evaluation, but the graph of torch.export has only one list of them",
            name=name,
            remedy="use modules such as nn.Dropout for the difference, or put its layers into modules of a ModuleList",
        )


def _set_sizes(calls: Calls, program: ExportedProgram) -> None:
    sizes = [_sizes(node.meta["val"]) for node in _user_inputs(program)]
    calls.set_sizes(sizes, dict(program.range_constraints), program.call_spec.out_spec)


def _sizes(value: Any) -> Sequence[Any]:
    """Returns the sizes of a tensor in a graph, as numbers and symbols."""
    return [size if isinstance(size, int) else size.node.expr for size in value.shape] if isinstance(value, Tensor) else ()


def _placeholders(program: ExportedProgram) -> list[tuple[Node, Any]]:
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return list(zip(nodes, program.graph_signature.input_specs, strict=True))


def _user_inputs(program: ExportedProgram) -> list[Node]:
    return [node for node, spec in _placeholders(program) if spec.kind is InputKind.USER_INPUT]


def _named(program: ExportedProgram) -> tuple[dict[Node, str], dict[str, Tensor]]:
    """Returns the names of the graph's inputs that belong to the model, and the graph's constants by name."""
    names: dict[Node, str] = {}
    constants: dict[str, Tensor] = {}
    for node, spec in _placeholders(program):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            names[node] = str(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            names[node] = f"{_CONSTANTS}.{len(constants)}"
            constants[str(len(constants))] = program.constants[str(spec.target)]
        elif spec.kind is not InputKind.USER_INPUT or not isinstance(node.meta["val"], (Tensor, type(None), int, float, bool, str)):
            name, kind = spec.target or node.name, spec.kind.name
            raise InputError("its graph takes {name!r} ({kind}), which stages cannot receive", name=name, kind=kind)
    return names, constants


def _register_tensors(traced: nn.Module, model: nn.Module, constants: dict[str, Tensor]) -> None:
    """Gives `traced` the parameters and buffers of `model` under all their names, and the constants of the graph."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, attribute = _owner(traced, name)
        owner.register_parameter(attribute, parameter)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            owner, _ = _owner(traced, f"{path}.{attribute}" if path else attribute)
            owner.register_buffer(attribute, buffer, persistent=attribute not in module._non_persistent_buffers_set)
    for attribute, tensor in constants.items():
        _owner(traced, f"{_CONSTANTS}.{attribute}")[0].register_buffer(attribute, tensor.detach(), persistent=False)


def _owner(owner: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that owns the tensor of this name, created if missing, and the tensor's name in it."""
    path, _, attribute = name.rpartition(".")
    for child in filter(None, path.split(".")):
        if child not in owner._modules:
            owner.add_module(child, nn.Module())
        owner = owner.get_submodule(child)
    return owner, attribute
