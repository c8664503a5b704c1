"""Converts a `Pipe` of torch.distributed.pipelining to stages.

PyTorch's tracer creates a graph for each stage, with parameters under the model's names. It copies a parameter that several stages use, and
trains the copies separately; here they are tied. Training-mode operations in a graph, such as dropout, are refused in evaluation. A
structured output, such as a dict, becomes a tuple of its leaves, and a single leaf is returned directly, as in PyTorch's own stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.pipelining import Pipe
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError
from zerobubble.runtime.stage.cut_model import note_model

PIPE = Wanted("a Pipe of torch.distributed.pipelining", lambda value: isinstance(value, Pipe))
_PREFIX = "_zb_"
"""Prefix of the names of values sent between stages, to avoid clashes with arguments of the Pipe."""
_MODES = ("train", "training", "use_input_stats")
"""Names of the arguments of torch operations that select training mode."""


class PipeStages:
    """The stages of `pipe`. A call with a stage and the number of stages, such as by `zb.Pipeline`, returns the module of that stage."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._nodes: list[Node] = list(pipe.split_gm.graph.nodes)
        calls = [node for node in self._nodes if node.op == "call_module"]
        if pipe.has_loss_and_backward or len(calls) != pipe.num_stages:
            raise InputError(
                "zb.split takes a Pipe whose stages are called once each, without its own loss", remedy="give loss_fn to zb.Pipeline"
            )
        self._names = [str(node.target) for node in calls]
        home = {node: stage for stage, node in enumerate(calls)}
        self._stage_of: dict[Node, int] = {}
        for node in self._nodes:
            self._stage_of[node] = home.get(node, max((self._stage_of[source] for source in node.all_input_nodes), default=0))

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """Returns the module of `stage`; raises `InputError` if the Pipe does not have `num_stages` stages."""
        self._refuse_other(num_stages)
        steps = [node for node in self._nodes if self._stage_of[node] == stage and node.op not in ("placeholder", "output")]
        later = self._used_later(stage)
        result: Any = self._nodes[-1].args[0] if stage == num_stages - 1 else None
        result = result[0] if isinstance(result, tuple) and len(result) == 1 else result
        inputs = [node.name for node in self._nodes if node.op == "placeholder"]
        module = _PipeStage(self._graph_of(stage), steps, later, result, inputs, stage)
        note_model(module, [self._pipe.split_gm.get_submodule(name) for name in self._names])
        return module

    def _graph_of(self, stage: int) -> GraphModule:
        """Returns the graph of a stage, without parameters that torch has left under other names of tied parameters."""
        graph = self._pipe.get_stage_module(stage)
        assert isinstance(graph, GraphModule)
        used_somewhere = {name for other in self._names for name in _used(self._pipe.split_gm.get_submodule(other))}
        names = {name for name, _ in graph.named_parameters(remove_duplicate=False)}
        for name in (names & used_somewhere).difference(_used(graph)):
            owner, _, last_name = name.rpartition(".")
            graph.get_submodule(owner)._parameters.pop(last_name)
        return graph

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """Returns the parameters that PyTorch has copied into several stages, as groups for `Pipeline(tied=...)`."""
        self._refuse_other(num_stages)
        return [[(self._names.index(stage), name) for stage, name in group.items()] for group in self._pipe.replicated_params]

    def _refuse_other(self, num_stages: int) -> None:
        if num_stages != self._pipe.num_stages:
            raise InputError(
                "the Pipe of torch.distributed.pipelining has {got_stages} stages, and the schedule has {num_stages}",
                got_stages=self._pipe.num_stages,
                num_stages=num_stages,
                remedy="split it into as many, or give zb.split the model itself",
            )

    def _used_later(self, stage: int) -> list[str]:
        """Returns the names of the values that later stages need from here or before, including arguments of the model."""
        computed = [node for node in self._nodes if node.op != "output" and self._stage_of[node] <= stage]
        return [node.name for node in computed if any(self._is_behind(user, stage) for user in node.users)]

    def _is_behind(self, user: Node, stage: int) -> bool:
        last = self._pipe.num_stages - 1
        return (last if user.op == "output" else self._stage_of[user]) > stage


class _PipeStage(nn.Module):
    """A stage that runs its graph on values from earlier stages, and sends the values that later stages need, by name."""

    def __init__(self, graph: GraphModule, steps: list[Node], later: list[str], result: Any, inputs: list[str], stage: int) -> None:
        super().__init__()
        self._graph = (graph,)  # in a tuple, so that it is not registered as a submodule
        self._steps = tuple(steps)
        self._later = tuple(later)
        self._result = result
        self._inputs = inputs
        self._stage = stage
        self._modes = frozenset(_modes(graph))
        for held in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[held] = graph.__dict__[held]
        self.training = True

    def forward(self, *args: Any, **values: Any) -> Any:
        if not self.training and True in self._modes:
            raise InputError(
                "the Pipe was traced in training mode, and its graph has dropout or running statistics of that mode, in evaluation, too",
                remedy="give zb.split the model itself, with pipe_split() where stages begin, or trace it in evaluation mode",
            )
        values = _by_name(self._inputs, args, values) if self._stage == 0 else self._handed_on(values)
        for node in self._steps:
            arguments: Any = map_arg(node.args, lambda node_read: values[node_read.name])
            values[node.name] = self._graph[0](*arguments) if node.op == "call_module" else arguments[0][arguments[1]]
        if self._result is not None:
            return map_arg(self._result, lambda node_read: values[node_read.name])
        return {f"{_PREFIX}{name}": values[name] for name in self._later}

    def _handed_on(self, received: dict[str, Any]) -> dict[str, Any]:
        """Returns the values received from earlier stages; arguments of the Pipe passed to later ranks are ignored."""
        unknown = sorted(name for name in received if not name.startswith(_PREFIX) and name not in self._inputs)
        if unknown:
            raise InputError(
                "step(kwargs=...) gives {own} to stage {stage}, and the Pipe takes {inputs}",
                own=", ".join(map(repr, unknown)),
                stage=self._stage,
                inputs=", ".join(self._inputs),
                remedy="give its arguments on the rank of the first stage",
            )
        return {name.removeprefix(_PREFIX): value for name, value in received.items() if name.startswith(_PREFIX)}


def _by_name(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if set(arguments) != set(names) or len(args) + len(kwargs) != len(names):
        raise InputError(
            "the Pipe is called with {names}, got {num_args} positional arguments and {kwargs}",
            names=", ".join(names),
            num_args=len(args),
            kwargs=sorted(kwargs),
        )
    return arguments


def _graphs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, part.graph) for name, part in module.named_modules() if hasattr(part, "graph"))


def _used(module: nn.Module) -> Iterator[str]:
    """Yields the names of the tensors that the graphs in `module` use."""
    for owner, graph in _graphs(module):
        yield from (f"{owner}.{node.target}" if owner else str(node.target) for node in graph.nodes if node.op == "get_attr")


def _modes(module: nn.Module) -> Iterator[bool]:
    """Yields the mode arguments of operations in the graphs of `module`."""
    for _, graph in _graphs(module):
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for argument, value in zip(schema.arguments if schema is not None else (), node.args, strict=False):
                if argument.name in _MODES and isinstance(value, bool):
                    yield value
